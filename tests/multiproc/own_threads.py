"""Threads of Python that meshcast has started."""

from __future__ import annotations

import threading
import time


def left_running(known: frozenset[str] = frozenset(), limit: float = 5.0) -> list[str]:
    """Their names, without those `known`, once none is left or `limit` seconds are over: a thread that has
    done its work is there for a moment longer."""
    deadline = time.monotonic() + limit
    while True:
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("meshcast")]
        left = [name for name in names if name not in known]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.01)
