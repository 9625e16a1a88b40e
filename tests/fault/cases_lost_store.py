"""The process of the rendezvous store ends, or freezes, while nobody waits for it; what happens is set by the
environment (see test_lost_store.py). Afterwards the ranks use what they know, what they do not know yet, and
end. Every error must be typed and come in time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import meshcast
import torch
import torch.distributed as dist
from meshcast import Layout, MeshcastError
from meshcast.pipelining import PipelineStage, Schedule1F1B
from multiproc.pipeline_models import CPU, batch, mlp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

LEAVE_UP = True  # the case ends the groups itself

FAULT = os.environ["FAULT"]  # killed, frozen, none
HOST = os.environ["HOST"]  # apart: a process of its own; rank: rank 0
FIRST = os.environ["FIRST"]  # what is called first: known, new
LIMIT = float(os.environ["LIMIT"])  # of each call, seconds
STORE, PORT = int(os.environ["STORE_PID"]), int(os.environ["STORE_PORT"])


def move(
    rank: int, source: list[int], destination: list[int], columns: int = 8, limit: float = LIMIT
) -> None:
    """Rows of `source` whole to every rank of `destination`."""
    full = torch.arange(30.0 * columns).reshape(30, columns)
    mine = full.chunk(len(source))[source.index(rank)] if rank in source else None
    out = meshcast.reshard_local(
        mine,
        Layout(source, [Shard(0)]),
        None,
        Layout(destination, [Replicate()]),
        shape=full.shape,
        dtype=full.dtype,
        timeout=limit,
    )
    assert out is None or torch.equal(out, full)


def told(call: Callable[[], Any]) -> dict[str, Any]:
    begin = time.monotonic()
    found: dict[str, Any] = {"error": None, "typed": True, "peer": None, "text": ""}
    try:
        call()
    except Exception as error:
        found = {
            "error": type(error).__name__,
            "typed": isinstance(error, MeshcastError),
            "peer": getattr(error, "peer", None),
            "text": str(error),
        }
    return found | {"elapsed": time.monotonic() - begin}


def begin_anew(context) -> None:
    """In place of a process group whose store is in the process of the test."""
    context.wait_for_all("here", limit=60.0)
    dist.destroy_process_group()
    hosts = HOST == "rank" and context.rank == 0
    store = dist.TCPStore("127.0.0.1", PORT, is_master=hosts, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=context.rank, world_size=3, timeout=timedelta(seconds=60)
    )


def strike(context) -> list[int]:
    """Who is left then."""
    context.wait_for_all("ready", limit=60.0)
    if HOST == "rank" and FAULT != "none":
        if context.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        return [1, 2]
    if FAULT != "none" and context.rank == 0:
        os.kill(STORE, {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}[FAULT])
    context.wait_for_all("fault")
    return [0, 1, 2]


def lost_store(context) -> dict:
    rank, ranks = context.rank, [0, 1, 2]
    begin_anew(context)
    unused = dist.new_group(ranks)
    move(rank, [0, 2], [0, 1], limit=60.0)
    move(rank, [1, 2], [1, 2], limit=60.0)
    living = strike(context)
    calls = {
        "known": lambda: move(rank, [0, 2], [0, 1]),
        "known, without rank 0": lambda: rank == 0 or move(rank, [1, 2], [1, 2]),
        "new plan, without rank 0": lambda: rank == 0 or move(rank, [1, 2], [1, 2], columns=9),
        "known after that": lambda: rank == 0 or move(rank, [1, 2], [1, 2]),
        "new plan": lambda: move(rank, [0, 2], [0, 1], columns=9),
        "after that": lambda: move(rank, [0, 2], [0, 1]),
        "new group": lambda: move(rank, [2], ranks),
        "again": lambda: move(rank, [2], ranks),
        "first call": lambda: meshcast.prepare(ranks, group=unused, timeout=LIMIT),
    }
    if FIRST == "new":
        del calls["known"]
    return through(context, living, calls)


def through(context, living: list[int], calls: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, call in calls.items():
        found[name] = told(call)
        context.wait_for_all(name, living, limit=60.0)
    begin = time.monotonic()
    dist.destroy_process_group()
    found["destroyed"] = time.monotonic() - begin
    context.wait_for_all("destroyed", living, limit=60.0)
    return found


def lost_pipeline(context) -> dict:
    """Three stages, each on a rank."""
    begin_anew(context)
    mesh = [DeviceMesh("cpu", [rank]) for rank in range(3)][context.rank]
    stage = PipelineStage(mlp(3)[context.rank], context.rank, 3, CPU, mesh=mesh)
    schedule = Schedule1F1B(
        stage, 4, loss_fn=nn.functional.mse_loss, timeout=LIMIT if FAULT == "frozen" else 60.0
    )
    x, y = batch(8)

    def step() -> None:
        schedule.step(*([x] if context.rank == 0 else []), target=y if context.rank == 2 else None)

    step()
    living = strike(context)
    return through(context, living, {"step": step, "again": step})


CASES = [{"calls": lost_store, "pipeline": lost_pipeline}[os.environ["WHAT"]]]
