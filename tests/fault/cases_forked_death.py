"""A rank forks a child that sleeps, and dies in the middle of a transfer. Its child must not hide that."""

from __future__ import annotations

import os
import signal
import time

import meshcast
import torch
from meshcast import Layout, PeerLostError
from patience import patient
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 60.0
LEAVE_UP = True
ROWS = 1 << 16  # times 64 floats: 16 MiB


def a_child_outlives_its_parent(context) -> None:
    """Rank 1 dies. Ranks 0 and 2 wait for what it holds."""
    rank = context.rank
    mine = torch.ones(ROWS // 2, 64) if rank < 2 else None

    def send(timeout: float):
        return meshcast.reshard_local(
            mine,
            Layout([0, 1], [Shard(0)]),
            None,
            Layout([0, 2], [Replicate()]),
            shape=(ROWS, 64),
            dtype=torch.float32,
            timeout=timeout,
        )

    send(60.0)
    context.wait_for_all("ready")
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(30.0)
            os._exit(0)
        context.store.set("child", str(child))
        time.sleep(0.5)
        context.store.set("dies", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        send(20.0)
    except PeerLostError as error:
        took = time.monotonic() - float(context.store.get("dies"))
        assert error.peer == 1, error
        assert took < 2.0 + patient(1.0), f"{took:.2f} s: {error}"
    else:
        raise AssertionError("no error")
    finally:
        context.wait_for_all("over", [0, 2])
        if rank == 0:
            os.kill(int(context.store.get("child")), signal.SIGKILL)


CASES = [a_child_outlives_its_parent]
