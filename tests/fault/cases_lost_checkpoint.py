"""A rank dies in the middle of a load through MemoryStorage: all have said what they ask for, and its own
tensors have not moved. Ranks 0 and 1 hold, ranks 1 and 2 load."""

from __future__ import annotations

import os
import signal
import time

import meshcast
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshcast.integrations import dcp as integrations
from meshcast.integrations.dcp import MemoryStorage
from multiproc.meshes import quiet_mesh, sharded
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import Shard

GROUP_TIMEOUT = 60.0
LEAVE_UP = True  # the case ends the group itself

VICTIM = int(os.environ["VICTIM"])


def dies(*_, **__) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def counted(call, last: int):
    """The call, but the last one of these is its process's death."""
    numbers = iter(range(1, last + 1))
    return lambda *args, **kwargs: (dies if next(numbers) == last else call)(*args, **kwargs)


def lost_checkpoint(context) -> dict:
    rank, full = context.rank, torch.full((1024, 256), 1.0)
    storage = MemoryStorage(timeout=40.0)
    if rank < 2:
        held = sharded(full, quiet_mesh([0, 1]), [Shard(0)], rank)
        dcp.save({"x": held}, storage_writer=storage, no_dist=True)
    new = {"x": sharded(torch.zeros_like(full), quiet_mesh([1, 2]), [Shard(1)], rank)} if rank else {}
    dcp.load(new, storage_reader=storage, no_dist=True)
    assert rank == 0 or bool((new["x"].to_local() == 1).all())
    context.wait_for_all("loaded", limit=60.0)
    begin = time.monotonic()
    if rank == VICTIM:  # what it calls to move its tensors, when all have said what they ask for
        integrations.reshard_state_dict = counted(integrations.reshard_state_dict, 3)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(new, storage_reader=storage, no_dist=True)
    assert time.monotonic() - begin < 20
    cause = caught.value.failures[0][0]
    assert isinstance(cause, meshcast.PeerLostError), cause
    assert f"rank {VICTIM}" in str(cause)
    context.wait_for_all("heard", [each for each in range(3) if each != VICTIM], limit=60.0)
    dist.destroy_process_group()
    return {"text": str(cause)}


CASES = [lost_checkpoint]
