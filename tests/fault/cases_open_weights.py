"""Ranks end with a WeightSync that nobody has closed. Its thread waits in a store that one of them holds."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import meshcast
import torch
import torch.distributed as dist
from multiproc.meshes import quiet_mesh, sharded
from torch.distributed.tensor import Shard

LEAVE_UP = True  # so does the process group, where the case does not end it
GROUP_TIMEOUT = 30.0
WAY = os.environ["WAY"]  # returned, destroyed, dropped: by all; left: by rank 0 alone
KEPT = []


def open_weights(context) -> None:
    rank = context.rank
    context.wait_for_all("there")  # else a rank may still be connecting in the group that ends
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", int(os.environ["STORE_PORT"]), is_master=rank == 0)
    limit = timedelta(seconds=GROUP_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=context.world, timeout=limit)
    held = {"w": sharded(torch.ones(5, 4), quiet_mesh([0, 1]), [Shard(0)], rank)}
    sync = meshcast.WeightSync(held if rank < 2 else None, {"w": (quiet_mesh([2, 3]), [Shard(0)])})
    if rank < 2:
        sync.push(1)
    else:
        assert sync.pull(1) == 1
    KEPT.append(sync)
    context.wait_for_all("one")
    begin = time.monotonic()
    if WAY == "destroyed":
        dist.destroy_process_group()
    if WAY == "dropped":
        KEPT.clear()
        del sync
    if WAY == "left" and rank:
        try:
            if rank == 1:
                sync.push(2)
            else:
                sync.pull(2)
        except meshcast.MeshcastError as error:
            print(type(error).__name__, error, flush=True)
        else:
            raise AssertionError("rank 0 has gone")
    assert time.monotonic() - begin < 8


CASES = [open_weights]
