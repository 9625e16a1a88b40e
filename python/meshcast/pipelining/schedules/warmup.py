"""The shape that 1F1B and its relatives share: some forwards, then one backward and one forward in turn, then
the rest of the backwards."""

from __future__ import annotations

from meshcast.pipelining.action import Action, ActionKind
from meshcast.pipelining.errors import ScheduleError


def check_sizes(stages: int, microbatches: int) -> None:
    """Raises ScheduleError unless both counts are at least one."""
    if stages < 1 or microbatches < 1:
        raise ScheduleError(
            f"a pipeline needs at least 1 stage and 1 micro-batch, found stages={stages}, "
            f"microbatches={microbatches}"
        )


def alternate(stage: int, warmup: int, microbatches: int) -> list[Action]:
    """``warmup`` forwards, then B F B F ... until the forwards are used up, then the backwards that are left.

    At most ``warmup`` micro-batches are alive (forward done, backward not) at any time; warmup must be
    1..microbatches.
    """
    if not 1 <= warmup <= microbatches:
        raise ScheduleError(
            f"stage {stage}: warm-up must be between 1 and {microbatches} (the micro-batches), found {warmup}"
        )
    forward = [Action(stage, ActionKind.F, k) for k in range(microbatches)]
    backward = [Action(stage, ActionKind.B, k) for k in range(microbatches)]
    steady = [action for pair in zip(backward, forward[warmup:], strict=False) for action in pair]
    return forward[:warmup] + steady + backward[microbatches - warmup :]
