"""The copies of UCX that tests of transports run with: the wheel's, and the system's where there is one."""

from __future__ import annotations

import ctypes.util

import pytest

__all__ = ["LIBRARIES", "need_system"]

LIBRARIES = ("wheel", "system")


def need_system() -> None:
    """Skips, with the reason, where the system has no UCX."""
    if ctypes.util.find_library("ucp") is None:
        pytest.skip(
            "this machine has no UCX of its own: no libucp.so.0, which the distribution's libucx0 has"
        )
