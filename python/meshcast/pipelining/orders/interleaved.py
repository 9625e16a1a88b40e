"""Interleaved 1F1B: several stages on each rank, stage s on rank s mod p, for a shorter fill and drain.

Two ranks, four stages, four micro-batches, eager warm-up; each stage takes one unit forward and two
backward, a transfer takes one; stage before the kind::

    rank 0  0F0 0F1 .   .   2F0 2F1 0F2 .   .   .   2B0---- 0F3 2B1---- 2F2 0B0---- 2F3 0B1---- .   2B2---- .   2B3---- .   0B2---- .   0B3----
    rank 1  .   .   1F0 1F1 .   .   3F0 3B0---- 3F1 3B1---- 1F2 1B0---- 1F3 1B1---- 3F2 3B2---- 3F3 3B3---- .   1B2---- .   1B3----

- a rank takes p micro-batches through its first stage, then the same p through its next one, and so on, then
  the next p; backward likewise, last stage first
- warm-up of rank r, in forwards of single stages: (v - 1) p + d (p - 1 - r) + 1, at most m v. warmup="1f1b":
  d = 1, enough while transfers are free; "eager" (the default, what torch and Megatron run): d = 2, which
  gives each transfer between neighbours a period to travel
- peak activations of rank r: its warm-up, counted in stages of 1/v of a rank each
- makespan, free transfers, m a multiple of p: m v (F + B) + (p - 1)(F + B), with the times of one stage
- m not a multiple of p: the rows for the next multiple, without the micro-batches that are not there
- v = 1 is 1F1B, or eager 1F1B

p ranks, v stages each, m micro-batches. Source: Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", 2021, section 2.2.
"""  # noqa: E501

from __future__ import annotations

from meshcast.pipelining.action import Action, ActionKind, Actions
from meshcast.pipelining.errors import ScheduleError
from meshcast.pipelining.orders.spec import OrderSpec
from meshcast.pipelining.orders.warmup import Warmup, alternate, check_sizes

_PER_HOP = {"1f1b": 1, "eager": 2}


def interleaved_1f1b(
    stages: int, microbatches: int, ranks: int | None = None, warmup: Warmup = "eager"
) -> Actions:
    """Compute actions of each rank; rank r runs stages r, r + ranks, r + 2 ranks, ...

    ranks: default half the stages, two on each. Raises ScheduleError unless the ranks divide the stages.
    """
    check_sizes(stages, microbatches)
    if ranks is None and stages % 2:
        raise ScheduleError(
            f"Interleaved1F1B: {stages} stages are not two on each rank; say how many ranks there are "
            "(ranks=)"
        )
    ranks = stages // 2 if ranks is None else ranks
    if ranks < 1 or stages % ranks:
        raise ScheduleError(
            f"interleaved 1F1B has equally many stages on each rank: {ranks} ranks do not divide "
            f"{stages} stages"
        )
    if not isinstance(warmup, str) or warmup not in _PER_HOP:
        raise ScheduleError(f'the warm-up of interleaved 1F1B is "1f1b" or "eager", found {warmup!r}')
    chunks = stages // ranks
    length = -(-microbatches // ranks) * ranks * chunks
    rows = {}
    for rank in range(ranks):
        forward = [_at(step, rank, ranks, chunks, ActionKind.F) for step in range(length)]
        backward = [_at(step, rank, ranks, chunks, ActionKind.B) for step in range(length)]
        count = (chunks - 1) * ranks + _PER_HOP[warmup] * (ranks - 1 - rank) + 1
        row = alternate(forward, backward, count)
        rows[rank] = [action for action in row if action.microbatch < microbatches]
    return rows


def _at(step: int, rank: int, ranks: int, chunks: int, kind: ActionKind) -> Action:
    """Action number ``step`` of a kind on a rank: groups of ``ranks`` micro-batches, stage after stage."""
    group, inside = divmod(step, ranks * chunks)
    chunk, microbatch = divmod(inside, ranks)
    if kind is ActionKind.B:
        chunk = chunks - 1 - chunk
    return Action(chunk * ranks + rank, kind, group * ranks + microbatch)


SPEC = OrderSpec("Interleaved1F1B", interleaved_1f1b, has_warmup=True, open_ranks=True, stacked=True)
