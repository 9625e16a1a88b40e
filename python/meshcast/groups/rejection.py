"""A rank that refuses its arguments says so to the ranks that wait for it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .. import _C
    from .private import Job, PrivateGroup

__all__ = ["publish_rejection", "rejection_job"]


def publish_rejection(group: PrivateGroup, lane: int, error: Exception, timeout: float) -> None:
    """Tells the other ranks, in the background, that this rank refused its arguments: they raise at once
    instead of waiting."""
    deadline = time.monotonic() + timeout
    group.call(lane, deadline, lambda ordinal: rejection_job(group, lane, ordinal, error), ready=lambda: True)


def rejection_job(group: PrivateGroup, lane: int, ordinal: int, error: Exception) -> Job:
    message = f"rank {group.rank}: {error}"

    def job(core: _C.GroupCore | None, _: Exception | None) -> None:
        if core is not None:
            core.reject(lane, ordinal, message)

    return job
