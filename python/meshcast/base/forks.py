"""Forked children: such a process has copies of everything but the threads, and shares the connections.

The objects of its parent are not its own. It must not use them, wait for them or end them.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import AbortedError

__all__ = ["check", "check_group", "count", "no_calls"]

count = 0
"""Forks between the first process that imported this and this one. A holder of it knows later whether it is
still in the process that made it."""

_parent = 0  # process id
_groups: weakref.WeakSet[Any] = weakref.WeakSet()  # process groups of the parent
_thread = threading.local()  # refuses: calls of this thread are refused


def check(fork_count: int, op: str) -> None:
    """Raises AbortedError in a forked child of the process where `count` was `fork_count`."""
    if fork_count != count:
        raise AbortedError(
            f"{op}: this process was forked from process {_parent}, whose connections it must not use: call "
            "meshcast there, or start workers by spawn",
            op=op,
            phase="start",
        )
    if getattr(_thread, "refuses", False):
        _thread.refused = True
        raise AbortedError(f"{op}: no call here: other ranks take no part in a trial", op=op, phase="start")


@contextmanager
def no_calls() -> Iterator[list[bool]]:
    """Refuses calls of meshcast in this thread, which other ranks would not make. Yields a list that has an
    entry afterwards where one was refused."""
    found: list[bool] = []
    _thread.refuses, _thread.refused = True, False
    try:
        yield found
    finally:
        if _thread.refused:
            found.append(True)
        _thread.refuses = False


def check_group(group: Any, op: str) -> None:
    """Raises AbortedError for a process group of torch that the parent made."""
    if group in _groups:
        check(-1, op)


def _before() -> None:
    global _parent
    _parent = os.getpid()


def _in_child() -> None:
    global count
    count += 1
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return
    for group, (_, store) in c10d._world.pg_map.items():
        _groups.add(group)
        # Never released: gloo would wait for threads that are not there, for ever.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))


os.register_at_fork(before=_before, after_in_child=_in_child)
