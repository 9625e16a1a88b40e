"""The process of the rendezvous store freezes in the middle of a transfer that cannot end: rank 2 stays away
from it, or dies in it. What happens is set by the environment (see test_frozen_store.py).

The ranks that wait must raise a typed error in time, and destroying the process group must end, whether the
store goes on some day or not.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import meshcast
import torch
import torch.distributed as dist
from meshcast import Layout, MeshcastError
from torch.distributed.tensor import Replicate, Shard

LEAVE_UP = True  # the case ends the groups itself

FAULT = os.environ["FAULT"]  # none, frozen
LOSS = os.environ["LOSS"]  # away: rank 2 does not call; killed: it dies in the call; none: the call succeeds
THAW = os.environ["THAW"] == "1"  # the store goes on before the process ends
LIMIT = float(os.environ["LIMIT"])  # of the call, seconds
STORE, PORT = int(os.environ["STORE_PID"]), int(os.environ["STORE_PORT"])
ROWS = 1 << 17  # times 64 floats: 32 MiB, so that the sender is not through at once


def send(rank: int, limit: float, **kwargs):
    """Ranks 0 and 1 both need what rank 2 holds."""
    mine = torch.full((ROWS // 2, 64), float(rank)) if rank != 1 else None
    source, destination = Layout([0, 2], [Shard(0)]), Layout([0, 1], [Replicate()])
    kind = {"shape": (ROWS, 64), "dtype": torch.float32, "timeout": limit, **kwargs}
    return meshcast.reshard_local(mine, source, None, destination, **kind)


def frozen_store(context) -> dict:
    rank = context.rank
    context.wait_for_all("here", limit=60.0)
    dist.destroy_process_group()  # its store is in the process of the test
    store = dist.TCPStore("127.0.0.1", PORT, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
    send(rank, 60.0)  # the plan is known from here on, so that nothing is exchanged in the call
    context.wait_for_all("ready", limit=60.0)
    if rank == 0 and LOSS == "none" and FAULT == "frozen":
        os.kill(STORE, signal.SIGSTOP)
    begin = time.monotonic()
    failure: MeshcastError | None = None
    if rank == 2 and LOSS != "none":
        context.store.wait(["frozen"])
        if LOSS == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        handle = send(rank, LIMIT, async_op=True)
        if LOSS != "none":
            time.sleep(1.0)  # those that wait ask the store by now
            if rank == 0:
                if FAULT == "frozen":
                    os.kill(STORE, signal.SIGSTOP)
                context.store.set("frozen", "")
        try:
            handle.wait()
        except MeshcastError as error:
            failure = error
    elapsed = time.monotonic() - begin
    living = [0, 1] if LOSS == "killed" else [0, 1, 2]
    context.wait_for_all("over", living, limit=60.0)
    begin = time.monotonic()
    dist.destroy_process_group()
    destroyed = time.monotonic() - begin
    context.wait_for_all("destroyed", living, limit=60.0)
    if THAW and rank == 0:
        os.kill(STORE, signal.SIGCONT)
        time.sleep(0.5)  # what still waited for it hears of it
    return {
        "error": type(failure).__name__,
        "peer": getattr(failure, "peer", None),
        "text": str(failure),
        "elapsed": elapsed,
        "destroyed": destroyed,
    }


CASES = [frozen_store]
