"""Many ranks on few cores stand for ranks with cores of their own: they must not wait for each other longer
than they compute."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

__all__ = ["SLICE", "cores_of", "short_slices"]

SLICE = 0.2e-3  # seconds; the kernel's own is 3 ms or so, hundreds of which would show in a chain of messages
_SYSCALLS = {"x86_64": 314, "aarch64": 274}  # sched_setattr
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period


def short_slices() -> str:
    """This process, and all that it starts from now on, hand the core over after SLICE to who waits for it.
    Returns why the kernel does not do that, or ""; it does from Linux 6.12 on."""
    number = _SYSCALLS.get(platform.machine())
    if number is None:
        return f"no number of sched_setattr is known on {platform.machine()}"
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, 0, 0, int(SLICE * 1e9), 0, 0)
    if ctypes.CDLL(None, use_errno=True).syscall(number, 0, attributes, 0):
        return f"sched_setattr: {os.strerror(ctypes.get_errno())}"
    return ""


def cores_of(host: int, hosts: int) -> str:
    """The cores that the ranks of a host run on, as taskset takes them: its part of those of this process, or
    the one that it shares with other hosts."""
    usable = sorted(os.sched_getaffinity(0))
    own = usable[host::hosts] if hosts < len(usable) else [usable[host % len(usable)]]
    return ",".join(map(str, own))
