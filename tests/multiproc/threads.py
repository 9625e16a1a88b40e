"""The threads of this process, as the operating system knows them."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


def thread_names() -> list[str]:
    """One that ends meanwhile may be missing."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return names


def transfer_threads() -> int:
    """How many threads meshcast, gloo and torch's gloo backend run."""
    return sum("gloo" in name or name.startswith("mc-") for name in thread_names())


def lasting_threads() -> list[str]:
    """Of meshcast and UCX, once nobody has anything to ask of the store: a call of more than 200 ms has, and
    the first one with a plan."""
    limit = time.monotonic() + 30.0
    while {"mc-report", "mc-control"}.intersection(names := thread_names()):
        assert time.monotonic() < limit, names
        time.sleep(0.05)
    return sorted(name for name in names if name.startswith("mc-") or name == "async")
