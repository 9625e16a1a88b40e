"""The error that the pure passes of the pipeline scheduler raise."""

from __future__ import annotations

from meshcast.errors import MeshcastError

__all__ = ["ScheduleError"]


class ScheduleError(MeshcastError, ValueError):
    """A schedule that cannot run: bad text, a missing or repeated action, a wrong order, a deadlock.

    The message names rank, step, stage and micro-batch, and shows the part of the grid around the cell.
    """
