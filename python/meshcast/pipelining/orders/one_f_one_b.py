"""1F1B: a backward as soon as one can run, so that activations do not pile up.

Three stages, four micro-batches, backward twice as long as forward, transfers free::

    rank 0  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
    rank 1  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3---
    rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3---

- warm-up (forwards before the first backward) of stage i: min(m, n - i)
- makespan, free transfers: (m + n - 1)(F + B), as GPipe
- peak activations of stage i: min(m, n - i)
- with a transfer time c per micro-batch and direction nothing hides it: a forward that a stage needs now was
  made just before

n stages, m micro-batches, i from 0. Source: Narayanan et al., "PipeDream", 2019, in the form with a flush.
Fewer micro-batches than stages are allowed (torch's class refuses them); the warm-up is then m.
"""

from __future__ import annotations

from meshcast.pipelining.action import ActionKind, Actions
from meshcast.pipelining.orders.spec import OrderSpec
from meshcast.pipelining.orders.warmup import (
    Warmup,
    alternate,
    check_sizes,
    microbatches_of,
    warmup_of_stages,
)


def one_f_one_b(stages: int, microbatches: int, warmup: Warmup = "1f1b") -> Actions:
    """Compute actions of each rank; rank i runs stage i. For `warmup` see `warmup_of_stages`."""
    check_sizes(stages, microbatches)
    return {
        stage: alternate(
            microbatches_of(stage, ActionKind.F, microbatches),
            microbatches_of(stage, ActionKind.B, microbatches),
            count,
        )
        for stage, count in enumerate(warmup_of_stages(warmup, stages, microbatches))
    }


SPEC = OrderSpec("1F1B", one_f_one_b, has_warmup=True, warmup_by_stage=True)
