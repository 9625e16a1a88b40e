"""Seeded random layouts: disjoint and overlapping meshes of up to 5 hosts, one to three mesh dimensions,
uneven cuts, replicas on either side. The first sixty, group "random-tuned", were in view when the order of
messages (csrc/core/run/plan_order.h) and the choice of strategies were tuned; the next twenty, "random", were
not."""

from __future__ import annotations

import random

import torch
from torch.distributed.tensor import Replicate, Shard

from meshcast.layout import Layout
from meshcast.planning.plan import plan
from meshcast.topology import Topology

from .case import RANKS_PER_HOST, Case

_HOSTS = 5
_SEED = 2211_05322


def _layout(rng: random.Random, ranks: list[int], ndim: int) -> Layout:
    """Ranks in a mesh of one to three dimensions, each of which shards a tensor dimension or replicates."""
    shape = [len(ranks)]
    for _ in range(rng.randrange(3)):
        divisors = [n for n in range(2, shape[-1]) if shape[-1] % n == 0]
        if divisors:
            n = rng.choice(divisors)
            shape[-1:] = [n, shape[-1] // n]
    placements = [Replicate() if rng.random() < 0.35 else Shard(rng.randrange(ndim)) for _ in shape]
    mesh: list = ranks
    for n in reversed(shape[1:]):
        mesh = [mesh[i : i + n] for i in range(0, len(mesh), n)]
    return Layout(mesh, placements)


def _case(number: int, group: str) -> Case:
    rng = random.Random(_SEED + number)
    ndim = rng.randint(1, 3)
    while True:
        size = rng.choice([2, 3, 4, 5, 6, 7, 8, 12])
        other = rng.choice([2, 3, 4, 5, 6, 7, 8, 12])
        world = list(range(_HOSTS * RANKS_PER_HOST))
        rng.shuffle(world)
        if rng.random() < 0.5:  # in order, as jobs are mostly laid out
            world.sort()
        overlap = rng.choice([0, 0, 0, 1, 2])
        first, second = world[:size], world[size - min(overlap, size) :][:other]
        src, dst = _layout(rng, first, ndim), _layout(rng, second, ndim)
        shape = {1: (1 << 28,), 2: (1 << 14, 1 << 14), 3: (1000, 700, 380)}[ndim]
        notation = f"{src!r} to {dst!r}".replace("Layout", "")
        case = Case(f"random {number}", group, shape, src, dst, notation)
        traffic = plan((64,) * ndim, torch.int32, src, dst, Topology.uniform(RANKS_PER_HOST, 1))
        if any(traffic.nic_bytes(host)[0] for host in range(case.hosts)):
            return case


CASES = [_case(number, "random-tuned" if number < 60 else "random") for number in range(80)]
