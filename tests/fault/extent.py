"""How much of what is long runs: a part in `make test-all`, all of it in `make test-faults`."""

from __future__ import annotations

import os

WHOLE = 1800.0  # seconds of the fault matrix, what FAULT_SECONDS of the Makefile stands for
SECONDS = float(os.environ.get("MESHCAST_FAULT_SECONDS", "600"))


def part(rounds: int) -> int:
    """Of the rounds that a whole run has; 1 at least."""
    return max(1, round(rounds * SECONDS / WHOLE))
