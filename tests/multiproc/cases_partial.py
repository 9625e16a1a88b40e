"""reshard of Partial sources, which are reduced on the way, against torch's own reduction of the summands.
In groups of 3, 5 and 7 ranks, on three emulated hosts, so that hops pass through shared memory and the
network."""

from __future__ import annotations

import functools
import itertools
import os
import random
import time

import meshcast
import torch
import torch.distributed as dist
from multiproc.meshes import quiet_mesh
from multiproc.oracle import coordinates, cut
from multiproc.partial_uses import USES
from multiproc.partial_values import reduced, summand
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

GROUP_TIMEOUT = 60.0
PER_CASE = int(os.environ.get("PARTIAL_CASES", "6"))  # random problems
HOSTS = 3
SIZES = [3, 5, 7]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OPS = ["sum", "avg", "min", "max", "product"]


@functools.cache
def group_of(size: int) -> dist.ProcessGroup | None:
    return None if size == dist.get_world_size() else dist.new_group(list(range(size)))


def mesh_of(rng: random.Random, size: int) -> torch.Tensor:
    ranks = rng.sample(range(size), rng.randint(2, size))
    rows = rng.choice([n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0])
    return torch.tensor(ranks).reshape(rows, -1) if rng.random() < 0.6 else torch.tensor(ranks)


def placements_of(rng: random.Random, ndim: int, dims: int) -> list[Placement]:
    return [Replicate() if rng.random() < 0.4 else Shard(rng.randrange(dims)) for _ in range(ndim)]


def one(seed: int, size: int, rank: int, *, late: int | None = None) -> None:
    """One random problem; rank `late` joins in only after the others have begun to wait."""
    rng = random.Random(seed)
    source, target = mesh_of(rng, size), mesh_of(rng, size)
    shape = tuple(rng.randint(1, 300 if rng.random() < 0.2 else 17) for _ in range(rng.randint(1, 3)))
    op = rng.choice(OPS)
    extra = [torch.bool] if op != "avg" else []
    extra += [torch.complex64] if op not in ("min", "max") else []
    dtype = rng.choice([*INTEGERS, *FLOATS, *extra])
    placements = placements_of(rng, source.ndim, len(shape))
    partial = sorted(rng.sample(range(source.ndim), rng.randint(1, source.ndim)))
    for d in partial:
        placements[d] = Partial(op)
    wanted = placements_of(rng, target.ndim, len(shape))
    strategy = rng.choice(["auto", "multicast", "send_recv"])
    places = list(itertools.product(*(range(source.shape[d]) for d in partial)))
    summands = {place: summand(shape, dtype, seed * 64 + i) for i, place in enumerate(places)}
    # All ranks make both meshes, which are collectives of nobody.
    src, dst = quiet_mesh(source.tolist()), quiet_mesh(target.tolist())
    if rank not in source and rank not in target:
        return
    x = meshcast.TensorSpec(shape, dtype, src, placements)
    here = coordinates(source).get(rank)
    if here is not None:
        local = cut(summands[tuple(here[d] for d in partial)], source.shape, here, placements)
        local = local.clone() if rng.random() < 0.5 else local
        stride = torch.empty(shape, device="meta").stride()
        x = DTensor.from_local(
            local, src, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
    if rank == late:
        time.sleep(0.2)
    y = meshcast.reshard(x, dst, wanted, group=group_of(size), strategy=strategy).to_local()
    place = coordinates(target).get(rank)
    if place is None:
        return
    expected = cut(reduced(op, list(summands.values())), target.shape, place, wanted)
    where = f"seed {seed}, {size} ranks: {shape} {dtype} {placements} on {source.tolist()} to {wanted}"
    where += f" on {target.tolist()}, {strategy}"
    # min and max round nothing, and integers are exact: only sums and products of floats depend on the
    # order.
    if op in ("min", "max") or not (dtype.is_floating_point or dtype.is_complex):
        assert torch.equal(y, expected.to(dtype)), where
        return
    steps = len(summands)
    eps = torch.finfo(dtype).eps
    scale = functools.reduce(
        torch.mul if op == "product" else torch.add, [s.abs() for s in summands.values()]
    )
    bound = cut(scale, target.shape, place, wanted).double() * eps * steps + torch.finfo(dtype).tiny * steps
    wide = torch.complex128 if dtype.is_complex else torch.float64
    assert y.dtype == dtype, where
    assert bool(((y.to(wide) - expected.to(wide)).abs() <= bound).all()), where


def random_layouts(context, first: int, size: int) -> None:
    os.environ["MESHCAST_HOST_ID"] = f"host {context.rank % HOSTS}"
    group_of(size)
    if context.rank < size:
        for seed in range(first, first + PER_CASE):
            one(seed, size, context.rank)


def a_late_rank(context) -> None:
    """Whichever rank is late: the same five problems, with buffers of others filled meanwhile."""
    for late in range(context.world):
        one(90_000, context.world, context.rank, late=late)


def refused(context) -> None:
    """Types and operations without a reduction: the same error on every rank, and the group goes on."""
    ranks = torch.arange(context.world)
    mesh = quiet_mesh(ranks.tolist())
    for dtype, op in ((torch.bool, "avg"), (torch.complex64, "max"), (torch.uint32, "sum")):
        local = torch.zeros(3, dtype=dtype)
        x = DTensor.from_local(local, mesh, [Partial(op)], run_check=False, shape=(3,), stride=(1,))
        try:
            meshcast.reshard(x, mesh, [Replicate()])
        except meshcast.LayoutError as error:
            assert "cannot be reduced" in str(error), error
        else:
            raise AssertionError(f"{dtype} went through Partial({op!r})")
    one(91_000, context.world, context.rank)


def _named(size: int):
    def case(context):
        return random_layouts(context, 30_000 + 1000 * size, size)

    case.__name__ = f"random_world_{size}"
    return case


CASES = [*(_named(size) for size in SIZES), a_late_rank, refused, *USES]
