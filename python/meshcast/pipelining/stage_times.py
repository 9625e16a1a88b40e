"""Compute times of the stages of a rank in the last steps, from the traces of these steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from meshcast.base.checks import integer
from meshcast.pipelining.action import Action, ActionKind
from meshcast.pipelining.trace import Trace

__all__ = ["RecentTimes", "StageTimes"]

_MOST = 10_000  # steps


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds that a stage computes for one micro-batch on this rank; waits for values of other ranks are not
    in them.

    Attributes:
        forward, backward: of F and of the whole backward.
        weight: the part of the backward that computes gradients of weights, where the schedule splits it;
            else None.
    """

    forward: float
    backward: float
    weight: float | None


class RecentTimes:
    """Compute times of the stages in the last training steps of a schedule."""

    def __init__(self, last: int, skip: int) -> None:
        """last: how many steps are kept; skip: how many are not, before that. Raises LayoutError for what is
        no number of steps."""
        self.last = integer("measure: last", last, 0, _MOST)
        self._skip = skip
        self._steps: deque[dict[int, dict[ActionKind, float]]] = deque(maxlen=self.last)

    def add(self, trace: Trace) -> None:
        """One more step."""
        if self._skip:
            self._skip -= 1
            return
        spent: dict[int, dict[ActionKind, list[float]]] = {}
        for name, category, begin, end in trace.events:
            if category == "compute":
                action = Action.parse(name)
                spent.setdefault(action.stage, {}).setdefault(action.kind, []).append(end - begin)
        # The mean over the micro-batches: their sum is what a step takes.
        self._steps.append(
            {stage: {kind: sum(each) / len(each) for kind, each in by.items()} for stage, by in spent.items()}
        )

    def times(self) -> dict[int, StageTimes]:
        """The median of the steps, by stage; empty before there is one."""
        stages = sorted({stage for step in self._steps for stage in step})
        return {stage: self._of(stage) for stage in stages}

    def _of(self, stage: int) -> StageTimes:
        steps = [step[stage] for step in self._steps if stage in step]
        split = any(ActionKind.W in step for step in steps)
        kinds = (ActionKind.B, ActionKind.I, ActionKind.W)
        return StageTimes(
            _median([step.get(ActionKind.F, 0.0) for step in steps]),
            _median([sum(step.get(kind, 0.0) for kind in kinds) for step in steps]),
            _median([step.get(ActionKind.W, 0.0) for step in steps]) if split else None,
        )


def _median(seconds: Sequence[float]) -> float:
    return float(median(seconds))
