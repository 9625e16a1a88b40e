"""One rank of test_rails.py: a reshard between hosts with several NICs, of which rank 0 prints what each one
carried, then random ones against the oracle."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import meshcast
import pytest
import torch
import torch.distributed as dist
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import unique_fill
from multiproc.random_layouts import draw
from torch.distributed.tensor import Replicate, Shard

SHAPE = (8, 64, 1024)  # 2 MiB
DRAWS = 20


def carried(names: list[str]) -> list[int]:
    """Bytes that each interface has sent."""
    return [int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text()) for name in names]


def main() -> None:
    names = os.environ["MESHCAST_IFNAMES"].split(",")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    if len(sys.argv) > 1:
        os.environ["MESHCAST_IFNAMES"] = sys.argv[1] if rank == 1 else ",".join(names)
        with pytest.raises(meshcast.LayoutError, match="MESHCAST_IFNAMES"):
            call(rank, half)
        return
    call(rank, half)  # connects
    before = carried(names)
    for _ in range(3):
        call(rank, half)
    dist.barrier()
    if rank == 0:
        print(json.dumps([after - since for after, since in zip(carried(names), before, strict=True)]))
    dist.barrier()
    random_ones(rank, 2 * half)
    dist.barrier()
    dist.destroy_process_group()


def random_ones(rank: int, world: int) -> None:
    os.environ |= {"SIZES": str(world), "HOSTS": "0"}
    from multiproc.cases_property import call as call_one
    from multiproc.cases_property import verify

    for seed in range(DRAWS):
        problem = draw(seed, world)
        found = call_one(problem, rank, async_op=False)
        if found is not None:
            verify(*found, problem, rank)


def call(rank: int, half: int) -> None:
    src, dst = quiet_mesh(list(range(half))), quiet_mesh(list(range(half, 2 * half)))
    full = unique_fill(SHAPE, torch.int32, 7)
    result = meshcast.reshard(sharded(full, src, [Shard(0)], rank), dst, [Replicate()])
    if rank >= half:
        assert torch.equal(result.to_local(), full)


if __name__ == "__main__":
    main()
