"""Balancing while training, in four processes: stage times that are measured, and layers that move."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from meshcast import elastic
from meshcast.errors import LayoutError, MeshcastError
from meshcast.pipelining import Layer, PipelineStage, get_schedule_class
from multiproc.pipeline_fault_cases import raises
from multiproc.pipeline_models import CPU, TIMEOUT, batch, in_a_row, mlp, place, schedule_of
from multiproc.rebalance_models import Mover, fastest, same_state, times_of
from torch import nn

SLEEP = 0.02  # seconds


class Slow(nn.Module):
    """Takes `seconds` more in its forward, and twice that in its backward."""

    def __init__(self, inner: nn.Module, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds = inner, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        out = self.inner(x)
        if out.requires_grad:
            out.register_hook(lambda _: time.sleep(2 * self.seconds))
        return out


def measured_times(_context) -> None:
    """Of the last training steps; evaluations are in none."""
    here = place(in_a_row([1, 1, 2]))
    layer = Slow(mlp(3)[here.stage], SLEEP if here.stage == 1 else 0.0)
    schedule = schedule_of("1F1B", here, layer, 3, 4)
    x, y = batch(12)
    raises(LayoutError, "call measure()", call=schedule.stage_times)
    schedule.step(x, target=y)
    raises(LayoutError, "call measure()", call=schedule.stage_times)
    schedule.measure(last=2)
    assert schedule.stage_times() == {}
    for _ in range(3):
        schedule.step(x, target=y)
    times = schedule.stage_times()
    schedule.eval(x, target=y)
    assert schedule.stage_times() == times
    assert list(times) == [here.stage]
    mine = times[here.stage]
    assert mine.weight is None
    if here.stage == 1:
        assert mine.forward >= SLEEP
        assert mine.backward >= 2 * SLEEP
    else:
        assert mine.forward > 0
        assert mine.backward > 0
    schedule.measure(0)
    raises(LayoutError, "call measure()", call=schedule.stage_times)


def measured_times_of_a_new_schedule(context) -> None:
    """Two stages on each rank, backwards in two parts; the first step is left out."""
    rank, modules = context.rank, mlp(8)
    stages = [PipelineStage(modules[index], index, 8, CPU) for index in (rank, 7 - rank)]
    schedule = get_schedule_class("ZBV")(stages, 8, loss_fn=nn.functional.mse_loss, timeout=TIMEOUT)
    schedule.measure()
    x, y = batch(16)
    schedule.step(x, target=y)
    assert schedule.stage_times() == {}
    schedule.step(x, target=y)
    times = schedule.stage_times()
    assert list(times) == sorted([rank, 7 - rank])
    for each in times.values():
        assert 0 < each.weight < each.backward
        assert each.forward > 0


SIZES = [1, 1, 2]
SLOW_SECOND = times_of([0.03, 0.06, 0.03])  # of three layers each: rank 1 has become slow


def moves_and_goes_on(mover: Mover, times, costs=(), **arguments) -> None:
    """To the bit as a job that was built with the fastest cut and given the state of before."""
    cut = fastest(mover.cut, times, costs)
    assert cut != mover.cut
    for step in range(3):
        mover.step(step)
    for group in mover.optimizer.param_groups:
        group["lr"] = 0.01  # as by a scheduler
    before = mover.state()
    old, random_state = mover.schedule, torch.get_rng_state()
    moved = mover.rebalance(times=times, **arguments)
    assert moved is not None
    assert moved.cut == cut
    assert moved.after <= 0.9 * moved.before
    assert moved.schedule is not old
    assert moved.schedule._steps == 3
    assert torch.equal(torch.get_rng_state(), random_state)
    same_state(mover.state(), before)
    other = Mover(mover.here, cut, kind=mover.kind, dtype=mover.dtype, sharded=mover.sharded, **mover.more)
    other.adopt(before)
    for step in range(3, 5):
        assert mover.step(step) == other.step(step)
    same_state(mover.state(), other.state())


def moves_adamw(_context) -> None:
    moves_and_goes_on(Mover(place(in_a_row(SIZES)), (3, 3, 3)), SLOW_SECOND)


def moves_adam_in_bfloat16(_context) -> None:
    mover = Mover(
        place(in_a_row(SIZES)), (3, 3, 3), kind=torch.optim.Adam, dtype=torch.bfloat16, amsgrad=True
    )
    moves_and_goes_on(mover, SLOW_SECOND)


def moves_sgd(_context) -> None:
    """Momentum; without it there is no state at all. Costs of layers are given."""
    here = place(in_a_row(SIZES))
    moves_and_goes_on(Mover(here, (2, 2, 2), kind=torch.optim.SGD, momentum=0.5), times_of([4, 4, 1]))
    # The last layer costs as much as three others: with it alone, stage 2 is as fast as the rest.
    costs = [1.0] * 5 + [3.0]
    moves_and_goes_on(
        Mover(here, (2, 2, 2), kind=torch.optim.SGD),
        times_of([0.02, 0.02, 0.04]),
        costs,
        layers=[Layer(cost, 2 * cost) for cost in costs],
    )


def moves_shards(_context) -> None:
    """Of FSDP2, whose shards of a layer are others on a mesh of another size."""
    moves_and_goes_on(Mover(place(in_a_row(SIZES)), (3, 3, 3), sharded=True), SLOW_SECOND)


def moves_there_and_back(_context) -> None:
    mover = Mover(place(in_a_row(SIZES)), (3, 3, 3))
    mover.step(0)
    before = mover.state()
    assert mover.rebalance(times=SLOW_SECOND).cut != (3, 3, 3)
    # The new schedule has made no step of its own yet, and moving it again needs none of the old one.
    raises(LayoutError, "no training step yet", call=lambda: mover.rebalance(times=SLOW_SECOND))
    same_state(mover.state(), before)
    mover.step(1)
    before = mover.state()
    back = times_of([0.01 * count for count in mover.cut])
    assert mover.rebalance(times=back).cut == fastest((3, 3, 3), times_of([0.03] * 3))
    same_state(mover.state(), before)
    mover.step(2)


def stays_where_nothing_is_better(_context) -> None:
    mover = Mover(place(in_a_row(SIZES)), (3, 3, 3))
    mover.step(0)
    schedule = mover.schedule
    assert mover.rebalance(times=times_of([0.03, 0.03, 0.03])) is None
    # The best cut saves a part of the step: less than the threshold, or than the move is worth.
    assert mover.rebalance(times=SLOW_SECOND, threshold=0.5) is None
    assert mover.rebalance(times=SLOW_SECOND, horizon=10, overhead=100.0) is None
    mover.schedule.measure()
    assert mover.rebalance() is None  # nothing has been measured yet
    assert mover.built == 1
    assert mover.schedule is schedule
    mover.step(1)


def bad_input(context) -> None:
    """One error on all ranks, and training goes on as if nothing had been asked."""
    rank, here = context.rank, place(in_a_row(SIZES))
    mover, quiet = Mover(here, (3, 3, 3)), Mover(here, (3, 3, 3))

    def refused(*words: str, kind=LayoutError, **arguments) -> None:
        raises(kind, *words, call=lambda: mover.rebalance(**{"times": SLOW_SECOND, **arguments}))

    refused("no training step yet")
    for job in (mover, quiet):
        job.step(0)
    refused("each of the 3 stages", cut=(3, 3))
    refused("at least 1", cut=(5, 0, 4))
    refused("at least 1", cut=(3, 3, 2.5))
    refused("threshold", threshold=0)
    refused("threshold", threshold=-0.1)
    refused("threshold", threshold=True)
    refused("horizon", horizon=0)
    refused("overhead", overhead=-1)
    refused("times", times={"forward": [1, 1, 1]})
    refused("each of the 3 stages", times=times_of([1, 1]))
    refused("9", layers=[Layer(1.0, 1.0)] * 8)
    refused("above 0", layers=[Layer(0.0, 1.0)] * 9)
    refused("topology", topology=5)
    refused("build", build=None)
    refused("measure()", times=None)
    # Of one rank alone.
    refused("threshold", threshold=0.2 if rank == 2 else 0)
    refused("disagree on threshold", "rank 0 has 0.1", "rank 2 has 0.2", threshold=0.2 if rank == 2 else 0.1)
    refused("disagree on cut", cut=(3, 3, 3) if rank else (3, 4, 2))
    refused("disagree on times", times=SLOW_SECOND if rank != 3 else times_of([1, 1, 1]))

    def fails(cut):
        if rank == 1:
            raise RuntimeError("no memory")
        return mover.build(cut)

    def another(cut):
        schedule, optimizer = mover.build(cut)
        return schedule, torch.optim.SGD(mover.module.parameters(), lr=0.1) if rank == 2 else optimizer

    def the_old_one(cut):
        return (mover.schedule, mover.optimizer) if rank == 3 else mover.build(cut)

    def old_modules(_cut):
        made = PipelineStage(mover.module, here.stage, 3, CPU, group=here.group, mesh=here.mesh)
        return get_schedule_class("1F1B")(made, 4, loss_fn=nn.functional.mse_loss), mover.optimizer

    refused("no memory", "rank 1", build=fails)
    refused("SGD", build=another)
    refused("the schedule that runs", build=the_old_one)
    refused("old modules", build=old_modules)
    refused("(schedule, optimizer)", build=lambda _cut: None)
    # Copies that differ. Nothing of the old state has changed.
    copies = next(mover.module.parameters()) if here.stage == 2 else torch.zeros(1)
    kept = copies.detach().clone()
    if rank == 3:
        copies.data.add_(1)
    refused(kind=MeshcastError)
    if rank == 3:
        copies.data.copy_(kept)
    # Where the optimizer of one rank has no state yet.
    held = mover.optimizer.state
    if rank == 1:
        mover.optimizer.state = type(held)(dict)
    refused("disagree on optimizer")
    mover.optimizer.state = held
    same_state(mover.state(), quiet.state())
    assert mover.step(1) == quiet.step(1)
    refused("whole model's name", names=lambda *_: "same")
    assert mover.rebalance(times=SLOW_SECOND) is not None
    mover.step(2)
    dist.barrier()
    mover.schedule.close()
    raises(MeshcastError, call=lambda: mover.rebalance(times=SLOW_SECOND))


def a_schedule_that_is_none(_context) -> None:
    raises(LayoutError, "schedule must be", call=lambda: elastic.rebalance(5, None, print, (1,)))


def moves_on_an_odd_number_of_ranks(_context) -> None:
    """Two stages of one and two ranks; the fourth rank has no part in it."""
    here = place(in_a_row([1, 2]))
    if here is not None:
        moves_and_goes_on(Mover(here, (4, 2)), times_of([0.08, 0.02]))


def moves_before_the_first_step_of_the_optimizer(_context) -> None:
    """It has no state then, and gets none by being moved."""
    mover = Mover(place(in_a_row(SIZES)), (3, 3, 3))
    x, y = batch(24, dtype=torch.float32)
    mover.schedule.step(x, target=y)
    mover.optimizer.zero_grad()
    before, old = mover.state(), mover.optimizer
    assert mover.rebalance(times=SLOW_SECOND) is not None
    assert mover.optimizer is not old
    assert not any(old.state.values())
    same_state(mover.state(), before)
    mover.step(1)


CASES = [
    measured_times,
    measured_times_of_a_new_schedule,
    moves_adamw,
    moves_adam_in_bfloat16,
    moves_sgd,
    moves_shards,
    moves_there_and_back,
    moves_on_an_odd_number_of_ranks,
    moves_before_the_first_step_of_the_optimizer,
    stays_where_nothing_is_better,
    bad_input,
    a_schedule_that_is_none,
]
