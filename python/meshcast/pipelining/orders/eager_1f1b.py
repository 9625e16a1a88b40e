"""Eager 1F1B: 1F1B with a longer warm-up, so that every forward transfer has a whole period to travel.

Three stages, six micro-batches, backward twice as long as forward, each transfer as long as a forward::

    rank 0  F0 F1 F2 F3 F4 .  .  .  .  .  .  B0--- F5 B1--- .  B2--- .  B3--- .  B4--- .  B5---
    rank 1  .  .  F0 F1 F2 .  .  .  B0--- F3 B1--- F4 B2--- F5 B3--- .  B4--- .  B5---
    rank 2  .  .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5---

- warm-up of stage i: min(m, 2(n - i) - 1), one micro-batch more in flight on every hop than 1F1B has
- peak activations of stage i: min(m, 2(n - i) - 1); the last stage holds one, as in 1F1B
- the loop through one hop (forward transfer, work of the consumer, backward transfer) spans two periods
  instead of one, so the period stays F + B while the transfer time c of one micro-batch and direction is at
  most (F + B) / 2
- makespan then: (m + n - 1)(F + B) + 2 (n - 1) c, where only the first forward and the last backward wait for
  transfers
- any warm-up w_i in between is allowed (`warmup=`): the transfers of the hop from i to i + 1 are hidden while
  2 c <= (w_i - w_{i+1} - 1)(F + B); the peak is min(m, w_i)

n stages, m micro-batches, i from 0. Source: Zhuang et al., "On Optimizing the Communication of Model
Parallelism", 2022, section 4.
"""

from __future__ import annotations

from meshcast.pipelining.action import Actions
from meshcast.pipelining.orders.one_f_one_b import one_f_one_b
from meshcast.pipelining.orders.spec import OrderSpec
from meshcast.pipelining.orders.warmup import Warmup


def eager_1f1b(stages: int, microbatches: int, warmup: Warmup = "eager") -> Actions:
    """Compute actions of each rank; rank i runs stage i. For `warmup` see `warmup_of_stages`."""
    return one_f_one_b(stages, microbatches, warmup)


SPEC = OrderSpec("Eager1F1B", eager_1f1b, has_warmup=True, warmup_by_stage=True)
