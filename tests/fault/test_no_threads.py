"""Where a rank can start no more threads, all ranks raise an error that says so, and the next call goes
through; see cases_no_threads.py."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from multiproc.harness import run_world

_STACK = 64 << 20  # bytes of each thread's stack


@contextlib.contextmanager
def stacks() -> Iterator[None]:
    """New processes give each thread a stack of _STACK bytes."""
    before = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, before)


@pytest.mark.parametrize("thread", ["control", "work", "ucx"])
@pytest.mark.parametrize("shm", ["0", "1"], ids=["network", "shared memory"])
def test_no_threads(shm: str, thread: str) -> None:
    """thread: which there is none for. In processes that had no other before, whose stacks would be left."""
    env = {"MESHCAST_SHM": shm, "THREAD": thread, "STACK": str(_STACK)}
    with stacks():
        world = run_world(Path(__file__).with_name("cases_no_threads.py"), 3, limit=110.0, env=env)
    world.check(f"no_{thread}_thread")
    world.check_ends()
