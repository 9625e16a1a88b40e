"""Schedules: pure functions from (stages, micro-batches) to the compute actions of each rank."""

from __future__ import annotations

from collections.abc import Callable

from meshcast.pipelining.action import Actions
from meshcast.pipelining.errors import ScheduleError
from meshcast.pipelining.schedules.eager_1f1b import eager_1f1b
from meshcast.pipelining.schedules.gpipe import forward_only, gpipe
from meshcast.pipelining.schedules.one_f_one_b import one_f_one_b

__all__ = ["BUILDERS", "build", "eager_1f1b", "forward_only", "gpipe", "one_f_one_b"]

BUILDERS: dict[str, Callable[[int, int], Actions]] = {
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "Eager1F1B": eager_1f1b,
    "ForwardOnly": forward_only,
}


def build(name: str, stages: int, microbatches: int) -> Actions:
    """Compute actions of the schedule called ``name`` (case does not matter). Raises ScheduleError that lists
    the names there are."""
    for known, builder in BUILDERS.items():
        if known.lower() == name.lower():
            return builder(stages, microbatches)
    raise ScheduleError(f"there is no schedule {name!r}; choose one of {', '.join(BUILDERS)}")
