"""A rank dies or freezes in the middle of a reduction. Ranks 0, 1 and 2 add up what they hold, all need
the sum. The victim takes part and is lost while one more rank has not begun: nothing can be complete by then.

All survivors must raise an error that names the lost rank, the one that begins late too; a group of survivors
alone still reduces.
"""

from __future__ import annotations

import os
import signal
import time

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast import AbortedError, DeadlineExceededError, PeerLostError
from multiproc.meshes import quiet_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

GROUP_TIMEOUT = 60.0
LEAVE_UP = True  # the case ends the group itself

VICTIM = int(os.environ["VICTIM"])  # -1: nobody, the control run
FAULT = os.environ["FAULT"]  # killed, frozen
LIMIT = float(os.environ["LIMIT"])  # of the call that meets the fault, seconds
ROWS = 1 << 17  # times 64 floats: 32 MiB


def summed(ranks: list[int], rank: int, limit: float) -> torch.Tensor:
    """The sum of rank + 1 over these ranks, on each of them, as one number for every element."""
    mesh = quiet_mesh(ranks)
    x = DTensor.from_local(torch.full((ROWS, 64), rank + 1.0), mesh, [Partial("sum")], run_check=False)
    return meshcast.reshard(x, mesh, [Replicate()], timeout=limit).to_local()


def lost_reducer(context) -> dict:
    rank = context.rank
    assert torch.equal(summed([0, 1, 2], rank, 60.0), torch.full((ROWS, 64), 6.0))
    context.wait_for_all("ready", limit=60.0)
    late = (VICTIM + 1) % 3
    if rank == VICTIM:
        context.store.set("victim", str(os.getpid()))
        mesh = quiet_mesh([0, 1, 2])
        x = DTensor.from_local(torch.ones(ROWS, 64), mesh, [Partial("sum")], run_check=False)
        handle = meshcast.reshard(x, mesh, [Replicate()], timeout=LIMIT, async_op=True)
        # Long enough that what can move without the late rank does; nothing depends on it.
        time.sleep(0.3)
        assert not handle.is_completed(), "the late rank has not begun"
        context.store.set("lost", "")
        os.kill(os.getpid(), signal.SIGKILL if FAULT == "killed" else signal.SIGSTOP)
        raise AssertionError("the victim lives on")
    if VICTIM < 0:
        assert torch.equal(summed([0, 1, 2], rank, LIMIT), torch.full((ROWS, 64), 6.0))
        dist.destroy_process_group()
        return {}
    if rank == late:
        context.store.wait(["lost"])
        # By the time it begins the others may have ended the group already.
        kinds = (PeerLostError, DeadlineExceededError, AbortedError)
    else:
        kinds = (PeerLostError,) if FAULT == "killed" else (DeadlineExceededError,)
    with pytest.raises(kinds) as caught:
        summed([0, 1, 2], rank, LIMIT)
    text = str(caught.value)
    assert f"rank {VICTIM}" in text or f"ranks [{VICTIM}]" in text, text
    if not isinstance(caught.value, AbortedError):
        assert caught.value.peer == VICTIM, text
    with pytest.raises(AbortedError):
        summed([0, 1, 2], rank, LIMIT)
    pair = [r for r in range(3) if r != VICTIM]
    assert torch.equal(summed(pair, rank, 60.0), torch.full((ROWS, 64), float(sum(pair) + 2)))
    context.wait_for_all("survived", pair, limit=60.0)
    if FAULT == "frozen" and rank == pair[0]:
        os.kill(int(context.store.get("victim")), signal.SIGKILL)
    dist.destroy_process_group()
    return {"text": text}


CASES = [lost_reducer]
