"""A rank dies or freezes, before or in the middle of a transfer. What happens is set by the environment (see
test_lost_peer.py).

Rank 0 holds a tensor, ranks 1 and 2 need all of it. All survivors must raise an error that names the lost
rank, in time; a private group of survivors alone goes on; destroying the process group ends.
"""

from __future__ import annotations

import os
import signal
import time

import meshcast
import torch
import torch.distributed as dist
from meshcast import DeadlineExceededError, MeshcastError, PeerLostError
from multiproc.meshes import quiet_mesh, sharded
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 60.0
LEAVE_UP = True  # the case ends the group itself and takes the time

VICTIM = int(os.environ["VICTIM"])  # -1: nobody, the control run
FAULT = os.environ["FAULT"]  # killed, frozen
MOMENT = os.environ[
    "MOMENT"
]  # middle, before (the plan is known), first use (middle, of a new plan), unagreed (before its first use)
LIMIT = float(os.environ["LIMIT"])  # of the call that meets the fault, seconds
SMALL = 64  # 16 KiB: smaller messages go at once, and their sender is through whatever their receiver does
ROWS = 1 << 20  # times 64 floats: 256 MiB: a tenth of a second through shared memory, several over loopback


def tensor(rows: int) -> torch.Tensor:
    return torch.arange(rows * 64, dtype=torch.float32).reshape(rows, 64)


def send(x, timeout: float, **kwargs):
    return meshcast.reshard(
        x, quiet_mesh([1, 2]), [Replicate()], timeout=timeout, strategy="broadcast", **kwargs
    )


def lost_peer(context) -> dict:
    source = quiet_mesh([0])
    pair = [rank for rank in range(3) if rank != max(VICTIM, 0)]
    small = sharded(tensor(SMALL), source, [Shard(0)], context.rank)
    large = sharded(tensor(ROWS), source, [Shard(0)], context.rank)
    assert torch.equal(send(small, 60.0).to_local(), tensor(SMALL)) or context.rank == 0
    if MOMENT == "middle":
        # The plan is known from here on, so that nothing is exchanged in the call that meets the fault.
        send(large, 60.0)
    if context.rank == VICTIM:
        context.store.set("victim", str(os.getpid()))
    context.wait_for_all("ready", limit=60.0)
    begin = time.monotonic()
    if context.rank == VICTIM:
        if MOMENT in ("middle", "first use"):
            handle = send(large, LIMIT, async_op=True)
            time.sleep(0.02 if MOMENT == "middle" else 0.15)  # a first use agrees on the plan before it moves
            context.store.set("too late", str(handle.is_completed()))
        os.kill(os.getpid(), signal.SIGKILL if FAULT == "killed" else signal.SIGSTOP)
        raise AssertionError("the victim lives on")
    if VICTIM < 0:
        result = send(large, LIMIT).to_local()
        assert context.rank == 0 or torch.equal(result, tensor(ROWS))
        dist.destroy_process_group()
        return {"seconds": time.monotonic() - begin}
    error = _failure(lambda: send(small if MOMENT == "before" else large, LIMIT))
    elapsed = time.monotonic() - begin
    assert str(VICTIM) in str(error)
    begin = time.monotonic()
    again = _failure(lambda: send(small, LIMIT))
    assert time.monotonic() - begin < 0.5, "a group that has failed must say so at once"
    assert str(VICTIM) in str(again), f"the first cause must be named: {again}"
    _survivors_go_on(context, pair)
    _bury(context, pair)
    begin = time.monotonic()
    dist.destroy_process_group()
    destroyed = time.monotonic() - begin
    return {
        "error": type(error).__name__,
        "peer": error.peer,
        "elapsed": elapsed,
        "destroyed": destroyed,
        "text": str(error),
    }


def _failure(call) -> MeshcastError:
    try:
        call()
    except (PeerLostError, DeadlineExceededError) as error:
        return error
    except MeshcastError as error:
        assert type(error) is meshcast.AbortedError
        return error
    raise AssertionError("no error")


def _survivors_go_on(context, pair: list[int]) -> None:
    full = tensor(16)
    x = sharded(full, quiet_mesh([pair[0]]), [Shard(0)], context.rank)
    y = meshcast.reshard(x, quiet_mesh(pair), [Shard(0)], timeout=30.0).to_local()
    index = pair.index(context.rank)
    assert torch.equal(y, full[8 * index : 8 * index + 8])


def _bury(context, pair: list[int]) -> None:
    """A frozen rank would keep the test waiting: the first survivor ends it, by the process id it left."""
    context.wait_for_all("survived", pair, limit=60.0)
    if FAULT == "frozen" and context.rank == pair[0]:
        os.kill(int(context.store.get("victim")), signal.SIGKILL)


CASES = [lost_peer]
