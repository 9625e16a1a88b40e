"""Three ranks that come to a call 1.5 s apart. Waiting for a rank that is only late is nothing to print
about: test_apart.py reads what the processes wrote."""

from __future__ import annotations

import time

import meshcast
import torch
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import unique_fill
from multiproc.pipeline_models import batch, in_a_row, mlp, place, schedule_of
from torch.distributed.tensor import Replicate, Shard

APART = 1.5  # seconds between two ranks


def late(context) -> None:
    """The last rank comes at once, the first one after twice the time: it is the one that decides."""
    time.sleep(APART * (context.world - 1 - context.rank))


def a_pipeline(context) -> None:
    here = place(in_a_row([1, 1, 1]))
    x, y = batch(8)
    late(context)
    schedule = schedule_of("1F1B", here, mlp(3)[here.stage], 3, 4)
    schedule.step(x, target=y)
    late(context)
    schedule.step(x, target=y)
    late(context)  # another shape is agreed on anew
    schedule.step(x[:4], target=y[:4])


def a_reshard(context) -> None:
    rank, full = context.rank, unique_fill((7, 3), torch.float32, 1)
    source = sharded(full, quiet_mesh([0]), [Replicate()], rank)
    late(context)
    got = meshcast.reshard(source, quiet_mesh([1, 2]), [Shard(0)])
    if rank > 0:
        assert torch.equal(got.to_local(), full[:4] if rank == 1 else full[4:])


def a_state_dict(context) -> None:
    rank, full = context.rank, unique_fill((7, 3), torch.float32, 1)
    held = {"w": full} if rank == 0 else None
    late(context)
    got = meshcast.reshard_state_dict(held, {"w": (quiet_mesh([1, 2]), [Shard(0)])}, digest=True)
    if rank > 0:
        assert torch.equal(got["w"].to_local(), full[:4] if rank == 1 else full[4:])


CASES = [a_pipeline, a_reshard, a_state_dict]
