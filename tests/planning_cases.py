"""Seeded random meshes, placements and topologies. One seed, one problem, on every machine."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from meshcast.layout import Layout
from meshcast.topology import Host, Nic, Topology
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64)
MAX_RANKS = 12  # of one mesh


def mesh_shape(rng: random.Random) -> tuple[int, ...]:
    """1 to 3 mesh dimensions, at most MAX_RANKS ranks."""
    while True:
        shape = tuple(rng.choice((1, 2, 2, 3, 4)) for _ in range(rng.randint(1, 3)))
        if math.prod(shape) <= MAX_RANKS:
            return shape


def tensor_shape(rng: random.Random) -> tuple[int, ...]:
    """0 to 4 dimensions; sizes that do not divide evenly, and sometimes none at all."""
    return tuple(
        rng.choice((1, 2, 3, 4, 5, 7, 8, 9, 0) if rng.random() < 0.1 else (2, 3, 4, 5, 6, 7, 9))
        for _ in range(rng.randint(0, 4))
    )


def placements(rng: random.Random, mesh: Sequence[int], ndim: int, partial: str | None) -> list[Placement]:
    """One per mesh dimension; at most one operation for the partial ones."""
    out: list[Placement] = []
    for _ in mesh:
        draw = rng.random()
        if partial is not None and draw < 0.4:
            out.append(Partial(partial))
        elif ndim and draw < 0.75:
            out.append(Shard(rng.randrange(-ndim, ndim)))
        elif ndim and draw < 0.85:
            out.append(_StridedShard(rng.randrange(ndim), split_factor=rng.randint(1, 3)))
        else:
            out.append(Replicate())
    return out


def nested(ranks: Sequence[int], shape: Sequence[int]) -> Any:
    """`ranks` as a nested list of `shape`."""
    return torch.tensor(ranks).reshape(tuple(shape)).tolist()


def layout_pair(rng: random.Random, ndim: int, partial: str | None = None) -> tuple[Layout, Layout]:
    """Two layouts on meshes that are disjoint, overlapping, equal or one inside the other, in any rank
    order."""
    shapes = mesh_shape(rng), mesh_shape(rng)
    sizes = [math.prod(shape) for shape in shapes]
    relation = rng.choice(("disjoint", "overlapping", "same ranks", "inside"))
    pool = rng.sample(range(2 * MAX_RANKS), 2 * MAX_RANKS)
    src = pool[: sizes[0]]
    if relation == "disjoint":
        dst = pool[sizes[0] : sizes[0] + sizes[1]]
    elif relation == "overlapping":
        dst = rng.sample(pool[sizes[0] // 2 :], sizes[1])
    elif relation == "same ranks":
        shapes = (shapes[0], rng.choice((shapes[0], (sizes[0],))))
        dst = rng.sample(src, sizes[0])
    else:
        dst = rng.sample([*src, *pool[sizes[0] : max(sizes)]], sizes[1])
    return (
        Layout(nested(src, shapes[0]), placements(rng, shapes[0], ndim, partial)),
        Layout(nested(dst, shapes[1]), placements(rng, shapes[1], ndim, None)),
    )


def topology(rng: random.Random) -> Topology:
    """Uniform hosts, or hosts of unequal size, NIC count and rate."""
    latency_us = rng.choice((0.0, 5.0, 20.0))
    if rng.random() < 0.5:
        return Topology.uniform(rng.randint(1, 8), rng.choice((1, 10, 25)), rng.randint(1, 4), 80, latency_us)
    ranks = rng.sample(range(2 * MAX_RANKS), 2 * MAX_RANKS)
    hosts = []
    while ranks:
        taken, ranks = ranks[: (count := rng.randint(1, 8))], ranks[count:]
        nics = [
            Nic(rng.choice((1, 2, 5)) * 10**8, rng.choice((1, 2, 5)) * 10**8)
            for _ in range(rng.randint(1, 4))
        ]
        hosts.append(Host(tuple(taken), tuple(nics), 10**10))
    return Topology(hosts, latency_us)
