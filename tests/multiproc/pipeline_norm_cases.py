"""The norm of the gradients of all stages and clipping by it: as torch has them in one process. Four ranks;
pipeline_scaler_cases.py has the cases of GradScaler."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from meshcast.errors import LayoutError
from meshcast.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleZBV,
    clip_grad_norm_,
    grad_norm,
)
from multiproc.pipeline_fault_cases import raises
from multiproc.pipeline_models import (
    CPU,
    TIMEOUT,
    batch,
    columns,
    in_a_row,
    largest_difference,
    mlp,
    place,
    train_alone,
)
from multiproc.pipeline_scaler_cases import CASES as SCALER_CASES
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

mse = nn.functional.mse_loss
ORDERS = (2.0, 1.0, 3.0, math.inf)


def same_bits(value: torch.Tensor, group: Any = None) -> None:
    """Every rank has this value to the last bit."""
    every = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, value, group=group)
    assert all(torch.equal(each, value) for each in every), [each.item() for each in every]


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float, what: object) -> None:
    error = abs(found.item() - expected.item()) / expected.item()
    assert error <= tolerance, f"{what}: found {found.item()}, expected {expected.item()}, off by {error}"


def measured(parameters: Iterable[nn.Parameter], order: float) -> torch.Tensor:
    """By torch, in one process; in float64, since the norm of bfloat16 gradients has three digits there."""
    gradients = [parameter.grad.double() for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients, order)


def check(
    stages: Sequence[PipelineStage],
    reference: Sequence[nn.Module],
    *,
    tolerance: float = 1e-12,
    bits_in: Any = None,
) -> None:
    """Norms of several orders and clipped gradients are those of one process that has all modules."""
    whole = nn.ModuleList(reference)
    for order in ORDERS:
        norm = grad_norm(stages, order)
        assert norm.shape == () and norm.device == CPU, norm
        same_bits(norm, bits_in)
        close(norm, measured(whole.parameters(), order), tolerance, f"norm {order}")
    before = [each.clone() for each in _local_gradients(stages)]
    clip_grad_norm_(stages, 1e6)
    assert all(map(torch.equal, before, _local_gradients(stages))), "clipped though below the limit"
    for order, part in ((2.0, 0.5), (math.inf, 0.7)):
        expected = measured(whole.parameters(), order)
        limit = part * expected.item()
        found = clip_grad_norm_(stages, limit, order)
        close(found, expected, tolerance, "the norm that clipping returns")
        torch.nn.utils.clip_grad_norm_(whole.parameters(), limit, order)
        close(grad_norm(stages, order), torch.tensor(limit), max(tolerance, 1e-4), "the norm after clipping")
        for stage in stages:
            difference = largest_difference(stage.submod, reference[stage.stage_index])
            assert difference <= tolerance * max(1.0, limit), f"clipped gradients differ by {difference}"


def _local_gradients(stages: Sequence[PipelineStage]) -> list[torch.Tensor]:
    every = [p.grad for stage in stages for p in stage.submod.parameters() if p.grad is not None]
    return [each.to_local() if isinstance(each, DTensor) else each for each in every]


# ---- meshes and types ------------------------------------------------------------------------------------


def unlike_meshes_case(dtype: torch.dtype, tolerance: float):
    """A stage of one rank, then one of three that is data parallel and inside DDP."""

    def case(_) -> None:
        here = place([[0], [1, 2, 3]])
        reference, module = mlp(2, dtype=dtype), mlp(2, dtype=dtype)[here.stage]
        x, y = batch(24, dtype=dtype)
        train_alone(nn.Sequential(*reference), x, y, 4)
        if here.stage == 1:
            module = DistributedDataParallel(module, process_group=here.mesh.get_group())
        stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
        Schedule1F1B(stage, 4, loss_fn=mse, timeout=TIMEOUT).step(x, target=y)
        check([stage], reference, tolerance=tolerance)

    case.__name__ = f"unlike_meshes_{dtype}".replace("torch.", "")
    return case


def one_stage_and_several_ranks(_) -> None:
    """A stage instead of a list; without foreach, clipping gives the same."""
    here = place([[3, 1, 2, 0]])
    reference, module = mlp(1), mlp(1)[0]
    x, y = batch(24)
    train_alone(nn.Sequential(*reference), x, y, 2)
    stage = PipelineStage(module, 0, 1, CPU, group=here.group, mesh=here.mesh)
    ScheduleGPipe(stage, 2, loss_fn=mse, timeout=TIMEOUT).step(x, target=y)
    expected = torch.nn.utils.clip_grad_norm_(reference[0].parameters(), 0.01)
    close(clip_grad_norm_(stage, 0.01, foreach=False), expected, 1e-12, "norm")
    assert largest_difference(module, reference[0]) <= 1e-15


# ---- parameters in several stages ------------------------------------------------------------------------


def one_parameter_in_two_stages_of_a_rank(context) -> None:
    """ZBV: the first and the last stage, on one rank, have one embedding."""
    reference, mine = mlp(8), mlp(8)
    for modules in (reference, mine):
        modules[7][0].weight = modules[0][0].weight
    x, y = batch(8)
    train_alone(nn.Sequential(*reference), x, y, 8)
    group = dist.new_group()
    stages = [
        PipelineStage(mine[index], index, 8, CPU, group=group) for index in (context.rank, 7 - context.rank)
    ]
    ScheduleZBV(stages, 8, loss_fn=mse, timeout=TIMEOUT).step(x, target=y)
    check(stages, reference)


SHARING = {"a": (0, 2, 7), "b": (1, 6), "c": (3, 5)}  # stages; 0 and 7, 1 and 6, 2 and 5 are on one rank


def shared_parameters(context) -> None:
    """ZBV: copies on one rank and on several; one key whose copies on a rank are one parameter."""
    reference, mine = mlp(8), mlp(8)
    for stages in SHARING.values():
        for stage in stages[1:]:
            reference[stage][0].weight = reference[stages[0]][0].weight
            with torch.no_grad():
                mine[stage][0].weight.copy_(mine[stages[0]][0].weight)
    mine[7][0].weight = mine[0][0].weight
    x, y = batch(8)
    train_alone(nn.Sequential(*reference), x, y, 8)
    group = dist.new_group()
    stages = [
        PipelineStage(
            mine[index],
            index,
            8,
            CPU,
            group=group,
            shared_parameters={key: "0.weight" for key, sharing in SHARING.items() if index in sharing},
        )
        for index in (context.rank, 7 - context.rank)
    ]
    schedule = ScheduleZBV(stages, 8, loss_fn=mse, timeout=TIMEOUT)
    raises(LayoutError, ": expected stages whose schedule has run", call=lambda: grad_norm(stages))
    schedule.step(x, target=y)
    check(stages, reference)


# ---- DTensor parameters ----------------------------------------------------------------------------------


def tensor_parallel(_) -> None:
    """(2, 2): data x tensor parallel. One rank of each shard counts."""
    here = place([[[0, 1], [2, 3]]])
    reference, module = mlp(1, hidden=8), mlp(1, hidden=8)[0]
    x, y = batch(12)
    train_alone(nn.Sequential(*reference), x, y, 3)
    parallelize_module(module, here.mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    stage = PipelineStage(module, 0, 1, CPU, group=here.group, mesh=here.mesh)
    ScheduleGPipe(stage, 3, loss_fn=mse, timeout=TIMEOUT).step(x, target=y)
    check([stage], reference)


def every_placement(_) -> None:
    """Gradients laid out by hand, on meshes whose dimensions have names of their own."""
    here = place([[[0, 1], [2, 3]]])
    own = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("x", "y"))
    turned = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("p", "q"))
    replicate, shard = Replicate(), Shard(0)
    layouts = [
        (own, (shard, shard)),
        (own, (replicate, Shard(1))),
        (own, (shard, replicate)),
        (own, (replicate, replicate)),
        (turned, (replicate, shard)),
        (turned, (Shard(1), replicate)),
        (own["x"], (shard,)),
        (own["x"], (replicate,)),
        (own["y"], (shard,)),
        (turned["q"], (shard,)),
        (None, ()),
    ]
    torch.manual_seed(7)
    module, full = nn.Module(), []
    for number, (mesh, placements) in enumerate(layouts):
        shape = (
            (1, 4) if mesh is not None and mesh.ndim == 1 else (5, 3)
        )  # one row over two ranks: one is empty
        full.append(nn.Parameter(torch.randn(shape, dtype=torch.float64)))
        full[-1].grad = torch.randn(shape, dtype=torch.float64)
        parameter = nn.Parameter(full[-1].detach().clone())
        parameter.grad = full[-1].grad.clone()
        if mesh is not None:
            parameter = nn.Parameter(distribute_tensor(parameter.data, mesh, placements))
            gradient = full[-1].grad.clone()
            if number in (1, 7):  # pending: one rank has all of it, the other the opposite of a part
                part = gradient * (3.0 if mesh.get_local_rank(0) == 0 else -2.0)
                pending = DTensor.from_local(part, mesh["x"], (Partial(),), run_check=False)
                if number == 1:
                    part = part.chunk(2, 1)[0 if mesh.get_local_rank(1) == 0 else 1].contiguous()
                    shape = gradient.shape
                    pending = DTensor.from_local(
                        part, mesh, (Partial(), Shard(1)), run_check=False, shape=shape, stride=(3, 1)
                    )
                parameter.grad = pending
            else:
                parameter.grad = distribute_tensor(gradient, mesh, placements)
        module.register_parameter(f"p{number}", parameter)
    stage = PipelineStage(module, 0, 1, CPU, group=here.group, mesh=here.mesh)
    assert ScheduleGPipe(stage, 1, timeout=TIMEOUT).actions
    reference = nn.Module()
    reference.p = nn.ParameterList(full)
    check([stage], [reference])


def fsdp_case(sizes: tuple[int, int]):
    """FSDP2 with mesh=: shards of different size and empty ones, on one of the stages."""

    def case(_) -> None:
        here = place(in_a_row(sizes))
        reference, module = (mlp(2, width=4, hidden=7) for _ in range(2))
        module, more = module[here.stage], {}
        x, y = batch(24, width=4)
        train_alone(nn.Sequential(*reference), x, y, 4)
        if here.mesh.size() == 3:
            fully_shard(module, mesh=here.mesh)
            more = {"output_args": torch.empty(2, 4, dtype=torch.float64, device="meta")}
        stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh, **more)
        Schedule1F1B(stage, 4, loss_fn=mse, timeout=TIMEOUT).step(x, target=y)
        check([stage], reference)

    case.__name__ = f"fsdp_on_{sizes[0]}_and_{sizes[1]}_ranks"
    return case


def fsdp_over_tensor_parallel(_) -> None:
    """Parameters that both cut along one dimension (_StridedShard)."""
    here = place([[[0, 1], [2, 3]]])
    reference, module = mlp(1, hidden=8), mlp(1, hidden=8)[0]
    x, y = batch(12)
    train_alone(nn.Sequential(*reference), x, y, 3)
    parallelize_module(module, here.mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(module, mesh=here.mesh["data"])
    shapes = torch.empty(2, 6, dtype=torch.float64, device="meta")
    stage = PipelineStage(module, 0, 1, CPU, group=here.group, mesh=here.mesh, output_args=shapes)
    ScheduleGPipe(stage, 3, loss_fn=mse, timeout=TIMEOUT).step(x, target=y)
    assert any("Strided" in repr(p.placements) for p in module.parameters())
    check([stage], reference)


def fsdp_over_columns(context) -> None:
    """Two pipelines, one for each half of the samples; FSDP2 joins the same stage of both."""
    reference, stage, x, y = columns(context.rank)
    schedule = Schedule1F1B(stage, 2, loss_fn=mse, timeout=TIMEOUT)
    schedule.step(x.chunk(2)[context.rank % 2], target=y.chunk(2)[context.rank % 2])
    train_alone(nn.Sequential(*reference), x, y, 1)
    check([stage], reference)


def fsdp_over_columns_of_several_ranks(context) -> None:
    """One stage on two ranks, tensor parallel, in each of two pipelines."""
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("replicas", "tensor"))
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    reference, module = mlp(1, hidden=8), mlp(1, hidden=8)[0]
    x, y = batch(12)
    train_alone(nn.Sequential(*reference), x, y, 1)
    parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    column, shapes = context.rank // 2, torch.empty(3, 6, dtype=torch.float64, device="meta")
    stage = PipelineStage(
        module,
        0,
        1,
        CPU,
        group=groups[column],
        mesh=mesh["tensor"],
        input_placements=[Replicate()],
        output_placements=[Replicate()],
        output_args=shapes,
    )
    fully_shard(module, mesh=mesh["replicas"])
    schedule = ScheduleGPipe(stage, 2, loss_fn=mse, timeout=TIMEOUT)
    schedule.step(x.chunk(2)[column], target=y.chunk(2)[column])
    check([stage], reference)


# ---- gradients that are missing or not finite ------------------------------------------------------------


def ranks_without_gradients(context) -> None:
    reference, module = mlp(4), mlp(4)[context.rank]
    x, y = batch(8)
    train_alone(nn.Sequential(*reference), x, y, 2)
    stage = PipelineStage(module, context.rank, 4, CPU, group=dist.new_group())
    Schedule1F1B(stage, 2, loss_fn=mse, timeout=TIMEOUT).step(x, target=y)
    for index in (0, 2):
        reference[index].zero_grad()
        if context.rank == index:
            module.zero_grad()
    check([stage], reference)
    module.zero_grad()
    for order in ORDERS:
        assert clip_grad_norm_(stage, 1.0, order).item() == 0.0


def columns_without_gradients(context) -> None:
    """A rank that has no gradient of a parameter that other ranks have takes part in its sum."""
    _, stage, x, y = columns(context.rank)
    schedule = Schedule1F1B(stage, 2, loss_fn=mse, timeout=TIMEOUT)
    schedule.step(x.chunk(2)[context.rank % 2], target=y.chunk(2)[context.rank % 2])
    if context.rank == 1:
        stage.submod.zero_grad()
    same_bits(grad_norm(stage))


def not_finite(context) -> None:
    """Found on one rank, known to all; only there and only if it is asked for is it an error."""
    module = mlp(4)[context.rank]
    stage = PipelineStage(module, context.rank, 4, CPU, group=dist.new_group())
    x, y = batch(8)
    Schedule1F1B(stage, 2, loss_fn=mse, timeout=TIMEOUT).step(x, target=y)
    for value, holder in ((math.nan, 1), (math.inf, 2), (math.nan, 0), (math.nan, 3)):
        saved = module[0].weight.grad.clone()
        if context.rank == holder:
            module[0].weight.grad[0, 0] = value
        for order in ORDERS:
            norm = grad_norm(stage, order).item()
            assert math.isnan(norm) if math.isnan(value) else norm == value, (value, order, norm)
            raises(
                RuntimeError,
                f"clip_grad_norm_ on rank {context.rank}: expected a finite norm of order {order}",
                "error_if_nonfinite=False",
                call=lambda order=order: clip_grad_norm_(stage, 1.0, order, error_if_nonfinite=True),
            )
        module[0].weight.grad.copy_(saved)
    assert math.isfinite(clip_grad_norm_(stage, 1.0, error_if_nonfinite=True).item())
    module[0].weight.grad.fill_(math.inf)
    clip_grad_norm_(stage, 1.0)
    assert module[2].weight.grad.count_nonzero() == 0, "a finite gradient over an infinite norm"


def small_types_are_measured_in_wider_ones(context) -> None:
    """4032 gradients of 1 + 1/128 on each rank: bfloat16 has no room for their sum, nor for its root."""
    module = nn.Linear(64, 63, bias=False, dtype=torch.bfloat16)
    stage = PipelineStage(module, context.rank, 4, CPU, group=dist.new_group())
    assert Schedule1F1B(stage, 2, timeout=TIMEOUT).actions
    module.weight.grad = torch.full((63, 64), 1 + 1 / 128, dtype=torch.bfloat16)
    assert grad_norm(stage, 1.0).item() == 4 * 4032 * (1 + 1 / 128)
    close(grad_norm(stage), torch.tensor(math.sqrt(4 * 4032) * (1 + 1 / 128)).double(), 1e-7, "norm 2")


def what_is_no_stage_is_refused(context) -> None:
    group, other = dist.new_group(), dist.new_group()
    stages = [PipelineStage(mlp(8)[index], index, 8, CPU, group=group) for index in (0, 7)]
    stranger = PipelineStage(mlp(8)[1], 1, 8, CPU, group=other)
    rank = f"clip_grad_norm_ on rank {context.rank}: expected"
    for given, words in (
        ([], ("at least one stage, found none",)),
        (mlp(1)[0], ("a meshcast.pipelining.PipelineStage", "found Sequential")),
        ([stages[0], mlp(1)[0]], ("found Sequential",)),
        (3, ("found int",)),
        ([*stages, stranger], ("different groups: stage 0 has", "stage 1 has")),
    ):
        raises(LayoutError, rank, *words, call=lambda given=given: clip_grad_norm_(given, 1.0))
    for order in (0.0, -1.0, -math.inf, math.nan, "two", None):
        raises(
            LayoutError,
            f"grad_norm on rank {context.rank}: expected a norm_type above 0 or inf, found {order!r}",
            call=lambda order=order: grad_norm(stages, order),
        )
    words = ("expected stages whose schedule has run, found stage 0 before its first step",)
    raises(LayoutError, *words, call=lambda: clip_grad_norm_(stages, 1.0))


CASES = [
    unlike_meshes_case(torch.float64, 1e-12),
    unlike_meshes_case(torch.float32, 1e-6),
    unlike_meshes_case(torch.bfloat16, 2e-2),
    one_stage_and_several_ranks,
    one_parameter_in_two_stages_of_a_rank,
    shared_parameters,
    tensor_parallel,
    every_placement,
    fsdp_case((1, 3)),
    fsdp_case((3, 1)),
    fsdp_over_tensor_parallel,
    fsdp_over_columns,
    fsdp_over_columns_of_several_ranks,
    ranks_without_gradients,
    columns_without_gradients,
    not_finite,
    small_types_are_measured_in_wider_ones,
    what_is_no_stage_is_refused,
    *SCALER_CASES,
]
