"""Schedules: pure functions from (stages, micro-batches) to the compute actions of each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..base.checks import shown
from .action import Action, ActionKind, Actions, ScheduleError

__all__ = [
    "OrderSpec",
    "SCHEDULES",
    "Warmup",
    "alternate",
    "build",
    "check_size",
    "delay_weights",
    "forward_only",
    "spec_of",
    "warmup_of_stages",
]


# Forwards of a step, over all stages. An action takes some 200 bytes, and there are up to five for each.
_MOST_FORWARDS = 1 << 20


def check_size(stages: int, microbatches: int) -> None:
    """Raises ScheduleError for a step that cannot run, before memory is filled with its actions."""
    for name, count in (("stages", stages), ("microbatches", microbatches)):
        if isinstance(count, bool) or not isinstance(count, int):
            raise ScheduleError(f"{name} must be an integer, found {shown(count)}")
    if stages < 1 or microbatches < 1:
        raise ScheduleError(
            f"a pipeline needs at least 1 stage and 1 micro-batch, found stages={stages}, "
            f"microbatches={microbatches}"
        )
    if stages * microbatches > _MOST_FORWARDS:
        raise ScheduleError(
            f"{stages} stages and {microbatches} micro-batches are {stages * microbatches} forwards in a "
            f"step; at most {_MOST_FORWARDS} can be scheduled"
        )


@dataclass(frozen=True)
class OrderSpec:
    """One schedule.

    order: (stages, micro-batches) to the actions of each rank; also takes `ranks` if open_ranks, and
    `warmup` if has_warmup. warmup_by_stage: its warm-up may be counts, one for each stage. stacked: a rank
    has several stages.
    """

    name: str
    order: Callable[..., Actions]
    has_warmup: bool = False
    warmup_by_stage: bool = False
    open_ranks: bool = False
    stacked: bool = False


# The forwards of each stage before its first backward: by rule, as the number of the first stage, or listed.
Warmup = Literal["1f1b", "eager"] | int | Sequence[int]


def warmup_of_stages(warmup: Warmup, stages: int, microbatches: int) -> list[int]:
    """The warm-up of each stage, at most ``microbatches``.

    "1f1b": n - i for stage i. "eager": 2(n - i) - 1. An integer w >= n is the warm-up of stage 0: w - n
    forwards more than 1F1B has, given to the hops between stages in turn, the first hop first, since there
    they cost the memory of the fewest stages. A list gives every stage its own; each is at least 1 and at
    least that of the next stage, or the stage could not feed it.
    """
    if warmup == "1f1b":
        chosen = [stages - stage for stage in range(stages)]
    elif warmup == "eager":
        chosen = [2 * (stages - stage) - 1 for stage in range(stages)]
    elif isinstance(warmup, int):
        if warmup < stages:
            raise ScheduleError(
                f"a warm-up of {warmup} forwards is too short for {stages} stages: stage 0 runs at least "
                f"{stages} before its first gradient can arrive"
            )
        chosen = _spread(warmup - stages, stages)
    elif isinstance(warmup, str) or not all(isinstance(each, int) for each in warmup):
        raise ScheduleError(
            'warm-up must be "1f1b", "eager", an integer or one integer for each stage, found '
            f"{shown(warmup)}"
        )
    else:
        chosen = list(warmup)
        if len(chosen) != stages:
            raise ScheduleError(f"a warm-up is listed for {len(chosen)} stages, there are {stages}")
        for stage, count in enumerate(chosen):
            after = chosen[stage + 1] if stage + 1 < stages else 1
            if min(count, microbatches) < min(after, microbatches):
                raise ScheduleError(
                    f"stage {stage}: a warm-up of {count} is shorter than the {after} forwards that "
                    "must have run here before the first gradient comes back"
                )
    return [min(microbatches, count) for count in chosen]


def _spread(extra: int, stages: int) -> list[int]:
    hops = stages - 1
    each = [1 + extra // hops + (hop < extra % hops) for hop in range(hops)] if hops else []
    return [1 + sum(each[stage:]) for stage in range(stages)]


def alternate(forward: Sequence[Action], backward: Sequence[Action], warmup: int) -> list[Action]:
    """``warmup`` forwards (all, if there are fewer), then B F B F ... until the forwards are used up, then
    the backwards that are left. At most ``warmup`` micro-batches are alive (forward done, backward not)."""
    warmup = min(warmup, len(forward))
    left = forward[warmup:]
    steady = [action for pair in zip(backward, left, strict=False) for action in pair]
    return [*forward[:warmup], *steady, *backward[len(left) :]]


def microbatches_of(stage: int, kind: ActionKind, microbatches: int) -> list[Action]:
    """One action of a kind for each micro-batch, in order."""
    return [Action(stage, kind, microbatch) for microbatch in range(microbatches)]


def delay_weights(actions: Actions) -> Actions:
    """Backward weight delaying: the gradient of a stage's inputs first, so that it leaves early, that of its
    weights after it.

    Eager 1F1B of three stages, delayed; forward, input and weight gradient take one unit each, as does a
    transfer::

        rank 0  F0 F1 F2 F3 F4 .  .  .  .  I0 W0 F5 I1 W1 .  I2 W2 .  I3 W3 .  I4 W4 .  I5 W5
        rank 1  .  .  F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3 .  I4 W4 .  I5 W5
        rank 2  .  .  .  .  F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 F4 I4 W4 F5 I5 W5

    - every B becomes I W; the transfer of the input gradient travels during W
    - makespan of delayed Eager1F1B: (m + n - 1)(F + B) - (n - 1) W + 2 (n - 1) c while c <= (F + B + W) / 2:
      in the drain each stage waits for I of the next, no longer for its whole B
    - peak activations: those of the schedule that is delayed, since W follows at once

    W stands right after its I. Moving it further back fills bubbles at the cost of activations: that is what
    zero-bubble schedules do (`zb_h1`, `zb_h2`, `zb_v`). Source: Zhuang et al., 2022, section 4 (an order
    inside one backward program there); Qi et al., "Zero Bubble Pipeline Parallelism", 2023, for I and W as
    actions.

    A backward that is split already stays.
    """
    return {rank: [part for action in row for part in _parts(action)] for rank, row in actions.items()}


def _parts(action: Action) -> list[Action]:
    if action.kind is not ActionKind.B:
        return [action]
    return [Action(action.stage, kind, action.microbatch) for kind in (ActionKind.I, ActionKind.W)]


def gpipe(stages: int, microbatches: int) -> Actions:
    """GPipe: all forwards, then all backwards.

    Three stages, four micro-batches, backward twice as long as forward, transfers free::

        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3---
        rank 1  .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3---
        rank 2  .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3---

    - makespan, free transfers: (m + n - 1)(F + B)
    - bubble: (n - 1) / (m + n - 1)
    - peak activations: m on every stage

    n stages, m micro-batches. Source: Huang et al., "GPipe", 2019. Micro-batches go backward in the order
    they went forward, as in torch.distributed.pipelining, so that each stage accumulates gradients in the
    order of the data.

    Rank i runs stage i.
    """
    return {
        stage: microbatches_of(stage, ActionKind.F, microbatches)
        + microbatches_of(stage, ActionKind.B, microbatches)
        for stage in range(stages)
    }


def one_f_one_b(stages: int, microbatches: int, warmup: Warmup = "1f1b") -> Actions:
    """1F1B: a backward as soon as one can run, so that activations do not pile up.

    Three stages, four micro-batches, backward twice as long as forward, transfers free::

        rank 0  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
        rank 1  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3---
        rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3---

    - warm-up (forwards before the first backward) of stage i: min(m, n - i)
    - makespan, free transfers: (m + n - 1)(F + B), as GPipe
    - peak activations of stage i: min(m, n - i)
    - with a transfer time c per micro-batch and direction nothing hides it: a forward that a stage needs now
      was made just before

    n stages, m micro-batches, i from 0. Source: Narayanan et al., "PipeDream", 2019, in the form with a
    flush. Fewer micro-batches than stages are allowed (torch's class refuses them); the warm-up is then m.

    Rank i runs stage i. For `warmup` see `warmup_of_stages`.
    """
    return {
        stage: alternate(
            microbatches_of(stage, ActionKind.F, microbatches),
            microbatches_of(stage, ActionKind.B, microbatches),
            count,
        )
        for stage, count in enumerate(warmup_of_stages(warmup, stages, microbatches))
    }


def eager_1f1b(stages: int, microbatches: int, warmup: Warmup = "eager") -> Actions:
    """Eager 1F1B: 1F1B with a longer warm-up, so that every forward transfer has a whole period to travel.

    Three stages, six micro-batches, backward twice as long as forward, each transfer as long as a forward::

        rank 0  F0 F1 F2 F3 F4 .  .  .  .  .  .  B0--- F5 B1--- .  B2--- .  B3--- .  B4--- .  B5---
        rank 1  .  .  F0 F1 F2 .  .  .  B0--- F3 B1--- F4 B2--- F5 B3--- .  B4--- .  B5---
        rank 2  .  .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5---

    - warm-up of stage i: min(m, 2(n - i) - 1), one micro-batch more in flight on every hop than 1F1B has
    - peak activations of stage i: min(m, 2(n - i) - 1); the last stage holds one, as in 1F1B
    - the loop through one hop (forward transfer, work of the consumer, backward transfer) spans two periods
      instead of one, so the period stays F + B while the transfer time c of one micro-batch and direction is
      at most (F + B) / 2
    - makespan then: (m + n - 1)(F + B) + 2 (n - 1) c, where only the first forward and the last backward wait
      for transfers
    - any warm-up w_i in between is allowed (`warmup=`): the transfers of the hop from i to i + 1 are hidden
      while 2 c <= (w_i - w_{i+1} - 1)(F + B); the peak is min(m, w_i)

    n stages, m micro-batches, i from 0. Source: Zhuang et al., "On Optimizing the Communication of Model
    Parallelism", 2022, section 4.

    Rank i runs stage i. For `warmup` see `warmup_of_stages`.
    """
    return one_f_one_b(stages, microbatches, warmup)


_PER_HOP = {"1f1b": 1, "eager": 2}


def interleaved_1f1b(
    stages: int, microbatches: int, ranks: int | None = None, warmup: Warmup = "eager"
) -> Actions:
    """Interleaved 1F1B: several stages on each rank, stage s on rank s mod p, for a shorter fill and drain.

    Two ranks, four stages, four micro-batches, eager warm-up; each stage takes one unit forward and two
    backward, a transfer takes one; stage before the kind::

        rank 0  0F0 0F1 .   .   2F0 2F1 0F2 .   .   .   2B0---- 0F3 2B1---- 2F2 0B0---- 2F3 0B1---- .   2B2---- .   2B3---- .   0B2---- .   0B3----
        rank 1  .   .   1F0 1F1 .   .   3F0 3B0---- 3F1 3B1---- 1F2 1B0---- 1F3 1B1---- 3F2 3B2---- 3F3 3B3---- .   1B2---- .   1B3----

    - a rank takes p micro-batches through its first stage, then the same p through its next one, and so on,
      then the next p; backward in the same way, last stage first
    - warm-up of rank r, in forwards of single stages: (v - 1) p + d (p - 1 - r) + 1, at most m v.
      warmup="1f1b": d = 1, enough while transfers are free; "eager" (the default, what torch and Megatron
      run): d = 2, which gives each transfer between neighbours a period to travel
    - peak activations of rank r: its warm-up, counted in stages of 1/v of a rank each
    - makespan, free transfers, m a multiple of p: m v (F + B) + (p - 1)(F + B), with the times of one stage
    - m not a multiple of p: the rows for the next multiple, without the micro-batches that are not there
    - v = 1 is 1F1B, or eager 1F1B

    p ranks, v stages each, m micro-batches. Source: Narayanan et al., "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM", 2021, section 2.2.

    Rank r runs stages r, r + ranks, r + 2 ranks, ...; ranks: default half the stages, two on each. Raises
    ScheduleError unless the ranks divide the stages.
    """  # noqa: E501
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
        raise ScheduleError(f'the warm-up of interleaved 1F1B is "1f1b" or "eager", found {shown(warmup)}')
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


def zb_h1(stages: int, microbatches: int) -> Actions:
    """ZB-H1 and ZB-H2: input gradients leave at once, weight gradients fill what would be bubbles.

    ZB-H1, three stages, five micro-batches; F, I and W take one unit each, transfers are free::

        rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

    ZB-H2, the same::

        rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
        rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
        rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

    =====  ==================  ==================  ===============================
    order  warm-up of stage i  W lags behind I by  peak activations of every stage
    =====  ==================  ==================  ===============================
    ZB-H1  n - i               i micro-batches     min(m, n)
    ZB-H2  2(n - i) - 1        2i micro-batches    min(m, 2n - 1)
    =====  ==================  ==================  ===============================

    - idle time of stage i between its first and its last action, free transfers: ZB-H1 (n - 1 - i)(F + I - W)
      for m >= n; ZB-H2 none for F = I = W and m >= 2n - 1
    - makespan of both with F = I = W: m (F + B) + (n - 1) F for m >= n and m >= 2n - 1; 1F1B has (m + n -
      1)(F + B)
    - the lag makes up for the shorter warm-up, so that every stage holds as much as stage 0 does
    - ZB-H1 has the warm-up of 1F1B and exposes transfers as that does, ZB-H2 that of eager 1F1B and hides
      them
    - the stages of ZB-H2 end one after the other, as they began: the next step may begin in between, if
      nothing makes the stages meet
    - fewer micro-batches: the rows for 2n, without the micro-batches that are not there

    n stages, m micro-batches, i from 0. Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, sections
    2 and 3.

    Rank i runs stage i.
    """
    return {stage: _row(stage, stages - stage, stage, stages, microbatches) for stage in range(stages)}


def zb_h2(stages: int, microbatches: int) -> Actions:
    """ZB-H2: twice the memory of 1F1B, and no bubbles; see `zb_h1`. Rank i runs stage i."""
    return {
        stage: _row(stage, 2 * (stages - stage) - 1, 2 * stage, stages, microbatches)
        for stage in range(stages)
    }


def _row(stage: int, warmup: int, lag: int, stages: int, microbatches: int) -> list[Action]:
    """F ahead of I by ``warmup`` micro-batches, I ahead of W by ``lag``: I W F in turn as long as there are
    any."""
    length = max(microbatches, 2 * stages)
    row = [Action(stage, ActionKind.F, microbatch) for microbatch in range(min(warmup, length))]
    for microbatch in range(length + lag):
        if microbatch < length:
            row.append(Action(stage, ActionKind.I, microbatch))
        if microbatch >= lag:
            row.append(Action(stage, ActionKind.W, microbatch - lag))
        if microbatch + warmup < length:
            row.append(Action(stage, ActionKind.F, microbatch + warmup))
    return [action for action in row if action.microbatch < microbatches]


F, I, W = ActionKind.F, ActionKind.I, ActionKind.W  # noqa: E741


def zb_v(stages: int, microbatches: int) -> Actions:
    """ZB-V: two stages on each rank, down the ranks and up again, so that the last stage is next to the
    first.

    Two ranks, four stages, four micro-batches; each stage takes one unit for F, I and W; stage before the
    kind::

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    - rank r of p runs stages r and 2p - 1 - r; stages 0 and n - 1 are on rank 0, the turn is inside rank p -
      1
    - peak activations of each rank: min(2m, 2p) for m >= 2p, counted in stages of half a rank each: what 1F1B
      holds on its first stage
    - no idle time between the first and the last action of a rank for F = I = W, free transfers, m >= 2p
    - makespan then: 2m (F + I + W) + (p - 1) F, with the times of one stage, half a rank's
    - fewer micro-batches: the rows for 2p, without the micro-batches that are not there

    Rows of rank r: 2(p - r) - 1 forwards down, r pairs of one up and one down, p - r times forward and whole
    backward up; then F I W down, F I W up in turn; at the end the input gradients first, which the ranks
    below wait for, and the weights last.

    p ranks, n = 2p stages, m micro-batches. Source: Qi et al., "Pipeline Parallelism with Controllable
    Memory", 2024, V-ZB.

    Rank r runs stages r and stages - 1 - r. Raises ScheduleError for an odd number of stages.
    """  # noqa: E501
    if stages % 2:
        raise ScheduleError(f"ZB-V has two stages on each rank: an even number of stages, found {stages}")
    ranks = stages // 2
    length = max(microbatches, 2 * ranks)
    return {
        rank: [
            action
            for action in _OrderRow(rank, stages - 1 - rank, length).fill(rank, ranks)
            if action.microbatch < microbatches
        ]
        for rank in range(ranks)
    }


class _OrderRow:
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


def forward_only(actions: Actions) -> Actions:
    """Returns what evaluation runs of a schedule: its forwards in their order.

    n stages, m micro-batches, free transfers: makespan (m + n - 1) F; nothing is held for a backward.
    """
    return {rank: [action for action in row if action.kind is ActionKind.F] for rank, row in actions.items()}


def _of_gpipe(stages: int, microbatches: int) -> Actions:
    return forward_only(gpipe(stages, microbatches))


_SPECS = {
    spec.name: spec
    for spec in (
        OrderSpec("1F1B", one_f_one_b, has_warmup=True, warmup_by_stage=True),
        OrderSpec("Eager1F1B", eager_1f1b, has_warmup=True, warmup_by_stage=True),
        OrderSpec("ForwardOnly", _of_gpipe),
        OrderSpec("GPipe", gpipe),
        OrderSpec("Interleaved1F1B", interleaved_1f1b, has_warmup=True, open_ranks=True, stacked=True),
        OrderSpec("ZBH1", zb_h1),
        OrderSpec("ZBH2", zb_h2),
        OrderSpec("ZBV", zb_v, stacked=True),
    )
}
SCHEDULES = tuple(_SPECS)


def build(
    name: str,
    stages: int,
    microbatches: int,
    *,
    ranks: int | None = None,
    warmup: Warmup | None = None,
    delay_weight_grad: bool = False,
) -> Actions:
    """Compute actions of the schedule called ``name`` (case does not matter).

    Args:
        ranks: Interleaved1F1B only, default: half the stages, two on each. All others have a fixed number.
        warmup: 1F1B and Eager1F1B, see `warmup_of_stages`; Interleaved1F1B: "1f1b" or "eager". Default: that
            of the schedule.
        delay_weight_grad: split every backward into I and W, see `delay_weights`.

    Raises:
        ScheduleError: unknown name (lists those there are), or an option that the schedule does not have.
    """
    spec = spec_of(name)
    check_size(stages, microbatches)
    options: dict[str, Any] = {}
    if warmup is not None:
        if not spec.has_warmup:
            raise ScheduleError(f"{spec.name} has no warm-up to choose, found {shown(warmup)}")
        options["warmup"] = warmup
    if spec.open_ranks:
        options["ranks"] = ranks
    actions = spec.order(stages, microbatches, **options)
    if ranks is not None and len(actions) != ranks:
        raise ScheduleError(
            f"{spec.name} with {stages} stages runs on {len(actions)} ranks, found ranks={ranks}"
        )
    return delay_weights(actions) if delay_weight_grad else actions


def spec_of(name: str) -> OrderSpec:
    """Returns the spec of a schedule; case does not matter. Raises ScheduleError, which lists them all."""
    for known, spec in _SPECS.items():
        if known.lower() == name.lower():
            return spec
    raise ScheduleError(f"there is no schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
