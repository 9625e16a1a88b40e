"""Partial sources in every call, on seven ranks of three emulated hosts. The meshes have no process groups of
their own, so nothing can be reduced but by the transfers themselves."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable

import meshcast
import pytest
import torch
import torch.distributed as dist
from multiproc.meshes import quiet_mesh, resharder_between
from multiproc.oracle import coordinates, cut
from multiproc.partial_values import reduced, summand
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

SOURCE = torch.tensor([[0, 3, 1], [5, 2, 4]])
TARGET = torch.tensor([6, 1, 0, 3])
HOSTS = {rank: f"host {rank % 3}" for rank in range(7)}
TOPOLOGY = meshcast.Topology.from_hosts(HOSTS, nic_gbps=10.0, local_gbps=40.0)
_COMBINE: dict[str, Callable] = {"product": torch.mul, "min": torch.minimum, "max": torch.maximum}


def source(
    rank: int, shape: tuple[int, ...], dtype: torch.dtype, op: str, seed: int, *, exact: bool = False
) -> tuple[DTensor, list[torch.Tensor]]:
    """A tensor that is Partial(op) over the rows of SOURCE and sharded over its columns, and its summands.
    exact: of small whole numbers, whose sums and averages are exact in every type."""
    placements = [Partial(op), Shard(0)]
    summands = [summand(shape, dtype, 10 * seed + i) for i in range(SOURCE.shape[0])]
    if exact:
        summands = [torch.round(s.double()).mul(2).to(dtype) for s in summands]
    place = coordinates(SOURCE).get(rank)
    local = (
        torch.empty(0, dtype=dtype)
        if place is None
        else cut(summands[place[0]], SOURCE.shape, place, placements)
    )
    mesh = quiet_mesh(SOURCE.tolist())
    stride = torch.empty(shape, device="meta").stride()
    x = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    return x, summands


def expect(y: DTensor, full: torch.Tensor, placements: list[Placement], rank: int, what: str) -> None:
    place = coordinates(TARGET).get(rank)
    if place is not None:
        assert torch.equal(y.to_local(), cut(full, TARGET.shape, place, placements)), what


def by_the_plan(plan: meshcast.Plan, summands: list[torch.Tensor], op: str) -> dict[int, torch.Tensor]:
    """What each rank has once all transfers of the plan are done in their order, by torch's own arithmetic in
    the type of the summands."""
    carried: dict[tuple, torch.Tensor] = {}
    results: dict[int, torch.Tensor] = {}
    for hop in plan.transfers:
        window = tuple(slice(lo, hi) for lo, hi in hop.box)
        task = plan.tasks[hop.task]
        of = dict(zip(task.holders, task.contribution, strict=True))

        def value(rank: int, box=hop.box, window=window, of=of) -> torch.Tensor:
            return carried[box, rank] if (box, rank) in carried else summands[of[rank]][window]

        sent = value(hop.src)
        if hop.reduce is not None:
            sent = _COMBINE.get(op, torch.add)(value(hop.dst), sent)
            if hop.last_reduce and op == "avg":
                sent = sent / len(summands)
        carried[hop.box, hop.dst] = sent
        if (hop.reduce is None or hop.last_reduce) and hop.dst in task.receivers:
            results.setdefault(hop.dst, torch.full_like(summands[0], torch.nan))[window] = sent
    return results


def in_plan_order(context) -> None:
    """Floats are added in the order of the plan, each step rounded to their type: bit for bit, every time,
    whichever rank is late."""
    shape = (66, 1024)
    wanted: list[Placement] = [Replicate()]
    mesh = quiet_mesh(TARGET.tolist())
    cases = [(torch.float32, "sum"), (torch.float64, "avg"), (torch.bfloat16, "sum"), (torch.float16, "avg")]
    cases += [(torch.complex64, "sum"), (torch.float32, "product"), (torch.float16, "max")]
    for number, (dtype, op) in enumerate(cases):
        # All six have a value of all, so that the order matters.
        src = meshcast.Layout(SOURCE, [Partial(op), Partial(op)])
        summands = [summand(shape, dtype, 70 * number + i) for i in range(6)]
        plan = meshcast.plan(shape, dtype, src, meshcast.Layout(TARGET, wanted), TOPOLOGY, strategy="auto")
        place = coordinates(SOURCE).get(context.rank)
        local = torch.empty(0, dtype=dtype) if place is None else summands[place[0] * 3 + place[1]]
        x = DTensor.from_local(
            local,
            quiet_mesh(SOURCE.tolist()),
            [Partial(op), Partial(op)],
            run_check=False,
            shape=torch.Size(shape),
            stride=(shape[1], 1),
        )
        expected = by_the_plan(plan, summands, op)
        for late in (None, number % 7):
            if context.rank == late:
                time.sleep(0.05)
            y = meshcast.reshard(x, mesh, wanted, topology=TOPOLOGY).to_local()
            if context.rank in TARGET:
                assert torch.equal(y, expected[context.rank]), (dtype, op, late)


def bytes_of_the_plan(context) -> None:
    """Each rank receives what the plan says, and all together send that."""
    wanted: list[Placement] = [Shard(1)]
    mesh = quiet_mesh(TARGET.tolist())
    for strategy in ("auto", "send_recv", "multicast"):
        x, summands = source(context.rank, (48, 4096), torch.int32, "sum", 3)
        handle = meshcast.reshard(x, mesh, wanted, topology=TOPOLOGY, strategy=strategy, async_op=True)
        expect(handle.wait(), reduced("sum", summands), wanted, context.rank, strategy)
        src, dst = meshcast.Layout(SOURCE, x.placements), meshcast.Layout(TARGET, wanted)
        plan = meshcast.plan((48, 4096), torch.int32, src, dst, TOPOLOGY, strategy=strategy)
        stats = handle.stats
        assert stats.bytes_received == plan.bytes_received(context.rank), strategy
        # Inside a host the first rank of a chain sends what the plan has the next ones pass on.
        sent: list[int] = [0] * 7
        dist.all_gather_object(sent, stats.bytes_sent)
        assert sum(sent) == sum(map(plan.bytes_sent, range(7))), strategy


def several_in_flight(context) -> None:
    """Batches of different types and operations, cast on arrival, in flight together and waited for in an
    order of each rank's own."""
    mesh = quiet_mesh(TARGET.tolist())
    flying = []
    drawn = [
        (torch.float32, "sum"),
        (torch.bfloat16, "max"),
        (torch.int16, "product"),
        (torch.float64, "avg"),
    ]
    for seed in range(6):
        batch = [
            source(context.rank, (7 + seed, 9), dtype, op, 100 * seed + i, exact=dtype.is_floating_point)
            for i, (dtype, op) in enumerate(drawn)
        ]
        wanted: list[Placement] = [Shard(1) if seed % 2 else Replicate()]
        dtype = (None, torch.float64, torch.float32)[seed % 3]
        handle = meshcast.reshard_many(
            [x for x, _ in batch], mesh, [wanted] * len(batch), dtype=dtype, async_op=True
        )
        flying.append((handle, batch, wanted, dtype))
    random.Random(context.rank).shuffle(flying)
    for handle, batch, wanted, dtype in flying:
        for y, (_, summands), (own, op) in zip(handle.wait(), batch, drawn, strict=True):
            full = reduced(op, summands).to(own)
            expect(y, full if dtype is None else full.to(dtype), wanted, context.rank, f"{op} {own} {dtype}")


