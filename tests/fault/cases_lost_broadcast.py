"""A rank dies in the middle of a large torch.distributed.broadcast on a group of backend meshcast. All
survivors raise an error that names it; a second broadcast of the group says at once what happened; another
group of the survivors goes on, and the process group can be destroyed."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from meshcast import AbortedError, PeerLostError

GROUP_TIMEOUT = 60.0
LEAVE_UP = True  # the case ends the group itself

VICTIM = int(os.environ["VICTIM"])  # -1: nobody, the control run
FLOATS = 32 << 20  # 128 MiB


def values(rank: int, salt: int) -> torch.Tensor:
    return torch.arange(FLOATS, dtype=torch.float32) + salt if rank == 0 else torch.zeros(FLOATS)


def lost_broadcast(context) -> None:
    rank, survivors = context.rank, [r for r in range(3) if r != VICTIM]
    pair = dist.new_group(survivors)
    first = values(rank, 1)
    dist.broadcast(first, 0)  # its ranks have met, and agreed on the plan
    assert torch.equal(first, values(0, 1))
    second = values(rank, 2)
    context.wait_for_all("ready", limit=60.0)
    if rank == VICTIM:
        work = dist.broadcast(second, 0, async_op=True)
        time.sleep(0.01)  # rank 0 needs nobody once it has sent all, which takes longer
        assert not work.is_completed(), "the next rank has not begun"
        context.store.set("lost", "")
        os.kill(os.getpid(), signal.SIGKILL)
    if VICTIM >= 0 and rank == VICTIM + 1:
        # The chain is 0, 1, 2: the victim cannot be through before the next one has begun.
        context.store.wait(["lost"])
    if VICTIM < 0:
        dist.broadcast(second, 0)
        assert torch.equal(second, values(0, 2))
        dist.destroy_process_group()
        return
    with pytest.raises((PeerLostError, AbortedError)) as caught:
        dist.broadcast(second, 0)
    assert f"rank {VICTIM}" in str(caught.value)
    begin = time.monotonic()
    with pytest.raises(AbortedError, match=f"rank {VICTIM}"):
        dist.broadcast(second, 0)
    assert time.monotonic() - begin < 5.0, "a group that has failed must say so at once"
    third = torch.full((FLOATS,), rank + 1.0)
    dist.broadcast(third, survivors[0], group=pair)
    assert torch.equal(third, torch.full((FLOATS,), survivors[0] + 1.0))
    context.wait_for_all("survived", survivors, limit=60.0)
    dist.destroy_process_group()


CASES = [lost_broadcast]
