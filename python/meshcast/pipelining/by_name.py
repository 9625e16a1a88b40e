"""Schedules by their names."""

from __future__ import annotations

from typing import Any

from meshcast.base.checks import typed_arguments
from meshcast.errors import LayoutError
from meshcast.pipelining.auto import ScheduleAuto
from meshcast.pipelining.classes import CLASSES
from meshcast.pipelining.schedule import PipelineSchedule

__all__ = ["get_schedule_class"]


@typed_arguments()
def get_schedule_class(schedule_name: str) -> type[PipelineSchedule]:
    """The class of a schedule, in any case, with or without "Schedule" before its name. "auto":
    `ScheduleAuto`, which chooses at its first step.

    Raises LayoutError, which is a ValueError, that lists the names there are.

    Example::

        from meshcast.pipelining import ScheduleEager1F1B, get_schedule_class

        assert get_schedule_class("eager1f1b") is get_schedule_class("ScheduleEager1F1B") is ScheduleEager1F1B
    """
    found: dict[str, Any] = {name.lower(): cls for name, cls in {**CLASSES, "auto": ScheduleAuto}.items()}
    wanted = schedule_name.lower()
    if wanted.removeprefix("schedule") in found:
        return found[wanted.removeprefix("schedule")]
    raise LayoutError(f"there is no schedule {schedule_name!r}; choose one of {', '.join(CLASSES)}, auto")
