"""Pipelines on GPUs against one process on the CPU, a stage for each rank; ranks beyond the GPUs share them.
DEVICE=cpu runs the same cases where there is no GPU, which checks the cases."""

from __future__ import annotations

import json
import os
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from meshcast.pipelining import PipelineStage, get_schedule_class, microbatch_seed
from multiproc.pipeline_models import batch, largest_difference, mlp, train_alone
from torch import nn

GROUP_TIMEOUT = 120.0
CASE_LIMIT = 240.0
KIND = os.environ.get("DEVICE", "cuda")
MICROBATCHES, ROWS, WIDTH = 6, 12, 64
STEPS = 3
SCHEDULES = (("GPipe", False), ("1F1B", False), ("Eager1F1B", True), ("ZBH1", False))


def own_device(rank: int) -> torch.device:
    if KIND == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def modules(stages: int) -> list[nn.Module]:
    return mlp(stages, WIDTH, hidden=128)


def losses_of(schedule, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    losses: list[torch.Tensor] = []
    schedule.step(x, target=y, losses=losses)
    return [loss.item() for loss in losses]


def compare(own: nn.Module, alone: nn.Module, device: torch.device) -> None:
    found = largest_difference(own.cpu(), alone)
    own.to(device)
    assert found < 1e-10, found


def stages_train_as_one_process(context) -> None:
    """Steps follow each other without a pause of the host: the next one finds the memory of the last."""
    device = own_device(context.rank)
    world, rank = context.world, context.rank
    for name, delayed in SCHEDULES:
        own, alone = modules(world)[rank].to(device), nn.Sequential(*modules(world))
        stage = PipelineStage(own, rank, world, device, group=dist.new_group())
        schedule = get_schedule_class(name)(
            stage, MICROBATCHES, loss_fn=nn.functional.mse_loss, delay_weight_grad=delayed
        )
        data = [batch(ROWS * MICROBATCHES, WIDTH, seed=seed) for seed in range(STEPS)]
        on_device = [(x.to(device), y.to(device)) for x, y in data]
        found = [losses_of(schedule, x, y) for x, y in on_device[:-1]]
        losses: list[torch.Tensor] = []
        schedule.step(on_device[-1][0], target=on_device[-1][1], losses=losses)
        # Gradients add up over the steps, and torch's scaling is of all that has added up.
        expected = [train_alone(alone, x, y, MICROBATCHES, as_torch=[alone]).losses for x, y in data]
        compare(own, alone[rank], device)
        if rank == world - 1:
            for mine, theirs in zip([*found, [loss.item() for loss in losses]], expected, strict=True):
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-9, atol=1e-12)
        assert (schedule.bytes_sent > 0) is (world > 1)
        schedule.close()


def both_stages_on_one_rank(context) -> None:
    """Values are handed over; every rank makes a pipeline of its own."""
    device = own_device(context.rank)
    groups = [dist.new_group([rank]) for rank in range(context.world)]
    own, alone = [each.to(device) for each in modules(2)], nn.Sequential(*modules(2))
    stages = [PipelineStage(each, i, 2, device, group=groups[context.rank]) for i, each in enumerate(own)]
    schedule = get_schedule_class("ZBV")(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    x, y = batch(ROWS * MICROBATCHES, WIDTH)
    found = losses_of(schedule, x.to(device), y.to(device))
    expected = train_alone(alone, x, y, MICROBATCHES).losses
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=1e-12)
    for mine, theirs in zip(own, alone, strict=True):
        compare(mine, theirs, device)


def values_may_be_freed_while_they_travel(context) -> None:
    """Large ones, among which the allocator finds much to give out again, and compute that spoils it."""
    device = own_device(context.rank)
    world, rank = context.world, context.rank
    torch.manual_seed(3)
    scales = torch.rand(world, dtype=torch.float64).add(0.5)

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(scales[rank].clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                torch.full_like(x, float("nan")).mul_(2.0)
            return x * self.factor

    own = Scale().to(device)
    stage = PipelineStage(own, rank, world, device, group=dist.new_group())
    schedule = get_schedule_class("Eager1F1B")(stage, 8, loss_fn=nn.functional.mse_loss)
    x = torch.arange(8 * 1024 * 257, dtype=torch.float64).view(8 * 1024, 257) / 1e6
    for _ in range(4):
        found = losses_of(schedule, x.to(device), torch.zeros_like(x, device=device))
        if rank == world - 1:
            expected = [(part * scales.prod()).pow(2).mean().item() for part in x.chunk(8)]
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=1e-12)


def dropout_is_that_of_the_seed(context) -> None:
    """A GPU draws for a micro-batch what its seed says, and its own random state is left as it was."""
    device = own_device(context.rank)
    world, rank = context.world, context.rank
    own = nn.Dropout(0.5)
    stage = PipelineStage(own, rank, world, device, group=dist.new_group())
    schedule = get_schedule_class("GPipe")(stage, 2, seed=11)
    x = torch.ones(8, 32, device=device)
    if KIND == "cuda":
        before = torch.cuda.get_rng_state(device)
    outputs = schedule.eval(x)
    if KIND == "cuda":
        assert torch.equal(torch.cuda.get_rng_state(device), before)
    if rank < world - 1:
        return
    for microbatch, found in enumerate(outputs.chunk(2)):
        expected = torch.ones(4, 32, device=device)
        for index in range(world):
            torch.manual_seed(microbatch_seed(11, 0, index, microbatch))
            expected = own(expected)
        assert torch.equal(found, expected)


def the_trace_is_that_of_the_gpu(context) -> None:
    device = own_device(context.rank)
    world, rank = context.world, context.rank
    module = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).to(device)
    stage = PipelineStage(module, rank, world, device, group=dist.new_group())
    schedule = get_schedule_class("1F1B")(stage, 4, loss_fn=nn.functional.mse_loss)
    x = torch.ones(4096, 2048, device=device)
    for _ in range(2):
        schedule.step(x, target=x)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        schedule.trace(path)
        events = [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"]
    compute = sorted((each["ts"], each["dur"]) for each in events if each["cat"] == "compute")
    assert len(compute) == 8
    for (begin, length), (after, _) in pairwise(compute):
        assert length > 0 and begin + length <= after + 1.0  # microseconds; one stream, one thing at a time
    assert f"rank {rank}: step of" in schedule.summary()


CASES = [
    both_stages_on_one_rank,
    stages_train_as_one_process,
    values_may_be_freed_while_they_travel,
    dropout_is_that_of_the_seed,
    the_trace_is_that_of_the_gpu,
]
