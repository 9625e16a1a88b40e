"""Small tensors: what a call costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import meshcast
import torch
import torch.distributed as dist
from meshcast import Resharder, TensorSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .clocks import Figure, call_seconds, compared, largest

__all__ = ["calls"]

_FLOATS = 1024  # 4 KiB
_CALLS = 200  # timed together
_MICRO = 1e6

Call = Callable[[], object]


def calls(repeats: int) -> dict[str, Figure]:
    """Microseconds: of one way between ranks 0 and 1, and of calls of rank 0 whose 4 KiB stay where they are.
    The other ranks take part in the barriers."""
    rank = dist.get_rank()
    meshes = [DeviceMesh("cpu", [each]) for each in (0, 1)]
    there: Call = _nothing
    back: Call = _nothing
    alone: Call = _nothing
    grad: Call = _nothing
    kept: list[DTensor] = []
    if rank < 2:
        specs = [TensorSpec((_FLOATS,), torch.float32, mesh, [Shard(0)]) for mesh in meshes]
        mine = DTensor.from_local(torch.zeros(_FLOATS), meshes[rank], [Shard(0)], run_check=False)
        forth = Resharder(specs[0], meshes[1], [Shard(0)], reuse_output=True)
        home = Resharder(specs[1], meshes[0], [Shard(0)], reuse_output=True)
        there = partial(forth.run, mine if rank == 0 else None)
        back = partial(home.run, mine if rank == 1 else None)
    if rank == 0:
        parameter = mine.detach().requires_grad_()
        alone = partial(Resharder(specs[0], meshes[0], [Shard(0)], reuse_output=True).run, mine)

        def grad() -> None:
            kept.append(meshcast.reshard(parameter, meshes[0], [Shard(0)]))

    buffer = torch.zeros(_FLOATS)

    def ping_pong() -> None:
        with torch.no_grad():
            for _ in range(_CALLS):
                there()
                back()

    def gloo() -> None:
        for _ in range(_CALLS if rank < 2 else 0):
            if rank == 0:
                dist.send(buffer, 1)
                dist.recv(buffer, 1)
            else:
                dist.recv(buffer, 0)
                dist.send(buffer, 0)

    def one_way(seconds: float) -> float:
        return largest(seconds) / (2 * _CALLS) * _MICRO

    found = {"4 KiB": compared(ping_pong, gloo, repeats, time.perf_counter, one_way)}
    with torch.no_grad():
        found["call"] = _each(alone, repeats)

    def backward() -> None:
        if kept:
            meshcast.backward(*(value.to_local().sum() for value in kept))
            kept.clear()

    found["call, autograd"] = _each(grad, repeats, backward)
    return found


def _nothing() -> None: ...


def _each(call: Call, repeats: int, after: Call = _nothing) -> Figure:
    """Median over rounds of the time of a call, after a round that does not count; `after` each round,
    untimed."""
    times = []
    for _ in range(repeats + 1):
        times.append(largest(call_seconds(lambda: [call() for _ in range(_CALLS)])) / _CALLS * _MICRO)
        after()
    median = statistics.median(times[1:])
    return {"ours": median, "value": median}
