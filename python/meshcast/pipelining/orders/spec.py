"""SPEC: what is to be known of a schedule beside the order of its actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshcast.base.checks import shown
from meshcast.pipelining.action import Actions
from meshcast.pipelining.errors import ScheduleError

__all__ = ["OrderSpec", "check_size"]

# Forwards of a step, over all stages. An action takes some 200 bytes, and there are up to five for each.
_MOST_FORWARDS = 1 << 20


def check_size(stages: int, microbatches: int) -> None:
    """Raises ScheduleError for a step that nobody could run, before memory is filled with its actions."""
    for name, count in (("stages", stages), ("microbatches", microbatches)):
        if isinstance(count, bool) or not isinstance(count, int):
            raise ScheduleError(f"{name} must be an integer, found {shown(count)}")
    if stages > 0 and microbatches > 0 and stages * microbatches > _MOST_FORWARDS:
        raise ScheduleError(
            f"{stages} stages and {microbatches} micro-batches are {stages * microbatches} forwards in a "
            f"step; at most {_MOST_FORWARDS} can be scheduled"
        )


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
