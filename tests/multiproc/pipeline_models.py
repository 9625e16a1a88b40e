"""Models in stages, their single-process reference, and what a rank needs to run its stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from meshcast.pipelining import PipelineStage, get_schedule_class
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

CPU = torch.device("cpu")
TIMEOUT = 20.0  # seconds, of every pipeline here


def mlp(
    stages: int, width: int = 6, dtype: torch.dtype = torch.float64, seed: int = 0, hidden: int = 9
) -> list[nn.Module]:
    """The same parameters on every rank."""
    torch.manual_seed(seed)
    return [
        nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width)).to(dtype)
        for _ in range(stages)
    ]


def batch(
    rows: int, width: int = 6, dtype: torch.dtype = torch.float64, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(rows, width, dtype=dtype), torch.randn(rows, width, dtype=dtype)


@dataclass
class Reference:
    """What one process gets: loss and output of each micro-batch; gradients are left in the modules."""

    losses: list[float] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)


def train_alone(
    run: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    microbatches: int,
    loss_fn: Callable[..., torch.Tensor] = nn.functional.mse_loss,
    as_torch: Sequence[nn.Module] = (),
) -> Reference:
    """as_torch: modules whose gradients are scaled as those of stages without mesh=: once, after all sums."""
    reference = Reference()
    scale = 1 if as_torch else microbatches
    for part, target in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        output = run(part)
        loss = loss_fn(output, target)
        (loss / scale).backward()
        reference.losses.append(loss.item())
        reference.outputs.append(output.detach())
    scale_once(as_torch, microbatches)
    return reference


def scale_once(modules: Sequence[nn.Module], microbatches: int) -> None:
    """As torch does when a step ends: all that is in ``grad``."""
    for module in modules:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(microbatches)


@dataclass
class Place:
    """Where this rank is: its stage and mesh, and the group of all ranks of the pipeline."""

    stage: int
    mesh: DeviceMesh
    group: dist.ProcessGroup


def place(meshes: Sequence[Sequence]) -> Place | None:
    """Makes the meshes of all stages and the group of the pipeline. None on a rank in no mesh."""
    made = []
    for ranks in map(torch.tensor, meshes):
        made.append(DeviceMesh("cpu", ranks, mesh_dim_names=("data", "tensor")[: ranks.dim()]))
    ranks = sorted(int(rank) for mesh in made for rank in mesh.mesh.flatten())
    group = dist.new_group(ranks)
    for stage, mesh in enumerate(made):
        if dist.get_rank() in mesh.mesh.flatten().tolist():
            return Place(stage, mesh, group)
    return None


def in_a_row(sizes: Sequence[int]) -> list[list[int]]:
    """Meshes of these sizes over ranks 0, 1, 2, ..."""
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


def schedule_of(
    name: str,
    here: Place,
    module: nn.Module,
    stages: int,
    microbatches: int,
    loss_fn=nn.functional.mse_loss,
    **stage,
):
    """A schedule on this rank; keyword arguments go to the stage."""
    made = PipelineStage(module, here.stage, stages, CPU, group=here.group, mesh=here.mesh, **stage)
    return get_schedule_class(name)(made, microbatches, loss_fn=loss_fn, timeout=TIMEOUT)


def columns(rank: int) -> tuple[list[nn.Module], PipelineStage, torch.Tensor, torch.Tensor]:
    """Two pipelines of two stages, ranks 0 and 2, and 1 and 3. FSDP2 is over ranks 0 and 1, and 2 and 3, and
    averages over them: the gradient of the mean over all samples.

    Returns:
        The modules of one process, this rank's stage, the samples of both pipelines.
    """
    reference, module = mlp(2, hidden=7), mlp(2, hidden=7)[rank // 2]
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    meshes = [DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [2, 3])]
    shapes = torch.empty(3, 6, dtype=torch.float64, device="meta")
    stage = PipelineStage(module, rank // 2, 2, CPU, group=groups[rank % 2], output_args=shapes)
    fully_shard(module, mesh=meshes[rank // 2])
    return reference, stage, *batch(12)


def largest_difference(module: nn.Module, other: nn.Module) -> float:
    """Over the gradients of all parameters."""
    differences = []
    for (name, mine), theirs in zip(module.named_parameters(), other.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), f"{name}: a gradient is missing on one side"
        if mine.grad is not None:
            full = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
            differences.append((full - theirs.grad).abs().max().item())
    return max(differences, default=0.0)


def schedule_for(name: str, stage, microbatches: int, loss_fn=nn.functional.mse_loss, **options):
    """A schedule of a stage, or of this rank's stages."""
    return get_schedule_class(name)(stage, microbatches, loss_fn=loss_fn, timeout=TIMEOUT, **options)


def check_gradients(module: nn.Module, reference: nn.Module, tolerance: float = 1e-12) -> None:
    difference = largest_difference(module, reference)
    assert difference <= tolerance, f"gradients differ by {difference}"
