"""Every schedule over every kind of pipeline trains as one process does: different meshes, tensor
parallelism, skip connections, tied embeddings. Seven ranks."""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch
import torch.distributed as dist
from meshcast.pipelining import Edge, PipelineStage, get_schedule_class
from multiproc.pipeline_models import CPU, TIMEOUT, largest_difference, mlp, train_alone
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

MICROBATCHES = 4
ROWS = 12  # 3 in a micro-batch: of 4 ranks the last has none
TOKENS = 7
WIDTH = 6

# Schedules with one stage on each rank: label, class, options.
SINGLE = {
    "gpipe": ("GPipe", {}),
    "1f1b": ("1F1B", {}),
    "1f1b_no_overlap": ("1F1B", {"overlap": False}),
    "1f1b_delayed": ("1F1B", {"delay_weight_grad": True}),
    "eager": ("Eager1F1B", {}),
    "eager_delayed": ("Eager1F1B", {"delay_weight_grad": True}),
    "eager_auto": ("Eager1F1B", {"warmup": "auto", "memory_budget": 4}),
    "zbh1": ("ZBH1", {}),
    "zbh2": ("ZBH2", {}),
}
# With two: the stages of each row of the schedule as well.
DOUBLE = {
    "interleaved": ("Interleaved1F1B", {}, [[0, 2], [1, 3]]),
    "interleaved_eager": ("Interleaved1F1B", {"warmup": "eager"}, [[0, 2], [1, 3]]),
    "interleaved_delayed": ("Interleaved1F1B", {"delay_weight_grad": True}, [[0, 2], [1, 3]]),
    "zbv": ("ZBV", {}, [[0, 3], [1, 2]]),
}
# Meshes of the rows; whether the first stage feeds all others.
PIPELINES: dict[str, tuple[list, bool]] = {
    "1_2_3_1_skips": ([[0], [1, 2], [3, 4, 5], [6]], True),
    "3_2_2_skips": ([[0, 1, 2], [3, 4], [5, 6]], True),  # both consumers of the skip are laid out alike
    "2x2_to_1x3": ([[[0, 1], [2, 3]], [[4, 5, 6]]], False),
    "4_to_1": ([[0, 1, 2, 3], [4]], False),
}
ROW_PAIRS = {"1_2": [[0], [1, 2]], "2_3": [[0, 1], [2, 3, 4]], "4_1": [[0, 1, 2, 3], [4]]} | {
    "2x2_1x3": [[[0, 1], [2, 3]], [[4, 5, 6]]]
}


class Part(nn.Module):
    """One stage: adds up what it gets. The first embeds tokens, the last weighs them by the same weight."""

    def __init__(self, body: nn.Module, weight: torch.Tensor | None, first: bool) -> None:
        super().__init__()
        self.body, self.first = body, first
        self.register_parameter("weight", None if weight is None else nn.Parameter(weight.clone()))

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        if self.first:
            return self.body(nn.functional.embedding(values[0], self.weight))
        hidden = self.body(sum(values[1:], values[0]))
        return hidden if self.weight is None else hidden @ self.weight.t()


def parts(count: int) -> list[Part]:
    torch.manual_seed(9)
    weight = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    return [
        Part(body, weight if index in (0, count - 1) else None, index == 0)
        for index, body in enumerate(mlp(count, width=WIDTH, hidden=12))
    ]


def alone(count: int, skips: bool) -> tuple[list[Part], list[float], torch.Tensor, torch.Tensor]:
    """The parts with the gradients of one process, its losses, and the batch."""
    reference = parts(count)
    reference[-1].weight = reference[0].weight
    torch.manual_seed(10)
    tokens, target = torch.randint(0, TOKENS, (ROWS,)), torch.randint(0, TOKENS, (ROWS,))

    def run(part: torch.Tensor) -> torch.Tensor:
        first = value = reference[0](part)
        for index in range(1, count):
            value = reference[index](value, first) if skips and index > 1 else reference[index](value)
        return value

    losses = train_alone(run, tokens, target, MICROBATCHES, nn.functional.cross_entropy).losses
    return reference, losses, tokens, target


