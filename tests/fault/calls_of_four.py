"""Calls of four ranks, from two of them to three, and what is expected of one that goes wrong."""

from __future__ import annotations

import time

import meshcast
import torch
import torch.distributed as dist
from multiproc.meshes import quiet_mesh, sharded
from patience import patient
from torch.distributed.tensor import Shard

SOON = patient(5.0)  # seconds
A, B = [0, 1], [1, 2, 3]  # source and destination ranks; rank 1 is in both


def fresh_group() -> dist.ProcessGroup:
    return dist.new_group(list(range(dist.get_world_size())))


def send(
    context,
    group=None,
    *,
    shape=(6, 6),
    dtype=torch.float32,
    placements=(Shard(1),),
    mesh=B,
    gradient=False,
    timeout=None,
):
    x = sharded(torch.arange(36).to(dtype).reshape(shape), quiet_mesh(A), [Shard(0)], context.rank)
    if gradient:
        x = x.detach().requires_grad_(True)
    return meshcast.reshard(x, quiet_mesh(mesh), placements, group=group, timeout=timeout)


def raises(kind: type[Exception], function, *texts: str) -> Exception:
    try:
        function()
    except kind as error:
        for text in texts:
            assert text in str(error), f"expected {text!r} in: {error}"  # noqa: PT017
        return error
    raise AssertionError(f"no {kind.__name__}")


def in_time(function, limit: float, at_least: float = 0.0) -> float:
    begin = time.monotonic()
    function()
    elapsed = time.monotonic() - begin
    assert at_least <= elapsed <= limit, f"took {elapsed:.2f} s, expected {at_least} to {limit} s"
    return elapsed


def works(context, group=None) -> None:
    result = send(context, group).to_local()
    if context.rank in B:
        assert torch.equal(
            result, torch.arange(36.0).reshape(6, 6)[:, 2 * context.rank - 2 : 2 * context.rank]
        )
