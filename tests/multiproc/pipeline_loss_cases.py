"""Losses of a pipeline: weighted by tokens, over sequences that ranks share. Six ranks; run by
pipeline_gradient_cases.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from meshcast.errors import AbortedError, LayoutError
from meshcast.pipelining import PipelineStage
from multiproc.pipeline_fault_cases import raises
from multiproc.pipeline_models import (
    CPU,
    check_gradients,
    in_a_row,
    mlp,
    place,
    schedule_for,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def token_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = nn.functional.cross_entropy(
        output.flatten(0, -2), target.flatten(), ignore_index=-100, reduction="sum"
    )
    return total, (target != -100).sum()


def labels(rows: int, tokens: int, seed: int = 3) -> torch.Tensor:
    """Few of the tokens count, and a different number in each row."""
    torch.manual_seed(seed)
    found = torch.randint(0, 6, (rows, tokens))
    for row in range(rows):
        found[row, row % (tokens + 1) :] = -100
    return found


def weighted_case(name: str, wrapper: str = "", sizes: Sequence[int] = (2, 3), **options: Any):
    """Tokens that are not counted, a different number on each rank and micro-batch; ranks without samples."""

    def case(_) -> None:
        here = place(in_a_row(sizes))
        if here is None:
            return
        reference, mine = mlp(2), mlp(2)
        torch.manual_seed(1)
        x, y = torch.randn(7, 4, 6, dtype=torch.float64), labels(7, 4)
        total, weight = token_loss(nn.Sequential(*reference)(x), y)
        (total / weight).backward()
        module = mine[here.stage]
        if wrapper:
            module = fully_shard(module, mesh=here.mesh)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(torch.ones(()))

        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found, count = token_loss(output, target)
            return scaler.scale(found), count

        stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
        schedule = schedule_for(name, stage, 3, loss_fn, **options)
        for step in range(3):  # gradients add up: those of earlier steps are not divided again
            with torch.no_grad():
                module(x[:2])  # a forward of the user's own leaves FSDP2's parameters gathered
            losses: list[torch.Tensor] = []
            schedule.step(x, target=y, losses=losses)
            if here.stage:
                each = [
                    token_loss(nn.Sequential(*reference)(a), b)
                    for a, b in zip(x.tensor_split(3), y.tensor_split(3), strict=True)
                ]
                for found, (part, count) in zip(losses, each, strict=True):
                    assert abs(found / 64 - part / max(1, count)) <= 1e-12
            for parameter in module.parameters():
                parameter.grad.div_(64 * (step + 1))
            check_gradients(module, reference[here.stage])
            for parameter in module.parameters():
                parameter.grad.mul_(64 * (step + 1))

    label = "_".join(map(str, sizes))
    case.__name__ = f"weighted_{name}_{label}{'_' + wrapper if wrapper else ''}{'_'.join(['', *options])}"
    return case


def sequence_case(tensor_parallel: bool, weighted: bool):
    """The loss over a sequence that ranks share: context parallelism, or sequence shards of a tensor-parallel
    stage."""

    def case(_) -> None:
        here = place([[0], [[1, 2], [3, 4]]])
        if here is None:
            return
        reference, mine = mlp(2, hidden=8), mlp(2, hidden=8)
        torch.manual_seed(1)
        tokens = 4 if tensor_parallel else 5  # torch's tensor parallelism cuts sequences evenly
        x, y = torch.randn(6, tokens, 6, dtype=torch.float64), labels(6, tokens)
        plain = y.clamp(min=0)

        def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())

        output = nn.Sequential(*reference)(x)
        if weighted:
            total, weight = token_loss(output, y)
            (total / weight).backward()
        else:
            mean_loss(output, plain).backward()
        module = mine[here.stage]
        options: dict[str, Any] = {}
        if here.stage:
            options = {"input_placements": [Shard(0), Shard(1)], "loss_dims": ["data", "tensor"]}
            if tensor_parallel:
                ways = {
                    "0": ColwiseParallel(input_layouts=Shard(1)),
                    "2": RowwiseParallel(output_layouts=Shard(1)),
                }
                parallelize_module(module, here.mesh["tensor"], ways)
            else:
                options["data_dims"] = ["data", "tensor"]
        loss_fn = token_loss if weighted else mean_loss

        def stage(**more: Any) -> PipelineStage:
            return PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh, **more)

        unsaid = {"input_placements": options["input_placements"]} if here.stage else {}
        raises(
            LayoutError if here.stage else AbortedError,
            "loss_dims=[0, 1]",
            call=lambda: schedule_for("1F1B", stage(**unsaid), 2, loss_fn).step(x, target=y),
        )
        schedule_for("1F1B", stage(**options), 2, loss_fn).step(x, target=y if weighted else plain)
        check_gradients(module, reference[here.stage])

    kind = "tensor_parallel" if tensor_parallel else "context"
    case.__name__ = f"sequence_{kind}_{'weighted' if weighted else 'mean'}"
    return case


def one_loss_case(rows: int, tokens: int):
    """Data and tensor parallelism of one degree, losses alike on tensor-parallel ranks: whatever the sizes,
    the outputs of a data-parallel rank are not taken for parts of a tensor-parallel one."""

    def case(_) -> None:
        here = place([[0], [[1, 2], [3, 4]]])
        if here is None:
            return
        reference, mine = mlp(2, hidden=8), mlp(2, hidden=8)
        torch.manual_seed(1)
        shape = (rows, tokens, 6) if tokens else (rows, 6)
        x, y = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
        nn.functional.mse_loss(nn.Sequential(*reference)(x), y).backward()
        module = mine[here.stage]
        if here.stage:
            ways = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(module, here.mesh["tensor"], ways)
        stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
        schedule_for("1F1B", stage, 2, nn.functional.mse_loss).step(x, target=y)
        check_gradients(module, reference[here.stage])

    case.__name__ = f"one_loss_{rows}_{tokens}"
    return case


CASES = [
    *[one_loss_case(*sizes) for sizes in ((8, 0), (8, 2), (4, 4), (6, 3))],
    weighted_case("1F1B"),
    weighted_case("1F1B", sizes=(1, 2)),
    weighted_case("Eager1F1B", delay_weight_grad=True),
    weighted_case("GPipe", "fsdp"),
    *[sequence_case(parallel, weighted) for parallel in (False, True) for weighted in (False, True)],
]
