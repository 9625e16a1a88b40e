"""reshard against the oracle on random layouts. Cases of 20 problems each, in groups of 2 to 7 ranks, all in
7 processes."""

from __future__ import annotations

import functools
import os
import random

import meshcast
import torch
import torch.distributed as dist
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import coordinates, cut, gather_full, unique_fill
from multiproc.random_layouts import Draw, draw
from torch.distributed.tensor import DTensor

GROUP_TIMEOUT = 30.0
PER_CASE = 20
# Set by test_property.py: sizes of the process groups that reshard runs in, and on how many emulated hosts
# the ranks are (0: all on this one).
SIZES = [int(size) for size in os.environ["SIZES"].split(",")]
HOSTS = int(os.environ["HOSTS"])


@functools.cache
def group_of(size: int) -> dist.ProcessGroup | None:
    """None, the default group, where it holds everybody."""
    return None if size == dist.get_world_size() else dist.new_group(list(range(size)))


def call(problem: Draw, rank: int, *, async_op: bool):
    """What this rank passes to reshard and what it expects back; None where it skips the call."""
    src, dst = quiet_mesh(problem.src_mesh), quiet_mesh(problem.dst_mesh)
    full = unique_fill(problem.shape, problem.dtype, problem.seed)
    placements = [_positive(p, len(problem.shape)) for p in problem.src_placements]
    x = sharded(full, src, placements, rank, strided=problem.strided)
    inside = rank in coordinates(src.mesh)
    assert torch.equal(
        gather_full(x.to_local() if inside else None, problem.shape, problem.dtype, src.mesh, placements),
        full,
    )
    part = rank in coordinates(src.mesh) or rank in coordinates(dst.mesh)
    if rank >= problem.world or not (part or problem.bystanders_call):
        return None
    given = x
    if not inside and not problem.shells:
        given = meshcast.TensorSpec(problem.shape, problem.dtype, src, problem.src_placements)
    result = meshcast.reshard(
        given,
        dst,
        problem.dst_placements,
        group=group_of(problem.world),
        strategy=problem.strategy,
        async_op=async_op,
    )
    return result, full, dst


def verify(result: DTensor, full: torch.Tensor, mesh, problem: Draw, rank: int) -> None:
    placements = [_positive(p, full.ndim) for p in problem.dst_placements]
    assert isinstance(result, DTensor)
    assert result.device_mesh == mesh
    assert list(result.placements) == placements
    assert tuple(result.shape) == problem.shape
    assert result.dtype == problem.dtype
    assert result.stride() == full.stride() or full.numel() == 0
    local = result.to_local()
    place = coordinates(mesh.mesh).get(rank)
    if place is None:
        assert local.numel() == 0
        assert local.ndim == full.ndim
    else:
        expected = cut(full, mesh.mesh.shape, place, placements)
        assert local.shape == expected.shape, (
            f"{problem}: shape {tuple(local.shape)}, expected {tuple(expected.shape)}"
        )
        assert torch.equal(local, expected), f"{problem}: wrong values"


def _positive(placement, ndim: int):
    return type(placement)(placement.dim % ndim) if hasattr(placement, "dim") else placement


def place(rank: int) -> None:
    """Chooses this rank's host, before any group meets: its ranks share memory, others use the network."""
    if HOSTS:
        os.environ["MESHCAST_HOST_ID"] = f"host {rank % HOSTS}"


def one_by_one(context, first: int, size: int) -> None:
    place(context.rank)
    group_of(size)
    for seed in range(first, first + PER_CASE):
        problem = draw(seed, size)
        called = call(problem, context.rank, async_op=False)
        if called is not None:
            verify(*called, problem, context.rank)


def in_flight(context, first: int, size: int) -> None:
    """Five calls in flight at once, waited for in an order that differs from rank to rank."""
    place(context.rank)
    group_of(size)
    for begin in range(first, first + PER_CASE, 5):
        calls = [
            (draw(seed, size), call(draw(seed, size), context.rank, async_op=True))
            for seed in range(begin, begin + 5)
        ]
        random.Random(begin + context.rank).shuffle(calls)
        for problem, called in calls:
            if called is not None:
                handle, full, mesh = called
                verify(handle.wait(), full, mesh, problem, context.rank)


def _named(function, name: str, *arguments):
    def case(context):
        return function(context, *arguments)

    case.__name__ = name
    return case


CASES = [
    *(_named(one_by_one, f"sync_{i}_world_{n}", 1000 + i * PER_CASE, n) for i, n in enumerate(SIZES)),
    *(_named(in_flight, f"async_{i}_world_{n}", 5000 + i * PER_CASE, n) for i, n in enumerate(SIZES)),
]
