"""Choosing a schedule over several ranks: what was measured, that all get the same answer, and that it trains
as one process does. Four ranks."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch
import torch.distributed as dist
from meshcast import Topology
from meshcast.errors import AbortedError, LayoutError, MeshcastError
from meshcast.pipelining import PipelineStage, ScheduleAuto, choose, get_schedule_class, partition
from multiproc.pipeline_fault_cases import raises
from multiproc.pipeline_models import (
    CPU,
    TIMEOUT,
    batch,
    check_gradients,
    columns,
    in_a_row,
    mlp,
    place,
    train_alone,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import fully_shard

mse = nn.functional.mse_loss


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Timed(nn.Module):
    """A forward that takes so many seconds, and a backward of twice that."""

    def __init__(self, body: nn.Module, seconds: float) -> None:
        super().__init__()
        self.body, self.seconds = body, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return y if isinstance(y, FakeTensor) else Slow.apply(y, self.seconds)


def alike_on_all_ranks(choice: Any) -> None:
    text = repr((choice.schedule.__name__, choice.microbatches, dict(choice.options), str(choice)))
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, hashlib.sha256(text.encode()).hexdigest())
    assert len(set(said)) == 1, text


def given(
    stages: list[PipelineStage], x: torch.Tensor, y: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What ``step`` gets on this rank."""
    args = (x,) if any(stage.is_first for stage in stages) else ()
    return args, {"target": y} if any(stage.is_last for stage in stages) else {}


def chosen_and_trained(name: str, numbers_of: Any, **more: Any):
    """numbers_of: a rank's stages."""

    def case(context: Any) -> dict[str, Any]:
        numbers = numbers_of(context.rank)
        count = 4 * len(numbers)
        reference, modules = mlp(count), [mlp(count)[number] for number in numbers]
        group = dist.new_group()
        stages = [
            PipelineStage(module, number, count, CPU, group=group)
            for module, number in zip(modules, numbers, strict=True)
        ]
        x, y = batch(16)
        args, target = given(stages, x, y)
        choice = choose(stages, mse, args, **target, timeout=TIMEOUT, show=False, **more)
        alike_on_all_ranks(choice)
        assert all(parameter.grad is None for module in modules for parameter in module.parameters())
        schedule = choice.make(stages, mse, timeout=TIMEOUT)
        schedule.step(*args, **target)
        run = nn.Sequential(*reference)
        train_alone(run, x, y, choice.microbatches)
        for module, number in zip(modules, numbers, strict=True):
            check_gradients(module, reference[number])
        links = choice.times[0].transfer
        assert set(links) == {(stage, stage + 1) for stage in range(count - 1)}
        local = {(stage, stage + 1) for stage in numbers if stage + 1 in numbers}
        assert all((seconds == 0.0) if link in local else True for link, seconds in links.items())
        assert all(
            links[stage, stage + 1] > 0 for stage in numbers if stage + 1 < count and stage + 1 not in numbers
        )
        return {"chosen": choice.chosen.name, "microbatches": choice.microbatches}

    case.__name__ = f"chosen_and_trained_{name}"
    return case


def what_is_measured(context: Any) -> dict[str, Any]:
    """Stages of 20, 10, 10 and 10 ms, and backwards of twice that."""
    wanted = 0.02 if context.rank == 0 else 0.01
    stage = PipelineStage(
        Timed(mlp(4)[context.rank], wanted),
        context.rank,
        4,
        CPU,
        group=dist.new_group(),
        output_args=torch.empty(2, 6, dtype=torch.float64, device="meta"),
    )
    x, y = batch(8)
    args, target = given([stage], x, y)
    # Sleeping is never shorter. On a busy machine all may be longer, though hardly three times in a row.
    for _ in range(3):
        choice = choose(stage, mse, args, 4, **target, timeout=TIMEOUT, show=False)
        (times,) = choice.times
        longer = []  # seconds beyond what was slept; the same on all ranks
        for number, seconds in enumerate((0.02, 0.01, 0.01, 0.01)):
            both = times.inputs[number] + times.weights[number]
            longer += [
                times.forward[number] - seconds,
                times.backward[number] - 2 * seconds,
                both - 2 * seconds,
            ]
        assert min(longer) >= 0, (longer, times)
        # The slowest stage alone takes 4 x 60 ms; nothing is predicted to be faster.
        assert choice.chosen.seconds >= 4 * 0.06
        schedule = choice.make(stage, mse, timeout=TIMEOUT)
        schedule.step(*args, **target)
        dist.barrier()
        begin = time.monotonic()
        schedule.step(*args, **target)
        taken = torch.tensor(time.monotonic() - begin)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        assert choice.chosen.seconds * 0.9 <= taken.item(), (taken, str(choice))
        if max(longer) < 0.03 and taken.item() < choice.chosen.seconds * 1.5 + 0.1:
            return {"predicted": choice.chosen.seconds, "taken": taken.item()}
    raise AssertionError((longer, taken, str(choice)))


