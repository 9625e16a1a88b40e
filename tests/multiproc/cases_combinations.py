"""Random batches whose members combine what single cases do not: Partial sources, _StridedShard,
casts, identical and overlapping meshes, strided memory, outputs in place. Five processes; the seeds are the
cases."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass

import meshcast
import torch
from multiproc.meshes import spread
from multiproc.oracle import coordinates, cut, unique_fill
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

GROUP_TIMEOUT = 30.0
PER_CASE = 12
# Meshes with process groups of their own, as users have them.
MESHES = [[0, 1, 2, 3, 4], [[0, 1], [2, 3]], [2, 3, 4], [4, 1], [[3], [0]]]
OPS = ["sum", "avg", "min", "max", "product"]
DTYPES = [torch.float32, torch.float64, torch.int64, torch.bfloat16]


@functools.cache
def mesh(index: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(MESHES[index]))


@dataclass
class Drawn:
    """One tensor: what every rank holds, what the whole is, and where it goes."""

    x: DTensor | meshcast.TensorSpec
    full: torch.Tensor
    placements: tuple[Placement, ...]


def draw(rng: random.Random, target: DeviceMesh, rank: int) -> Drawn:
    source = mesh(rng.randrange(len(MESHES)))
    shape = tuple(rng.randint(1, 13) for _ in range(rng.randint(1, 3)))
    dtype = rng.choice(DTYPES)
    placements = _placements(rng, source.mesh, len(shape))
    partial: list[int] = []
    if rng.random() < 0.5:
        op = rng.choice(OPS)
        partial = [d for d in range(source.ndim) if not isinstance(placements[d], _StridedShard)][-1:]
        placements = tuple(Partial(op) if d in partial else p for d, p in enumerate(placements))
    base = unique_fill(shape, dtype, rng.randrange(1000))
    if partial:  # small enough for sums and averages to be exact in any type
        if op == "product":
            dtype = torch.int64
        base = (base % 8).to(dtype)
    sizes = [source.mesh.shape[d] for d in partial]
    # The summands differ from one another by their place along the Partial dimensions; all results are exact.
    summands = {at: (base * (1 + sum(at))).to(dtype) for at in itertools.product(*map(range, sizes))}
    full = base if not partial else _reduced(placements[partial[0]].reduce_op, list(summands.values()), dtype)
    place = coordinates(source.mesh).get(rank)
    strided = rng.random() < 0.3
    as_spec = rng.random() < 0.5
    if place is None and as_spec:
        return Drawn(
            meshcast.TensorSpec(shape, dtype, source, placements),
            full,
            _placements(rng, target.mesh, len(shape)),
        )
    if place is None:
        local = torch.empty(0, dtype=dtype)
    else:
        local = cut(summands[tuple(place[d] for d in partial)], source.mesh.shape, place, placements).clone()
        local = spread(local) if strided else local
    x = DTensor.from_local(local, source, placements, run_check=False, shape=full.shape, stride=full.stride())
    return Drawn(x, full, _placements(rng, target.mesh, len(shape)))


def _placements(rng: random.Random, ranks: torch.Tensor, ndim: int) -> tuple[Placement, ...]:
    if ranks.ndim == 2 and rng.random() < 0.4:  # as FSDP over tensor parallel
        dim = rng.randrange(ndim)
        return (_StridedShard(dim, split_factor=ranks.shape[1]), Shard(dim))
    return tuple(Replicate() if rng.random() < 0.3 else Shard(rng.randrange(ndim)) for _ in range(ranks.ndim))


def _reduced(op: str, summands: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    if op in ("min", "max"):
        return functools.reduce(torch.minimum if op == "min" else torch.maximum, summands)
    if op == "product":
        return functools.reduce(torch.mul, summands)
    total = functools.reduce(torch.add, summands)
    if op == "sum":
        return total
    rounding = None if dtype.is_floating_point else "trunc"
    return torch.div(total, len(summands), rounding_mode=rounding)


def check(
    y: DTensor, drawn: Drawn, dtype: torch.dtype | None, target: DeviceMesh, rank: int, seed: int
) -> None:
    expected = drawn.full if dtype is None else drawn.full.to(dtype)
    where = f"seed {seed}: {drawn.x.placements} on {drawn.x.shape} to {drawn.placements}, dtype {dtype}"
    assert y.dtype == expected.dtype, where
    assert tuple(y.placements) == tuple(drawn.placements), where
    place = coordinates(target.mesh).get(rank)
    if place is None:
        assert y.to_local().numel() == 0
        return
    part = cut(expected, target.mesh.shape, place, drawn.placements)
    assert y.to_local().shape == part.shape, where
    assert torch.equal(y.to_local(), part), f"{where}\nexpected {part}\nfound {y.to_local()}"


def combinations(context, first: int) -> None:
    for index in range(len(MESHES)):
        mesh(index)
    flying = []
    for seed in range(first, first + PER_CASE):
        rng = random.Random(seed)
        target = mesh(rng.randrange(len(MESHES)))
        batch = [draw(rng, target, context.rank) for _ in range(rng.choice([1, 1, 2, 5]))]
        dtype = rng.choice([None, None, torch.float32, torch.float64, torch.bfloat16])
        way = rng.choice(["many", "async", "one", "in place"])
        if way in ("many", "async"):
            handle = meshcast.reshard_many(
                [d.x for d in batch], target, [d.placements for d in batch], dtype=dtype, async_op=True
            )
            if way == "async":
                flying.append((handle, batch, dtype, target, seed))
                continue
            ys = handle.wait()
        elif way == "one":
            ys = [meshcast.reshard(d.x, target, d.placements, dtype=dtype) for d in batch]
        else:
            ys = [meshcast.reshard_(output(d, dtype, target, context.rank), d.x) for d in batch]
        for drawn, y in zip(batch, ys, strict=True):
            check(y, drawn, dtype, target, context.rank, seed)
    random.Random(context.rank).shuffle(flying)  # waited for in an order of each rank's own
    for handle, batch, dtype, target, seed in flying:
        for drawn, y in zip(batch, handle.wait(), strict=True):
            check(y, drawn, dtype, target, context.rank, seed)
        stats = handle.stats
        assert stats.ratio >= 0  # 0 on a rank whose part is nothing
        assert stats.bytes >= 0


def output(drawn: Drawn, dtype: torch.dtype | None, target: DeviceMesh, rank: int) -> DTensor:
    """Storage with gaps, filled with what must not stay."""
    full = drawn.full if dtype is None else drawn.full.to(dtype)
    place = coordinates(target.mesh).get(rank)
    local = torch.empty(0, dtype=full.dtype)
    if place is not None:
        local = spread(torch.full_like(cut(full, target.mesh.shape, place, drawn.placements), -77))
    return DTensor.from_local(
        local, target, drawn.placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def _named(first: int):
    def case(context):
        combinations(context, first)

    case.__name__ = f"seeds_from_{first}"
    return case


CASES = [_named(first) for first in range(0, 10 * PER_CASE, PER_CASE)]
