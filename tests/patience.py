"""What tests allow for what should take no time, on machines of any speed.

An upper bound on time is at least ten times what is expected on an idle machine, and passes through
patient(): MESHCAST_TEST_PATIENCE, 1 unless it is set, multiplies all of them. Where a page promises a bound
to users, the promise comes first and patient() of what a busy machine adds to it.
"""

from __future__ import annotations

import os

__all__ = ["patient"]

_FACTOR = float(os.environ.get("MESHCAST_TEST_PATIENCE", "1"))


def patient(seconds: float) -> float:
    """Returns the bound in seconds on this machine."""
    return seconds * _FACTOR
