"""Sixty-four ranks, each a host of its own: which of them connect with each other in a first reshard."""

from __future__ import annotations

import os
import time

import meshcast
import torch
from meshcast import Layout
from multiproc.cases_transports import open_sockets
from torch.distributed.tensor import Shard

GROUP_TIMEOUT = 120.0
CASE_LIMIT = 200.0
# Its own connection to the store, and the port that UCX listens on.
_BESIDES = 2


def reshard(rank: int, world: int, to: list[int], rows: int) -> None:
    """Row r of the ranks goes to rank to[r]."""
    full = torch.arange(world * rows * 16, dtype=torch.float32).reshape(world * rows, 16)
    out = meshcast.reshard_local(
        full.chunk(world)[rank],
        Layout(list(range(world)), [Shard(0)]),
        None,
        Layout(to, [Shard(0)]),
        shape=full.shape,
        dtype=full.dtype,
    )
    assert out is not None
    assert torch.equal(out, full.chunk(world)[to.index(rank)])


def a_ring(context) -> dict:
    """Each rank sends to the next one: it needs two connections. It may have some more with ranks that it
    looked after while it waited for them."""
    os.environ["MESHCAST_HOST_ID"] = f"host {context.rank}"
    context.wait_for_all("ready", limit=100.0)
    before = open_sockets()
    begin = time.monotonic()
    reshard(context.rank, context.world, [*range(1, context.world), 0], 4)
    seconds = time.monotonic() - begin
    context.wait_for_all("done", limit=100.0)
    return {"connections": open_sockets() - before - _BESIDES, "seconds": seconds}


CASES = [a_ring]
