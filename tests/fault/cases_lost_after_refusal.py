"""Rank 0 refuses a call while an earlier one is in flight, which rank 2 has not come to. That one goes on,
since rank 2 may come to it. Once rank 2 has died, rank 0, which sends to it, is told, long before the limit.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from meshcast import AbortedError, Layout, LayoutError, MeshcastError, PlanMismatchError, reshard_local
from torch.distributed.tensor import Shard

GROUP_TIMEOUT = 60.0
LEAVE_UP = True  # the case ends the group itself

DIES = os.environ["DIES"] == "1"
SIZE = 1 << 22  # 16 MiB: a send ends when its receiver has it


def start(rank: int, shape=(SIZE,)):
    full = torch.arange(float(SIZE)) if rank == 0 else None
    where = Layout([0], [Shard(0)]), Layout([1, 2], [Shard(0)])
    return reshard_local(full, where[0], None, where[1], shape=shape, dtype=torch.float32, async_op=True)


def lost_after_refusal(context) -> None:
    rank = context.rank
    start(rank).wait()
    context.wait_for_all("known", limit=60.0)
    if rank == 2:
        context.store.wait(["refused"])
        time.sleep(0.5)  # rank 1 hears of it
        if DIES:
            os.kill(os.getpid(), signal.SIGKILL)
    first = start(rank)
    begin = time.monotonic()
    if rank == 0:
        with pytest.raises(LayoutError, match="size of dimension"):
            start(rank, (SIZE, -1))
        context.store.set("refused", "")
    if DIES:
        # Rank 1 may have what it needs, or be told of the end while its part waits behind that of rank 2.
        with pytest.raises(MeshcastError) if rank == 0 else suppress(AbortedError):
            first.wait()
        assert time.monotonic() - begin < 10.0, "the limit is 60 s"
        context.wait_for_all("survived", [0, 1], limit=60.0)
    else:
        out = first.wait()
        assert rank == 0 or torch.equal(out, torch.arange(float(SIZE)).chunk(2)[rank - 1])
        if rank > 0:
            with pytest.raises(PlanMismatchError, match="rank 0 refused"):
                start(rank).wait()
        context.wait_for_all("over", limit=60.0)
        start(rank).wait()
    dist.destroy_process_group()


CASES = [lost_after_refusal]
