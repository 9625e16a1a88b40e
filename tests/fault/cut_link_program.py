"""One rank of test_cut_links.py, alone on its host. Data travel over eth1, everything else over eth0. The
link of host 1 to the network of eth1 goes down, in the middle of a transfer or while nothing moves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta

import meshcast
import torch
import torch.distributed as dist
from meshcast import DeadlineExceededError, Layout, MeshcastError, PeerLostError
from torch.distributed.tensor import Replicate, Shard

GROUP_LIMIT = 6.0  # seconds; so soon UCX notices that the network has lost a peer
LIMIT = 14.0  # seconds, of the call that meets the cut
ROWS = 1 << 15  # of 1024 floats: 128 MiB, seconds at the links' rate


def call(ranks: list[int], rows: int, limit: float, group: dist.ProcessGroup | None = None) -> None:
    full = torch.arange(rows * 1024, dtype=torch.float32).reshape(rows, 1024)
    mine = full.chunk(len(ranks))[ranks.index(dist.get_rank())]
    out = meshcast.reshard_local(
        mine,
        Layout(ranks, [Shard(0)]),
        None,
        Layout(ranks, [Replicate()]),
        shape=full.shape,
        dtype=full.dtype,
        group=group,
        timeout=limit,
    )
    assert out is not None
    assert torch.equal(out, full)


def cut() -> None:
    subprocess.run(["ip", "-n", os.environ["SWITCH"], "link", "set", "port1x1", "down"], check=True)


def main() -> None:
    moment, cuts, user_timeout = sys.argv[1], sys.argv[2] == "cuts", sys.argv[3] == "wheel"
    delay = float(sys.argv[4]) if len(sys.argv) > 4 else 0.3  # seconds from the begin of the transfer
    os.environ["MESHCAST_IFNAMES"] = "eth1"
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_LIMIT))
    rank = dist.get_rank()
    call([0, 1, 2], 64, 60.0)
    call([0, 1, 2], ROWS, 60.0)
    pair = dist.new_group([0, 2])
    if rank != 1:
        call([0, 2], 64, 60.0, pair)
    dist.barrier()
    begin = time.monotonic()
    if moment == "transfer":
        if rank == 1 and cuts:
            threading.Timer(delay, cut).start()
    else:
        if rank == 1 and cuts:
            cut()
        time.sleep(1.5 * GROUP_LIMIT)
        begin = time.monotonic()
    error = None
    try:
        call([0, 1, 2], ROWS, LIMIT if cuts else 60.0)
    except (PeerLostError, DeadlineExceededError) as found:
        error = found
    elapsed = time.monotonic() - begin
    print(f"rank {rank}: {type(error).__name__} after {elapsed:.2f} s: {error}", flush=True)
    print(f"known {elapsed - (delay if moment == 'transfer' else 0.0):.2f} s after the cut", flush=True)
    if not cuts:
        assert error is None
    else:
        assert error is not None, "no error"
        assert elapsed < 1.5 * LIMIT
        # Without the user timeout of TCP the limit of the call ends a transfer.
        if user_timeout:
            assert isinstance(error, PeerLostError)
            assert elapsed < LIMIT
        begin = time.monotonic()
        try:
            call([0, 1, 2], 64, LIMIT)
            raise AssertionError("the group goes on")
        except MeshcastError:
            assert time.monotonic() - begin < 0.3 * LIMIT, "a group that has failed must say so at once"
        if rank != 1:
            call([0, 2], 64, 10.0, pair)
    begin = time.monotonic()
    dist.destroy_process_group()
    print(f"ended in {time.monotonic() - begin:.2f} s", flush=True)
    assert time.monotonic() - begin < 5.0


if __name__ == "__main__":
    main()
