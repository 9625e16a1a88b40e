"""A rank dies or freezes in the middle of reshard_state_dict(async_op=True): ranks 0 and 1 hold, ranks 1 and
2 receive, and one comes late, so that nothing can be complete by then.

All survivors raise an error that names the lost rank; none returns weights.
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
from multiproc.meshes import quiet_mesh, sharded
from torch.distributed.tensor import Shard

GROUP_TIMEOUT = 60.0
LEAVE_UP = True  # the case ends the group itself

VICTIM = int(os.environ["VICTIM"])
FAULT = os.environ["FAULT"]  # killed, frozen
LIMIT = float(os.environ["LIMIT"])  # of the call that meets the fault, seconds


def call(rank: int, ranks: list[int], step: int, limit: float):
    """Weights of the first two of these ranks, on the last two."""
    fulls = {name: torch.full((512, 256), float(step)) for name in ("a", "b")}
    source, target = quiet_mesh(ranks[:2]), quiet_mesh(ranks[-2:])
    held = {name: sharded(full, source, [Shard(0)], rank) for name, full in fulls.items()}
    handle = meshcast.reshard_state_dict(
        held if rank in ranks[:2] else None,
        {name: (target, [Shard(1)]) for name in fulls},
        version=step if rank in ranks[:2] else None,
        async_op=True,
        timeout=limit,
    )
    return handle.wait()


def lost_state(context) -> dict:
    rank = context.rank
    result = call(rank, [0, 1, 2], 1, 60.0)
    assert result.version == 1
    context.wait_for_all("ready", limit=60.0)
    late = (VICTIM + 1) % 3
    if rank == VICTIM:
        context.store.set("victim", str(os.getpid()))
        fulls = {name: torch.full((512, 256), 2.0) for name in ("a", "b")}
        held = {name: sharded(full, quiet_mesh([0, 1]), [Shard(0)], rank) for name, full in fulls.items()}
        handle = meshcast.reshard_state_dict(
            held if rank < 2 else None,
            {name: (quiet_mesh([1, 2]), [Shard(1)]) for name in fulls},
            version=2 if rank < 2 else None,
            async_op=True,
            timeout=LIMIT,
        )
        time.sleep(0.3)
        assert not handle.is_completed(), "the late rank has not begun"
        context.store.set("lost", "")
        os.kill(os.getpid(), signal.SIGKILL if FAULT == "killed" else signal.SIGSTOP)
        raise AssertionError("the victim lives on")
    if rank == late:
        context.store.wait(["lost"])
    begin = time.monotonic()
    with pytest.raises((PeerLostError, DeadlineExceededError, AbortedError)) as caught:
        call(rank, [0, 1, 2], 2, LIMIT)
    assert time.monotonic() - begin < LIMIT + 10
    text = str(caught.value)
    assert f"rank {VICTIM}" in text or f"ranks [{VICTIM}]" in text, text
    with pytest.raises((AbortedError, PeerLostError, DeadlineExceededError)):
        call(rank, [0, 1, 2], 3, LIMIT)
    pair = [r for r in range(3) if r != VICTIM]
    x = sharded(torch.arange(8.0), quiet_mesh(pair), [Shard(0)], rank)
    meshcast.reshard(x, quiet_mesh(pair[:1]), [Shard(0)], timeout=60.0)  # the others go on
    context.wait_for_all("survived", pair, limit=60.0)
    if FAULT == "frozen" and rank == pair[0]:
        os.kill(int(context.store.get("victim")), signal.SIGKILL)
    dist.destroy_process_group()
    return {"text": text}


CASES = [lost_state]
