"""A rank that becomes slow while a pipeline trains is given fewer layers, by what was measured."""

from __future__ import annotations

import time

from multiproc.pipeline_models import in_a_row, place
from multiproc.rebalance_models import Mover, same_state

SECONDS = 0.005  # that a layer takes more in its forward
SLOWER = 6  # times, of the rank that becomes slow


class Slowed(Mover):
    """Its layers wait for `seconds` each, whichever they are."""

    seconds = SECONDS

    def build(self, cut):
        schedule, optimizer = super().build(cut)
        for layer in schedule._mine[self.here.stage].submod:
            layer.register_forward_pre_hook(lambda *_: time.sleep(self.seconds))
        return schedule, optimizer


def a_slow_rank_gets_fewer_layers(context) -> None:
    mover = Slowed(place(in_a_row([1, 1, 2])), (3, 3, 3))
    mover.schedule.measure(last=3)
    for step in range(4):
        mover.step(step)
    if context.rank == 1:
        mover.seconds = SLOWER * SECONDS
    for step in range(4, 7):
        mover.step(step)
    before = mover.state()
    moved = mover.rebalance()
    assert moved is not None
    assert moved.cut[1] < 3
    assert sum(moved.cut) == 9
    assert moved.after < 0.9 * moved.before
    same_state(mover.state(), before)
    assert mover.schedule.stage_times() == {}  # it measures as the one before did
    for step in range(7, 10):
        mover.step(step)
    assert (
        mover.schedule.stage_times()[mover.here.stage].forward >= mover.seconds * moved.cut[mover.here.stage]
    )


CASES = [a_slow_rank_gets_fewer_layers]
