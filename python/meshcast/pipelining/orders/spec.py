"""SPEC: what is to be known of a schedule beside the order of its actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshcast.pipelining.action import Actions

__all__ = ["OrderSpec"]


@dataclass(frozen=True)
class OrderSpec:
    """One schedule; each module of this package that has one says so in its SPEC.

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