def reused(context) -> None:
    """A Resharder runs again with other values, into the same output."""
    x, _ = source(context.rank, (13, 5), torch.int64, "sum", 1)
    there = resharder_between(
        meshcast.TensorSpec((13, 5), torch.int64, x.device_mesh, x.placements),
        meshcast.TensorSpec((13, 5), torch.int64, quiet_mesh(TARGET.tolist()), [Shard(0)]),
        reuse_output=True,
    )
    for seed in range(5):
        x, summands = source(context.rank, (13, 5), torch.int64, "sum", seed)
        expect(there.run(x), reduced("sum", summands), [Shard(0)], context.rank, f"run {seed}")


def gradients(context) -> None:
    """Every summand of a sum gets the whole gradient, of an average one nth; cast on the way there and back,
    two calls under way in one backward."""
    mesh = quiet_mesh(TARGET.tolist())
    scales = {"sum": 1.0, "avg": 0.5}
    leaves = []
    loss = torch.zeros((), dtype=torch.float64)
    for op in scales:
        x, _ = source(context.rank, (12, 4), torch.float32, op, 5, exact=True)
        x = x.detach().requires_grad_(True)
        leaves.append((op, x))
        y = meshcast.reshard(x, mesh, [Shard(0)], dtype=torch.bfloat16)
        local = y.to_local()
        loss = loss + (local.double() * 3).sum()
    meshcast.backward(loss)
    for op, x in leaves:
        if context.rank in SOURCE:
            grad = x.grad
            assert grad is not None
            assert grad.placements == (Replicate(), Shard(0)), grad.placements
            assert grad.dtype == torch.float32
            assert torch.equal(grad.to_local(), torch.full_like(x.to_local(), 3 * scales[op])), op


def plain_shards(context) -> None:
    """reshard_local, also where source and destination are one tensor; what cannot be reduced is refused on
    every rank, before anything moves."""
    ranks = [4, 0, 2, 6]
    src, dst = meshcast.Layout(ranks, [Partial("max")]), meshcast.Layout(ranks, [Replicate()])
    summands = [summand((31, 3), torch.float32, 40 + i) for i in range(len(ranks))]
    refused = meshcast.Layout(ranks, [Partial("sum")])
    if context.rank in ranks:
        mine = summands[ranks.index(context.rank)].clone()
        whole = torch.zeros(3, dtype=torch.uint32)
        with pytest.raises(meshcast.LayoutError, match="cannot be reduced"):
            meshcast.reshard_local(whole, refused, None, dst, shape=(3,), dtype=torch.uint32)
        meshcast.reshard_local(mine, src, mine, dst, shape=(31, 3), dtype=torch.float32)
        assert torch.equal(mine, functools.reduce(torch.maximum, summands))


def state_dicts(context) -> None:
    """Weights that are sums over a mesh, in one batch with others."""
    mesh = quiet_mesh(TARGET.tolist())
    x, summands = source(context.rank, (9, 4), torch.float32, "sum", 8, exact=True)
    state = {"sum": x} if context.rank in SOURCE else {}
    result = meshcast.reshard_state_dict(state, {"sum": (mesh, [Shard(1)])})
    if context.rank in TARGET:
        expect(result["sum"], reduced("sum", summands).float(), [Shard(1)], context.rank, "state dict")


USES = [in_plan_order, bytes_of_the_plan, several_in_flight, reused, gradients, plain_shards, state_dicts]
