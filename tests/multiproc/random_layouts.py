"""Seeded random reshard problems; the same on every rank."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]
STRATEGIES = ["auto", "auto", "broadcast", "send_recv"]


@dataclass(frozen=True)
class Draw:
    """One problem. relation: how the two meshes lie to each other."""

    seed: int
    world: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    src_mesh: list
    src_placements: tuple[Placement, ...]
    dst_mesh: list
    dst_placements: tuple[Placement, ...]
    strategy: str
    strided: bool
    shells: bool  # ranks outside the source mesh pass a shell DTensor, else a TensorSpec
    bystanders_call: bool
    relation: str


def draw(seed: int, world: int) -> Draw:
    rng = random.Random(seed)
    relation = rng.choice(["disjoint", "overlapping", "identical", "any"])
    # Both meshes together cover these ranks, so that few private groups serve many draws.
    ranks = list(range(world)) if world < 4 or rng.random() < 0.8 else list(range(1, world, 2))
    rng.shuffle(ranks)
    split = rng.randint(1, len(ranks) - 1)
    if relation == "disjoint":
        src_ranks, dst_ranks = ranks[:split], ranks[split:]
    elif relation == "overlapping":
        src_ranks, dst_ranks = ranks[:split], [*ranks[split:], ranks[0]]
    elif relation == "identical":
        src_ranks = dst_ranks = ranks
    else:
        src_ranks = ranks[:split]
        dst_ranks = [*ranks[split:], *rng.sample(src_ranks, rng.randint(0, split))]
    if rng.random() < 0.5:
        src_ranks, dst_ranks = dst_ranks, src_ranks
    ndim = rng.randint(1, 4)
    large = rng.random() < 0.08
    longest = {1: 400_000, 2: 600, 3: 70, 4: 24}[ndim] if large else {1: 61, 2: 17, 3: 9, 4: 6}[ndim]
    # Small sizes make empty and uneven shards frequent; a size of 0 now and then makes an empty tensor.
    shape = tuple(0 if rng.random() < 0.02 else rng.randint(1, longest) for _ in range(ndim))
    src_mesh = _mesh(rng, src_ranks)
    dst_mesh = _mesh(rng, dst_ranks)
    if relation == "identical" and rng.random() < 0.5:
        dst_mesh = src_mesh
    return Draw(
        seed,
        world,
        shape,
        rng.choice(DTYPES),
        src_mesh,
        _placements(rng, src_mesh, ndim),
        dst_mesh,
        _placements(rng, dst_mesh, ndim),
        rng.choice(STRATEGIES),
        rng.random() < 0.4,
        rng.random() < 0.5,
        rng.random() < 0.2,
        relation,
    )


def _mesh(rng: random.Random, ranks: list[int]) -> list:
    """All the ranks, in random order, as a grid of 1 to 3 dimensions, some of them of size 1."""
    ranks = rng.sample(ranks, len(ranks))
    dims = rng.choice([1, 2, 2, 3])
    sizes, left = [], len(ranks)
    for _ in range(dims - 1):
        sizes.append(rng.choice([n for n in range(1, left + 1) if left % n == 0]))
        left //= sizes[-1]
    return torch.tensor(ranks).reshape([*sizes, left]).tolist()


def _placements(rng: random.Random, mesh: list, ndim: int) -> tuple[Placement, ...]:
    def one() -> Placement:
        if rng.random() < 0.3:
            return Replicate()
        dim = rng.randrange(ndim)
        return Shard(dim - ndim if rng.random() < 0.2 else dim)

    return tuple(one() for _ in range(torch.tensor(mesh).ndim))
