"""One rank of test_cut_links.py, alone on its host, which makes calls that are new one after the other. The
link of host 1 goes down meanwhile: that of the data, that of everything else, the store included, or both.
Every rank raises within the limit of its call and a margin, although the limit of the process group is far
longer."""

from __future__ import annotations

import faulthandler
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

LIMIT = 5.0  # seconds, of a call
BEYOND = 3.0  # seconds that a call may take longer
GROUP_LIMIT = 60.0
RANKS = [0, 1, 2]


def local(rows: int, limit: float) -> None:
    full = torch.arange(rows * 4.0).reshape(rows, 4)
    out = meshcast.reshard_local(
        full.chunk(3)[dist.get_rank()],
        Layout(RANKS, [Shard(0)]),
        None,
        Layout(RANKS, [Replicate()]),
        shape=full.shape,
        dtype=full.dtype,
        timeout=limit,
    )
    assert out is not None
    assert torch.equal(out, full)


def state_dict(rows: int, limit: float) -> None:
    mesh = DeviceMesh("cpu", torch.tensor(RANKS), _init_backend=False, _rank=dist.get_rank())
    full = torch.arange(rows * 4.0).reshape(rows, 4)
    mine = full.chunk(3)[dist.get_rank()]
    x = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())
    name = f"w{rows}"
    out = meshcast.reshard_state_dict({name: x}, {name: (mesh, [Replicate()])}, timeout=limit)
    assert torch.equal(out[name].to_local(), full)


def main() -> None:
    call, ports = {"local": local, "state": state_dict}[sys.argv[1]], sys.argv[2].split(",")
    os.environ["MESHCAST_IFNAMES"] = "eth1"
    faulthandler.dump_traceback_later(120, exit=True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_LIMIT))
    rank = dist.get_rank()
    call(30, GROUP_LIMIT)
    dist.barrier()

    def cut() -> None:
        for port in ports:
            subprocess.run(["ip", "-n", os.environ["SWITCH"], "link", "set", port, "down"], check=True)

    if rank == 1:
        threading.Timer(1.0, cut).start()
    error: MeshcastError | None = None
    rows = 30
    while error is None:
        rows += 3
        begin = time.monotonic()
        try:
            call(rows, LIMIT)
        except MeshcastError as found:
            error = found
    elapsed = time.monotonic() - begin
    print(f"rank {rank}: {type(error).__name__} after {elapsed:.2f} s: {error}", flush=True)
    assert isinstance(error, DeadlineExceededError | PeerLostError | meshcast.AbortedError)
    assert elapsed < LIMIT + BEYOND
    os._exit(0)  # what is left waits for a link that stays cut


if __name__ == "__main__":
    main()
