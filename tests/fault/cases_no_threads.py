"""One rank may start no more threads when its private group comes up: all ranks must hear of it at once."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast import _C, Layout, MeshcastError
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 60.0
_ROOM = 1 << 20  # bytes of address space: enough for small objects, too little for the stack of a thread


def move(rank: int) -> None:
    layouts = Layout([0], [Shard(0)]), Layout([1, 2], [Replicate()])
    mine = torch.arange(100.0) if rank == 0 else None
    out = meshcast.reshard_local(
        mine, layouts[0], None, layouts[1], shape=(100,), dtype=torch.float32, timeout=60.0
    )
    assert rank == 0 or torch.equal(out, torch.arange(100.0))


@contextlib.contextmanager
def no_more_threads() -> Iterator[None]:
    """Stacks that earlier threads have left are taken first."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    go = threading.Event()
    taken = []
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _ROOM, before[1]))
    try:
        with contextlib.suppress(RuntimeError):
            while len(taken) < 1000:
                taken.append(threading.Thread(target=go.wait, daemon=True))
                taken[-1].start()
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        go.set()


def a_group_without_threads(context) -> None:
    real = _C.GroupCore

    def limited(*args):
        with no_more_threads():
            return real(*args)

    if context.rank == 1:
        _C.GroupCore = limited
    begin = time.monotonic()
    with pytest.raises(MeshcastError, match=r"rank 1: .*no thread could be had"):
        move(context.rank)
    assert time.monotonic() - begin < 30.0, "the limit of the call is 60 s"
    _C.GroupCore = real
    context.wait_for_all("failed")
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("again", context.store), rank=context.rank, world_size=3
    )
    move(context.rank)


CASES = [a_group_without_threads]
