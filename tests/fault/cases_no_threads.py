"""One rank may start no more threads when its private group comes up, or later: all ranks must hear of it at
once, and the group is of use once there are threads again."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from meshcast import (  # functions too: an import on first use would lack memory
    _C,
    AbortedError,
    DeadlineExceededError,
    Layout,
    MeshcastError,
    PeerLostError,
    reshard_local,
)
from multiproc.threads import thread_names
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 60.0
_SAID = r"rank 1: .*no thread could be had"
# Bytes of address space that are left: enough for whatever a call allocates (glibc ends a process that has no
# room for a thread's own data), too little for the stack of one more thread.
_ROOM = int(os.environ["STACK"]) // 2


def move(rank: int, size: int = 100) -> None:
    layouts = Layout([0], [Shard(0)]), Layout([1, 2], [Replicate()])
    full = torch.arange(float(size))
    mine = full if rank == 0 else None
    out = reshard_local(mine, layouts[0], None, layouts[1], shape=(size,), dtype=torch.float32, timeout=60.0)
    assert rank == 0 or torch.equal(out, full)


@contextlib.contextmanager
def no_more_threads() -> Iterator[None]:
    """Stacks that earlier threads have left are taken first, and those of threads that are just ending."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    go = threading.Event()
    failed = taken = 0
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _ROOM, before[1]))
    try:
        while failed < 10 and taken < 1000:
            try:
                threading.Thread(target=go.wait, daemon=True).start()
                taken += 1
            except RuntimeError:
                failed += 1
                time.sleep(0.02)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        go.set()


def refused(context, limits: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Rank 1 calls where limits() hold: all ranks raise at once, and the next call goes through."""
    begin = time.monotonic()
    here = limits() if context.rank == 1 else contextlib.nullcontext()
    with here, pytest.raises(MeshcastError, match=_SAID) as caught:
        move(context.rank)
    assert time.monotonic() - begin < 20.0, "the limit of the call is 60 s"
    assert not isinstance(caught.value, PeerLostError | DeadlineExceededError | AbortedError)
    context.wait_for_all("failed")


def no_control_thread(context) -> None:
    """None for the call itself, which finds no group yet; then one that does and has a plan to agree on."""
    refused(context, no_more_threads)
    move(context.rank)
    refused_plan(context)
    move(context.rank)


def refused_plan(context) -> None:
    while "mc-control" in thread_names():  # an idle one would do
        time.sleep(0.05)
    begin = time.monotonic()
    here = no_more_threads() if context.rank == 1 else contextlib.nullcontext()
    with here, pytest.raises(MeshcastError, match=_SAID):
        move(context.rank, 101)
    assert time.monotonic() - begin < 20.0, "the limit of the call is 60 s"
    move(context.rank, 101)


@contextlib.contextmanager
def limited(where: object, name: str) -> Iterator[None]:
    """There are no more threads from the moment that this is made."""
    real = getattr(where, name)
    with contextlib.ExitStack() as limits:

        def made(*args):
            limits.enter_context(no_more_threads())
            return real(*args)

        setattr(where, name, made)
        try:
            yield
        finally:
            setattr(where, name, real)


def no_work_thread(context) -> None:
    refused(context, lambda: limited(_C, "WorkThread"))
    move(context.rank)


def no_ucx_thread(context) -> None:
    refused(context, lambda: limited(_C, "UcxPlane"))
    move(context.rank)


CASES = [{"control": no_control_thread, "work": no_work_thread, "ucx": no_ucx_thread}[os.environ["THREAD"]]]
