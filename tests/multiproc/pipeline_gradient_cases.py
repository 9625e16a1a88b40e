"""Gradients of pipelines whose ranks share values, parameters and losses, against one process. Six ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from meshcast.pipelining import Edge, PipelineStage, ScheduleZBV
from multiproc.pipeline_loss_cases import CASES as LOSS_CASES
from multiproc.pipeline_models import (
    CPU,
    TIMEOUT,
    batch,
    check_gradients,
    in_a_row,
    mlp,
    place,
    schedule_for,
    train_alone,
)
from multiproc.pipeline_size_cases import CASES as SIZE_CASES
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.nn.parallel import DistributedDataParallel

mse = nn.functional.mse_loss
SHARD, WHOLE = [Shard(0)], [Replicate()]


# ---- values that are whole on data-parallel ranks --------------------------------------------------------


class Bias(nn.Module):
    """A first stage with an output made of parameters alone."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.bias = body, nn.Parameter(torch.linspace(0.1, 1.0, 6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.body(x), self.bias.sin()


class Contrast(nn.Module):
    """Its own rows against all rows."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, mine: torch.Tensor, every: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.body(mine) @ every.t(), dim=1) @ every + bias


def whole_values_case(name: str, sizes: Sequence[int], **options: Any):
    """Output 0 goes to the last stage twice: in shards and as a whole. Output 1 is whole on both sides."""

    def case(_) -> None:
        here = place(in_a_row(sizes))
        if here is None:
            return
        reference, mine = ([Bias(mlp(2)[0]), Contrast(mlp(2)[1])] for _ in range(2))
        x, y = batch(12)

        def run(part: torch.Tensor) -> torch.Tensor:
            hidden, bias = reference[0](part)
            return reference[1](hidden, hidden, bias)

        train_alone(run, x, y, 2)
        placements: dict[str, Any] = (
            {"output_placements": [SHARD, WHOLE]}
            if here.stage == 0
            else {"input_placements": [SHARD, WHOLE, WHOLE]}
        )
        stage = PipelineStage(
            mine[here.stage], here.stage, 2, CPU, group=here.group, mesh=here.mesh,
            edges=[Edge(0, 0, 1, 0), Edge(0, 0, 1, 1), Edge(0, 1, 1, 2)], **placements,
        )  # fmt: skip
        schedule_for(name, stage, 2, **options).step(x, target=y)
        check_gradients(mine[here.stage], reference[here.stage])

    case.__name__ = f"whole_values_{name}_{'_'.join(map(str, sizes))}{'_'.join(['', *options])}"
    return case


def whole_values_of_dtensors(_) -> None:
    """DTensors say by themselves what is still to be summed."""
    here = place(in_a_row([1, 3]))
    if here is None:
        return
    reference, mine = ([Bias(mlp(2)[0]), Contrast(mlp(2)[1])] for _ in range(2))
    x, y = batch(6)

    def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    def run(part: torch.Tensor) -> torch.Tensor:
        hidden, bias = reference[0](part)
        return reference[1](hidden, hidden, bias)

    train_alone(run, x, y, 2, mean_square)
    module: nn.Module = mine[here.stage]
    options: dict[str, Any] = {"output_placements": [SHARD, WHOLE]}
    if here.stage:
        module = distribute_module(module, here.mesh)
        options = {"input_placements": [SHARD, WHOLE, WHOLE], "use_dtensor": True}
    stage = PipelineStage(
        module, here.stage, 2, CPU, group=here.group, mesh=here.mesh,
        edges=[Edge(0, 0, 1, 0), Edge(0, 0, 1, 1), Edge(0, 1, 1, 2)], **options,
    )  # fmt: skip
    schedule_for("1F1B", stage, 2, mean_square).step(x, target=y)
    check_gradients(module, reference[here.stage])


class Guided(nn.Module):
    """A stage between two: passes on what depends on its input, and what depends on parameters alone."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.query = body, nn.Parameter(torch.linspace(0.2, 1.0, 6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(x), (self.query * self.query).sin()


