"""ZB-V: two stages on each rank, down the ranks and up again, so that the last stage is next to the first.

Two ranks, four stages, four micro-batches; each stage takes one unit for F, I and W; stage before the kind::

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
    rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

- rank r of p runs stages r and 2p - 1 - r; stages 0 and n - 1 are on rank 0, the turn is inside rank p - 1
- peak activations of each rank: min(2m, 2p) for m >= 2p, counted in stages of half a rank each: what 1F1B
  holds on its first stage
- no idle time between the first and the last action of a rank for F = I = W, free transfers, m >= 2p
- makespan then: 2m (F + I + W) + (p - 1) F, with the times of one stage, half a rank's
- fewer micro-batches: the rows for 2p, without the micro-batches that are not there

Rows of rank r: 2(p - r) - 1 forwards down, r pairs of one up and one down, p - r times forward and whole
backward up; then F I W down, F I W up in turn; at the end the input gradients first, which the ranks below
wait for, and the weights last.

p ranks, n = 2p stages, m micro-batches. Source: Qi et al., "Pipeline Parallelism with Controllable Memory",
2024, V-ZB.
"""  # noqa: E501

from __future__ import annotations

from meshcast.pipelining.action import Action, ActionKind, Actions
from meshcast.pipelining.errors import ScheduleError
from meshcast.pipelining.orders.spec import OrderSpec
from meshcast.pipelining.orders.warmup import check_sizes

F, I, W = ActionKind.F, ActionKind.I, ActionKind.W  # noqa: E741


def zb_v(stages: int, microbatches: int) -> Actions:
    """Compute actions of each rank; rank r runs stages r and stages - 1 - r.

    Raises ScheduleError for an odd number of stages.
    """
    check_sizes(stages, microbatches)
    if stages % 2:
        raise ScheduleError(f"ZB-V has two stages on each rank: an even number of stages, found {stages}")
    ranks = stages // 2
    length = max(microbatches, 2 * ranks)
    return {
        rank: [
            action
            for action in _Row(rank, stages - 1 - rank, length).fill(rank, ranks)
            if action.microbatch < microbatches
        ]
        for rank in range(ranks)
    }


class _Row:
    """Appends actions; each kind of each stage takes the micro-batches in order."""

    def __init__(self, down: int, up: int, microbatches: int) -> None:
        self._down, self._up, self._microbatches = down, up, microbatches
        self._next = dict.fromkeys([(stage, kind) for stage in (down, up) for kind in (F, I, W)], 0)
        self._row: list[Action] = []

    def fill(self, rank: int, ranks: int) -> list[Action]:
        down, up = self._down, self._up
        for _ in range(2 * (ranks - rank) - 1):
            self._add(down, F)
        for _ in range(rank):
            self._add(up, F)
            self._add(down, F)
        for _ in range(ranks - rank):
            self._add(up, F, I, W)
        while self._left(up, F):
            self._add(down, *((F, I, W) if self._left(down, F) else (I, W)))
            self._add(up, F, I, W)
        for _ in range(rank):
            self._add(down, I)
            self._add(up, I)
        while self._left(down, I):
            self._add(down, I, W)
        while self._left(up, I):
            self._add(up, I)
        for stage in (up, down):
            while self._left(stage, W):
                self._add(stage, W)
        return self._row

    def _add(self, stage: int, *kinds: ActionKind) -> None:
        for kind in kinds:
            self._row.append(Action(stage, kind, self._next[stage, kind]))
            self._next[stage, kind] += 1

    def _left(self, stage: int, kind: ActionKind) -> bool:
        return self._next[stage, kind] < self._microbatches


SPEC = OrderSpec("ZBV", zb_v, stacked=True)