def check(name: str, options: dict[str, Any], rows: list[list[int]], meshes: list, skips: bool) -> None:
    count = sum(len(stages) for stages in rows)
    made = [
        DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("data", "tensor")[: torch.tensor(ranks).dim()])
        for ranks in meshes
    ]
    group = dist.new_group(sorted(int(rank) for mesh in made for rank in mesh.mesh.flatten()))
    here = next((i for i, mesh in enumerate(made) if dist.get_rank() in mesh.mesh.flatten().tolist()), None)
    if here is None:
        return
    mesh, indices = made[here], rows[here]
    reference, losses, tokens, target = alone(count, skips)
    mine = parts(count)
    if mesh.ndim == 2:
        for index in indices:
            ways = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(mine[index].body, mesh["tensor"], ways)
    edges = [Edge(stage, 0, stage + 1, 0) for stage in range(count - 1)]
    edges += [Edge(0, 0, stage, 1) for stage in range(2, count)] if skips else []
    stages = [
        PipelineStage(
            mine[index],
            index,
            count,
            CPU,
            group=group,
            mesh=mesh,
            edges=edges,
            shared_parameters={"embedding": "weight"} if index in (0, count - 1) else None,
        )
        for index in indices
    ]
    schedule = get_schedule_class(name)(
        stages if len(indices) > 1 else stages[0],
        MICROBATCHES,
        loss_fn=nn.functional.cross_entropy,
        timeout=TIMEOUT,
        **options,
    )
    for step in range(2):
        for index in indices:
            mine[index].zero_grad()
        found: list[torch.Tensor] = []
        schedule.step(tokens, target=target, losses=found)
        for index in indices:
            difference = largest_difference(mine[index], reference[index])
            assert difference <= 1e-12, f"step {step}, stage {index}: gradients differ by {difference}"
        if count - 1 in indices:
            worst = max(abs(a.item() - b) for a, b in zip(found, losses, strict=True))
            assert worst <= 1e-12, f"step {step}: losses differ by {worst}"
    schedule.close()


def single_case(schedule: str, pipeline: str):
    name, options = SINGLE[schedule]
    meshes, skips = PIPELINES[pipeline]

    def case(_) -> None:
        check(name, options, [[stage] for stage in range(len(meshes))], meshes, skips)

    case.__name__ = f"{schedule}_{pipeline}"
    return case


def double_case(schedule: str, pair: str, skips: bool):
    name, options, rows = DOUBLE[schedule]

    def case(_) -> None:
        check(name, options, rows, ROW_PAIRS[pair], skips)

    case.__name__ = f"{schedule}_{pair}{'_skips' if skips else ''}"
    return case


ALL = [
    *[single_case(*chosen) for chosen in itertools.product(SINGLE, PIPELINES)],
    *[double_case(*chosen) for chosen in itertools.product(DOUBLE, ROW_PAIRS, (False, True))],
]
# Each schedule, each pipeline and each pair at least once.
QUICK = [
    *[single_case(schedule, "1_2_3_1_skips") for schedule in SINGLE],
    *[
        single_case(schedule, pipeline)
        for schedule in ("1f1b", "eager_delayed")
        for pipeline in PIPELINES
        if pipeline != "1_2_3_1_skips"
    ],
    double_case("interleaved", "2x2_1x3", True),
    double_case("interleaved_eager", "1_2", True),
    double_case("interleaved_delayed", "4_1", True),
    double_case("zbv", "2_3", True),
]
# In parts, each in a set of processes of its own: "2" is every 17th case from the third on.
PARTS = 17
_part = os.environ.get("MESHCAST_PIPELINES")
CASES = QUICK if _part is None else ALL[int(_part) :: PARTS]
