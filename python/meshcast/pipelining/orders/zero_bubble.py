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

- idle time of stage i between its first and its last action, free transfers: ZB-H1 (n - 1 - i)(F + I - W) for
  m >= n; ZB-H2 none for F = I = W and m >= 2n - 1
- makespan of both with F = I = W: m (F + B) + (n - 1) F for m >= n and m >= 2n - 1; 1F1B has
  (m + n - 1)(F + B)
- the lag makes up for the shorter warm-up, so that every stage holds as much as stage 0 does
- ZB-H1 has the warm-up of 1F1B and exposes transfers as that does, ZB-H2 that of eager 1F1B and hides them
- the stages of ZB-H2 end one after the other, as they began: the next step may begin in between, if nothing
  makes the stages meet
- fewer micro-batches: the rows for 2n, without the micro-batches that are not there

n stages, m micro-batches, i from 0. Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, sections 2
and 3.
"""

from __future__ import annotations

from meshcast.pipelining.action import Action, ActionKind, Actions
from meshcast.pipelining.orders.spec import OrderSpec
from meshcast.pipelining.orders.warmup import check_sizes


def zb_h1(stages: int, microbatches: int) -> Actions:
    """Compute actions of each rank; rank i runs stage i."""
    check_sizes(stages, microbatches)
    return {stage: _row(stage, stages - stage, stage, stages, microbatches) for stage in range(stages)}


def zb_h2(stages: int, microbatches: int) -> Actions:
    """Compute actions of each rank; rank i runs stage i."""
    check_sizes(stages, microbatches)
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


SPEC_H1 = OrderSpec("ZBH1", zb_h1)
SPEC_H2 = OrderSpec("ZBH2", zb_h2)