def on_meshes(_: Any) -> dict[str, Any]:
    """A stage of one rank, then one of three under FSDP2, whose backward is not split."""
    here = place(in_a_row([1, 3]))
    assert here is not None
    reference, module = mlp(2), mlp(2)[here.stage]
    if here.stage == 1:
        fully_shard(module, mesh=here.mesh)
    stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
    x, y = batch(12)
    choice = choose(stage, mse, x, [2, 4], target=y, timeout=TIMEOUT, show=False)
    alike_on_all_ranks(choice)
    assert not stage.is_whole, "the user would not be told of it"
    schedule = choice.make(stage, mse, timeout=TIMEOUT)
    schedule.step(x, target=y)
    train_alone(nn.Sequential(*reference), x, y, choice.microbatches)
    check_gradients(module, reference[here.stage])
    assert [each.samples for each in choice.times] == [3.0, 6.0]
    for each in choice.times:
        assert (each.inputs[1], each.weights[1]) == (each.backward[1], 0.0)
        assert each.weights[0] > 0.0
    return {"chosen": choice.chosen.name}


def proposed(context: Any) -> dict[str, Any]:
    """Rank 0 measures a whole model; all ranks build the stages, meshes and schedule that it proposes."""
    reference, model = nn.Sequential(*mlp(5)), nn.Sequential(*mlp(5))
    x, y = batch(12)
    said: list[Any] = [None]
    if context.rank == 0:
        network = Topology.uniform(ranks_per_host=2, nic_gbps=0.01)
        names = [name for name, _ in model.named_children()]
        said = [partition(model, x[:3], 4, network, microbatches=4, stages=[2, 3], layers=names)]
    dist.broadcast_object_list(said)
    found = said[0]
    number = next(stage for stage, ranks in enumerate(found.ranks) if context.rank in ranks)

    def part_of(whole: nn.Module) -> nn.Module:
        return nn.Sequential(*(whole.get_submodule(name) for name in found.names[number]))

    mesh = found.device_meshes("cpu")[number]
    stage = PipelineStage(part_of(model), number, len(found.ranks), CPU, group=dist.new_group(), mesh=mesh)
    schedule = found.make(stage, mse, timeout=TIMEOUT)
    assert schedule._n_microbatches == 4
    schedule.step(x, target=y)
    train_alone(reference, x, y, 4)
    check_gradients(stage.submod, part_of(reference))
    return {"ranks": found.ranks, "names": found.names, "schedule": found.schedule.name}


def budgets(context: Any) -> dict[str, Any]:
    """Rank 2 may hold two micro-batches; then nothing."""
    reference, module = mlp(4), mlp(4)[context.rank]
    stage = PipelineStage(module, context.rank, 4, CPU, group=dist.new_group())
    x, y = batch(16)
    args, target = given([stage], x, y)
    free = choose(stage, mse, args, 8, **target, timeout=TIMEOUT, show=False)
    one = free.times[0].held[2]
    limit = 2.5 * one if context.rank == 2 else None
    tight = choose(stage, mse, args, 8, limit, **target, timeout=TIMEOUT, show=False)
    alike_on_all_ranks(tight)
    assert tight.chosen.held[2] <= 2.5 * one
    assert any(each.why_not.startswith("rank 2 holds") for each in tight.candidates), str(tight)
    raises(
        LayoutError,
        "no schedule fits: ",
        "rank 1 holds",
        call=lambda: choose(
            stage, mse, args, 8, 8.0 if context.rank == 1 else None, **target, timeout=TIMEOUT, show=False
        ),
    )
    schedule = tight.make(stage, mse, timeout=TIMEOUT)  # the ranks can go on
    schedule.step(*args, **target)
    train_alone(nn.Sequential(*reference), x, y, 8)
    check_gradients(module, reference[context.rank])
    return {"free": free.chosen.name, "tight": tight.chosen.name}