class Scaled(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return self.body(x * query)


def parameters_alone_case(name: str, **options: Any):
    """Where the backward is split, a root that depends on no input is one all the same."""

    def case(_) -> None:
        rows = [[0, 3], [1, 2]] if name == "ZBV" else [[0], [1], [2]]
        count = sum(map(len, rows))
        here = place(in_a_row([1] * len(rows)))
        if here is None:
            return

        def build() -> list[nn.Module]:
            bodies = mlp(count)
            return [bodies[0], Guided(bodies[1]), Scaled(bodies[2]), *bodies[3:]]

        reference, mine = build(), build()
        x, y = batch(8)

        def run(part: torch.Tensor) -> torch.Tensor:
            value = reference[2](*reference[1](reference[0](part)))
            return reference[3](value) if count == 4 else value

        train_alone(run, x, y, 4)
        stages = [
            PipelineStage(mine[index], index, count, CPU, group=here.group, mesh=here.mesh)
            if index != 1
            else PipelineStage(
                mine[1], 1, count, CPU, group=here.group, mesh=here.mesh, output_placements=[SHARD, WHOLE]
            )
            for index in rows[here.stage]
        ]
        schedule_for(name, stages if len(stages) > 1 else stages[0], 4, **options).step(x, target=y)
        for index in rows[here.stage]:
            check_gradients(mine[index], reference[index])

    case.__name__ = f"parameters_alone_{name}{'_'.join(['', *options])}"
    return case


# ---- one parameter in two stages of a rank ---------------------------------------------------------------


def a_parameter_in_two_stages_of_a_rank(_) -> None:
    here = place(in_a_row([3, 2]))
    if here is None:
        return

    def build() -> list[nn.Module]:
        bodies = mlp(4)
        bodies[3][2].weight = bodies[0][2].weight
        return bodies

    reference, mine = build(), build()
    x, y = batch(12)
    train_alone(nn.Sequential(*reference), x, y, 4)
    stages = [
        PipelineStage(mine[index], index, 4, CPU, group=here.group, mesh=here.mesh)
        for index in ([0, 3], [1, 2])[here.stage]
    ]
    for by_step in (True, False):
        for stage in stages:
            stage.submod.zero_grad()
        schedule = ScheduleZBV(stages, 4, loss_fn=mse, timeout=TIMEOUT, sync_gradients=by_step)
        schedule.step(x, target=y)
        if not by_step:
            for stage in stages:
                stage.sync_gradients()
        for stage in stages:
            check_gradients(stage.submod, reference[stage.stage_index])


# ---- wrappers --------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Nested modules, with a parameter of its own and a buffer that a forward changes."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(2, dtype=dtype, seed=seed))
        self.scale = nn.Parameter(torch.full((6,), 1.5, dtype=dtype))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks:
            x = x + block(x)
        return x * self.scale


def sharded(module: Blocks, mesh: DeviceMesh, nested: bool) -> nn.Module:
    if nested:
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def alone_in_float64(x: torch.Tensor, y: torch.Tensor, microbatches: int) -> list[Blocks]:
    """The reference of two stages of Blocks: values of `x.dtype` parameters, arithmetic in float64."""
    reference = [Blocks(x.dtype, seed).double() for seed in range(2)]
    train_alone(nn.Sequential(*reference), x.double(), y.double(), microbatches)
    return reference


def difference(module: nn.Module, reference: nn.Module) -> float:
    """Largest relative difference of a gradient."""
    found = []
    for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        grad = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        found.append(((grad.double() - theirs.grad.double()).norm() / theirs.grad.double().norm()).item())
    return max(found)


def fsdp_case(dtype: torch.dtype, nested: bool, hybrid: bool = False):
    """FSDP2 over a stage's own ranks, no shapes given: gradients are those of the global batch. Training and
    evaluation in turn, by two schedules."""

    def case(_) -> None:
        here = place([[[0, 1], [2, 3]] if hybrid else [0, 1, 2], [4, 5]])
        if here is None:
            return
        x, y = batch(12, dtype=dtype)
        reference = alone_in_float64(x, y, 2)
        expected = reference[here.stage]
        coarse = [Blocks(dtype, seed) for seed in range(2)]
        train_alone(nn.Sequential(*coarse), x, y, 2)
        options: dict[str, Any] = {}
        if here.mesh.ndim == 2:
            split = [Shard(0), Shard(0)]
            options = {"input_placements": split, "output_placements": split}
        module = sharded(Blocks(dtype, here.stage), here.mesh, nested)
        stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh, **options)
        schedules = [schedule_for(name, stage, 2) for name in ("1F1B", "GPipe")]
        limit = 1e-5 if dtype == torch.float32 else 4 * difference(coarse[here.stage], expected)
        for schedule in (schedules[0], schedules[0], schedules[1]):
            module.zero_grad()
            schedule.eval(x[:6])
            schedule.step(x, target=y)
            schedules[1].eval(x)
            found = difference(module, expected)
            assert found <= limit, f"gradients differ by {found}, allowed {limit}"
        assert int(module.calls) == 3 * 3 * 2, "the inference of shapes ran the module"

    kind = "hybrid" if hybrid else "nested" if nested else "flat"
    case.__name__ = f"fsdp_{kind}_{str(dtype).removeprefix('torch.')}"
    return case


def columns_case(wrapper: str):
    """torch's way: a pipeline in each of three data-parallel columns; gradients are the mean over these."""

    def case(context) -> None:
        column, index = context.rank % 3, context.rank // 3
        groups = [dist.new_group([each, each + 3]) for each in range(3)]
        meshes = [DeviceMesh("cpu", list(ranks)) for ranks in ((0, 1, 2), (3, 4, 5))]
        dtype = torch.float32
        x, y = batch(12, dtype=dtype)
        reference = alone_in_float64(x, y, 3)
        module: nn.Module = Blocks(dtype, index)
        if wrapper == "ddp":
            module = DistributedDataParallel(module, process_group=meshes[index].get_group())
        else:
            module = sharded(module, meshes[index], wrapper == "nested")
        stage = PipelineStage(module, index, 2, CPU, group=groups[column])
        schedule = schedule_for("1F1B", stage, 2)
        for _ in range(2):
            module.zero_grad()
            schedule.step(x.chunk(3)[column], target=y.chunk(3)[column])
            found = difference(module, reference[index])
            assert found <= 1e-5, f"gradients differ by {found}"

    case.__name__ = f"columns_{wrapper}"
    return case


CASES = [
    *[whole_values_case("1F1B", sizes) for sizes in ((1, 2), (2, 1), (2, 3), (3, 3))],
    whole_values_case("ZBH1", (2, 3)),
    whole_values_of_dtensors,
    *[parameters_alone_case(name) for name in ("1F1B", "ZBH1", "ZBH2", "ZBV")],
    parameters_alone_case("Eager1F1B", delay_weight_grad=True),
    a_parameter_in_two_stages_of_a_rank,
    *[fsdp_case(dtype, nested) for dtype in (torch.float32, torch.bfloat16) for nested in (False, True)],
    fsdp_case(torch.float32, True, hybrid=True),
    *[columns_case(wrapper) for wrapper in ("ddp", "flat", "nested")],
    *LOSS_CASES,
    *SIZE_CASES,
]
