"""torch's names that are not offered here: they can be imported, so that a script is told at the call, by
name and with the reason, what to change."""

from __future__ import annotations

from typing import Any, NoReturn

from meshcast.errors import LayoutError

__all__ = [
    "TRACED",
    "ScheduleDualPipeV",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "build_stage",
    "reason_against",
]

_REASONS = {
    "ScheduleInterleavedZeroBubble": "use ScheduleInterleaved1F1B with delay_weight_grad=True",
    "ScheduleLoopedBFS": "it holds the activations of all micro-batches; ScheduleInterleaved1F1B takes as "
    "long with fewer",
    "ScheduleDualPipeV": "it fuses a forward and a backward into one action, which is not supported; use "
    "ScheduleZBV",
}
TRACED = (
    "stages that torch builds from a traced Pipe do not run here; give their modules, "
    "pipe.get_stage_module(i), to meshcast.pipelining.PipelineStage, with edges= where values skip stages"
)


def reason_against(name: str) -> str | None:
    """Why torch's schedule of this name, in lower case and without "Schedule", is not offered; None for
    others."""
    reasons = {each.removeprefix("Schedule").lower(): reason for each, reason in _REASONS.items()}
    return reasons.get(name)


class _Refused:
    """Base of the classes below."""

    _reason = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise LayoutError(f"{type(self).__name__} is not offered: {self._reason}")


class ScheduleInterleavedZeroBubble(_Refused):
    """Refused when made."""

    _reason = _REASONS["ScheduleInterleavedZeroBubble"]


class ScheduleLoopedBFS(_Refused):
    """Refused when made."""

    _reason = _REASONS["ScheduleLoopedBFS"]


class ScheduleDualPipeV(_Refused):
    """Refused when made."""

    _reason = _REASONS["ScheduleDualPipeV"]


def build_stage(*_: Any, **__: Any) -> NoReturn:
    """Refused when called."""
    raise LayoutError(f"build_stage() is not offered: {TRACED}")
