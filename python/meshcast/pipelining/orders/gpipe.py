"""GPipe: all forwards, then all backwards.

Three stages, four micro-batches, backward twice as long as forward, transfers free::

    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3---
    rank 1  .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3---
    rank 2  .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3---

- makespan, free transfers: (m + n - 1)(F + B)
- bubble: (n - 1) / (m + n - 1)
- peak activations: m on every stage

n stages, m micro-batches. Source: Huang et al., "GPipe", 2019. Micro-batches go backward in the order they
went forward, as in torch.distributed.pipelining, so that each stage accumulates gradients in the order of the
data.
"""

from __future__ import annotations

from meshcast.pipelining.action import ActionKind, Actions
from meshcast.pipelining.orders.spec import OrderSpec
from meshcast.pipelining.orders.warmup import check_sizes, microbatches_of


def gpipe(stages: int, microbatches: int) -> Actions:
    """Compute actions of each rank; rank i runs stage i."""
    check_sizes(stages, microbatches)
    return {
        stage: microbatches_of(stage, ActionKind.F, microbatches)
        + microbatches_of(stage, ActionKind.B, microbatches)
        for stage in range(stages)
    }


SPEC = OrderSpec("GPipe", gpipe)