def auto(context: Any) -> dict[str, Any]:
    """An evaluation, then steps: the first of them chooses."""
    numbers = [context.rank, context.rank + 4]
    reference, modules = mlp(8), [mlp(8)[number] for number in numbers]
    group = dist.new_group()
    stages = [PipelineStage(m, n, 8, CPU, group=group) for m, n in zip(modules, numbers, strict=True)]
    x, y = batch(16)
    args, target = given(stages, x, y)
    schedule = get_schedule_class("auto")(stages, 8, loss_fn=mse, timeout=TIMEOUT, show=False)
    assert isinstance(schedule, ScheduleAuto)
    run = nn.Sequential(*reference)
    output = schedule.eval(*args)
    if stages[-1].is_last:
        torch.testing.assert_close(output, run(x))
    for _ in range(2):
        for module in (*modules, *reference):
            module.zero_grad()
        losses: list[torch.Tensor] = []
        schedule.step(*args, **target, losses=losses)
        expected = train_alone(run, x, y, 8)
        for module, number in zip(modules, numbers, strict=True):
            check_gradients(module, reference[number])
        if stages[-1].is_last:
            assert torch.allclose(torch.stack(losses), torch.tensor(expected.losses, dtype=torch.float64))
    alike_on_all_ranks(schedule.choice)
    return {"chosen": schedule.choice.chosen.name}


def pipelines_side_by_side(context: Any) -> dict[str, Any]:
    """FSDP2 joins two pipelines: both choose the same, or none does."""
    reference, stage, _, _ = columns(context.rank)
    everybody = dist.new_group()
    part = context.rank % 2
    x, y = batch(12)
    mine = slice(6 * part, 6 * part + 6)
    args, target = given([stage], x[mine], y[mine])
    raises(
        (AbortedError, LayoutError),
        "give columns= a group of all their ranks",
        call=lambda: choose(stage, mse, args, **target, timeout=TIMEOUT, show=False),
    )
    choice = choose(stage, mse, args, 2, **target, columns=everybody, timeout=TIMEOUT, show=False)
    alike_on_all_ranks(choice)
    schedule = choice.make(stage, mse, timeout=TIMEOUT)
    schedule.step(*args, **target)
    for each in (slice(0, 6), slice(6, 12)):
        train_alone(
            nn.Sequential(*reference), x[each], y[each], choice.microbatches, lambda a, b: mse(a, b) / 2
        )
    check_gradients(stage.submod, reference[stage.stage_index])
    return {"chosen": choice.chosen.name, "microbatches": choice.microbatches}


def contradictions(context: Any) -> None:
    """All ranks hear of it, before anything runs, and can go on."""
    stage = PipelineStage(mlp(4)[context.rank], context.rank, 4, CPU, group=dist.new_group())
    x, y = batch(8)
    args, target = given([stage], x, y)
    for more, text in (
        (
            {"microbatches": 4 if context.rank != 1 else 2},
            "the ranks disagree on counts: rank 0 has [4], rank 1",
        ),
        ({"microbatches": 16}, "the example has 8 samples, too few for 16 micro-batches"),
        ({"memory_budget": -1.0 if context.rank == 3 else None}, "memory_budget must be a number of bytes"),
    ):
        raises(
            (AbortedError, LayoutError),
            text,
            call=lambda: choose(stage, mse, args, **target, timeout=TIMEOUT, show=False, **more),  # noqa: B023
        )
    alike_on_all_ranks(choose(stage, mse, args, 4, **target, timeout=TIMEOUT, show=False))


def a_module_that_fails(context: Any) -> None:
    """In the backward of one rank: every rank raises, gradients are put back."""

    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if context.rank == 2 and y.requires_grad and type(y) is torch.Tensor:
                y.register_hook(lambda _: 1 / 0)
            return y

    module = Fails(6, 6, dtype=torch.float64)
    stage = PipelineStage(module, context.rank, 4, CPU, group=dist.new_group())
    x, y = batch(8)
    args, target = given([stage], x, y)
    raises(
        MeshcastError,
        "rank 2",
        "ZeroDivisionError",
        call=lambda: choose(stage, mse, args, 4, **target, timeout=TIMEOUT, show=False),
        bound=TIMEOUT,
    )
    assert module.weight.grad is None


CASES = [
    chosen_and_trained("single", lambda rank: [rank]),
    chosen_and_trained("single_4_or_8", lambda rank: [rank], microbatches=[4, 8]),
    chosen_and_trained("looped", lambda rank: [rank, rank + 4], microbatches=8),
    chosen_and_trained("folded", lambda rank: [rank, 7 - rank], microbatches=8),
    what_is_measured,
    on_meshes,
    proposed,
    budgets,
    auto,
    pipelines_side_by_side,
    contradictions,
    a_module_that_fails,
]
