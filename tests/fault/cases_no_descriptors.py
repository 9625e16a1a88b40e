"""One rank may open no more file descriptors when its private group comes up: all ranks must hear of it at
once, and the group is of use once there are some again."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator

import meshcast
import pytest
import torch
from meshcast import AbortedError, DeadlineExceededError, Layout, MeshcastError, PeerLostError
from torch.distributed.tensor import Replicate, Shard

LEFT = int(os.environ["LEFT"])  # descriptors that the rank may still open


def move(rank: int) -> None:
    full = torch.arange(100.0)
    out = meshcast.reshard_local(
        full if rank == 0 else None,
        Layout([0], [Shard(0)]),
        None,
        Layout([1, 2], [Replicate()]),
        shape=(100,),
        dtype=torch.float32,
        timeout=60.0,
    )
    assert rank == 0 or torch.equal(out, full)


@contextlib.contextmanager
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    holes = [os.dup(0) for _ in range(highest + 1 - len(os.listdir("/proc/self/fd")))]
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + LEFT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for hole in holes:
            os.close(hole)


def a_group_without_descriptors(context) -> None:
    begin = time.monotonic()
    here = few_descriptors() if context.rank == 1 else contextlib.nullcontext()
    with here, pytest.raises(MeshcastError, match=r"rank 1: .*no more file descriptors.*ulimit -n") as caught:
        move(context.rank)
    assert time.monotonic() - begin < 20.0, "the limit of the call is 60 s"
    assert not isinstance(caught.value, PeerLostError | DeadlineExceededError | AbortedError)
    context.wait_for_all("failed")
    move(context.rank)


CASES = [a_group_without_descriptors]
