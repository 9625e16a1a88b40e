"""An interpreter of plans that shares no code with the planner: it cuts shards with numpy, executes the
transfers in a random order that `after` allows, and checks what every plan promises."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise, product
from typing import Any

import numpy as np
from meshcast.layout import Box, Layout
from meshcast.planning.plan import Plan, Problem, Transfer

Array = np.ndarray[Any, Any]
_COMBINE = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}


def dimension_indices(layout: Layout, shape: tuple[int, ...]) -> dict[int, list[Array]]:
    """For each rank and tensor dimension: the global indices that it holds, in local order (torch.chunk's
    rule)."""
    out = {}
    for rank, coordinate in zip(layout.ranks, product(*map(range, layout.mesh_shape)), strict=True):
        indices = [np.arange(size) for size in shape]
        for placement, parts, part in zip(layout.placements, layout.mesh_shape, coordinate, strict=True):
            dim = getattr(placement, "dim", None)
            if dim is None:
                continue
            factor = int(getattr(placement, "split_factor", 1))
            sections = _chunks(indices[dim], factor)
            indices[dim] = np.concatenate([_chunks(section, parts)[part] for section in sections])
        out[rank] = indices
    return out


def _chunks(values: Array, count: int) -> list[Array]:
    step = -(-len(values) // count)
    return [values[i * step : (i + 1) * step] for i in range(count)]


def contributions(layout: Layout) -> dict[int, int]:
    """Number of the partial value that each rank has: its coordinates along the Partial mesh dimensions."""
    out = {}
    for rank, coordinate in zip(layout.ranks, product(*map(range, layout.mesh_shape)), strict=True):
        number = 0
        if layout.by_boxes:  # without placements
            out[rank] = 0
            continue
        for placement, parts, part in zip(layout.placements, layout.mesh_shape, coordinate, strict=True):
            if placement.is_partial():
                number = number * parts + part
        out[rank] = number
    return out


def _window(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in box)


class _Tensor:
    """The true values of one problem, and per rank what it holds (source) and what it got (destination)."""

    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        self.shape = problem.shape
        self.contribution = contributions(problem.src)
        self.count = max(self.contribution.values()) + 1
        ops = {p.reduce_op for p in problem.src.placements if p.is_partial()}
        self.op = ops.pop() if ops else None
        # Unique where nothing is reduced; small and exact in float64 where something is.
        size = math.prod(problem.shape)
        if self.op is None:
            self.values = [np.arange(1, size + 1, dtype=np.float64).reshape(problem.shape)]
        else:
            self.values = [rng.integers(1, 4, problem.shape).astype(np.float64) for _ in range(self.count)]
        self.truth = self.values[0].copy()
        for value in self.values[1:]:
            self.truth = _COMBINE[self.op or "sum"](self.truth, value)
        if self.op == "avg":
            self.truth /= self.count
        self.held = self._masks(problem.src)
        self.needed = self._masks(problem.dst)
        self.got = {rank: np.full(problem.shape, np.nan) for rank in self.needed}
        self.writes = {rank: np.zeros(problem.shape, dtype=int) for rank in self.needed}

    def _masks(self, layout: Layout) -> dict[int, Array]:
        masks = {}
        if layout.by_boxes:
            for rank, boxes in layout.shards(self.shape).items():
                masks[rank] = np.zeros(self.shape, dtype=bool)
                for box in boxes:
                    masks[rank][_window(box)] = True
            return masks
        for rank, indices in dimension_indices(layout, self.shape).items():
            mask = np.zeros(self.shape, dtype=bool)
            mask[np.ix_(*indices)] = True
            masks[rank] = mask
        return masks

    def own(self, rank: int, box: Box, what: str) -> Array:
        """The source values of a rank; it must hold all of them."""
        assert rank in self.held, f"{what}: rank {rank} is not in the source mesh"
        assert self.held[rank][_window(box)].all(), f"{what}: rank {rank} does not hold all of {box}"
        return self.values[self.contribution[rank] if self.op else 0][_window(box)]

    def write(self, rank: int, box: Box, value: Array, what: str) -> None:
        """Stores into the destination shard; the rank must need all of it."""
        assert rank in self.needed, f"{what}: rank {rank} is not in the destination mesh"
        assert self.needed[rank][_window(box)].all(), f"{what}: rank {rank} does not need all of {box}"
        self.got[rank][_window(box)] = value
        self.writes[rank][_window(box)] += 1

    def check(self) -> None:
        """Every needed element was written once, with the true value, and no other."""
        for rank, mask in self.needed.items():
            wrong = self.writes[rank] != mask
            assert not wrong.any(), (
                f"rank {rank}: writes {self.writes[rank][wrong]} at {np.argwhere(wrong)[:5]}"
            )
            assert (self.got[rank][mask] == self.truth[mask]).all(), f"rank {rank} got wrong values"


def execute(plan: Plan, seed: int) -> None:
    """Runs the plan over exact copies of the source shards and checks values, writes, volumes and times."""
    rng = random.Random(seed)
    tensors = [_Tensor(problem, np.random.default_rng(seed)) for problem in plan.problems]
    for copy in plan.local_copies:
        tensor = tensors[copy.tensor]
        assert tensor.count == 1, f"{copy}: a partial value is no result"
        tensor.write(copy.rank, copy.box, tensor.own(copy.rank, copy.box, str(copy)), str(copy))
    carried: dict[
        int, tuple[int, Array, frozenset[int]]
    ] = {}  # by transfer: rank, value, contributions in it
    for transfer in _random_order(plan.transfers, rng):
        carried[transfer.id] = _step(plan, tensors[transfer.tensor], transfer, carried)
    for tensor in tensors:
        tensor.check()
    check_volumes(plan, tensors)
    check_times(plan)


def _random_order(transfers: Iterable[Transfer], rng: random.Random) -> Iterable[Transfer]:
    waiting = {}
    blocks = defaultdict(list)
    for transfer in transfers:
        assert all(0 <= before < transfer.id for before in transfer.after), (
            f"{transfer} waits for a later one"
        )
        waiting[transfer.id] = len(transfer.after)
        for before in transfer.after:
            blocks[before].append(transfer.id)
    listed = list(transfers)
    assert [transfer.id for transfer in listed] == list(range(len(listed)))
    ready = [number for number, count in waiting.items() if count == 0]
    while ready:
        pick = rng.randrange(len(ready))
        ready[pick], ready[-1] = ready[-1], ready[pick]
        transfer = listed[ready.pop()]
        yield transfer
        for number in blocks[transfer.id]:
            waiting[number] -= 1
            if waiting[number] == 0:
                ready.append(number)


def _step(
    plan: Plan, tensor: _Tensor, transfer: Transfer, carried: dict[int, tuple[int, Array, frozenset[int]]]
) -> tuple[int, Array, frozenset[int]]:
    what = str(transfer)
    assert transfer.src != transfer.dst, what
    if transfer.after:
        (before,) = transfer.after
        rank, value, parts = carried[before]
        assert rank == transfer.src, f"{what}: transfer {before} brings nothing to rank {transfer.src}"
        assert plan.transfers[before].box == transfer.box, f"{what}: forwards another box than it waits for"
    else:
        value = tensor.own(transfer.src, transfer.box, what)
        parts = frozenset([tensor.contribution[transfer.src]]) if tensor.op else frozenset([0])
    if transfer.reduce is None:
        assert len(parts) == tensor.count, f"{what}: sends a value that is not fully reduced"
        tensor.write(transfer.dst, transfer.box, value, what)
        return transfer.dst, value, parts
    assert transfer.reduce == tensor.op, what
    mine = tensor.contribution[transfer.dst]
    assert mine not in parts, f"{what}: rank {transfer.dst} adds contribution {mine} twice"
    parts |= {mine}
    value = _COMBINE[transfer.reduce](value, tensor.own(transfer.dst, transfer.box, what))
    assert transfer.last_reduce == (len(parts) == tensor.count), (
        f"{what}: {len(parts)} of {tensor.count} contributions"
    )
    if transfer.last_reduce:
        if tensor.op == "avg":
            value = value / tensor.count
        needed = tensor.needed.get(transfer.dst)
        if needed is not None and needed[_window(transfer.box)].all():
            tensor.write(transfer.dst, transfer.box, value, what)
    return transfer.dst, value, parts


def check_volumes(plan: Plan, tensors: list[_Tensor]) -> None:
    """Bytes of boxes, ranks and NICs equal what the plan claims; without reductions nothing arrives that was
    not missing."""
    host_of = {rank: index for index, host in enumerate(plan.hosts) for rank in host.ranks}
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    out: Counter[int] = Counter()
    incoming: Counter[int] = Counter()
    for transfer in plan.transfers:
        itemsize = plan.problems[transfer.tensor].dtype.itemsize
        assert transfer.nbytes == itemsize * math.prod(hi - lo for lo, hi in transfer.box) > 0, transfer
        assert plan.tasks[transfer.task].tensor == transfer.tensor
        sent[transfer.src] += transfer.nbytes
        received[transfer.dst] += transfer.nbytes
        if host_of[transfer.src] != host_of[transfer.dst]:
            out[host_of[transfer.src]] += transfer.nbytes
            incoming[host_of[transfer.dst]] += transfer.nbytes
    for rank in plan.ranks:
        assert plan.bytes_sent(rank) == sent[rank]
        assert plan.bytes_received(rank) == received[rank]
        assert plan.peak_staging_bytes(rank) <= sent[rank] + received[rank]
    for index in range(len(plan.hosts)):
        assert plan.nic_bytes(index) == (out[index], incoming[index])
    if all(tensor.op is None for tensor in tensors):
        missing: Counter[int] = Counter()
        for tensor, problem in zip(tensors, plan.problems, strict=True):
            for rank, mask in tensor.needed.items():
                held = tensor.held.get(rank, np.zeros_like(mask))
                missing[rank] += int((mask & ~held).sum()) * problem.dtype.itemsize
        assert received == +missing


def check_times(plan: Plan) -> None:
    """No lane carries two messages at once, no hop starts before its data is there, and the makespan is the
    last arrival."""
    place = {
        rank: (index, position % len(host.nics))
        for index, host in enumerate(plan.hosts)
        for position, rank in enumerate(host.ranks)
    }
    lanes: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    finish = 0.0
    messages: dict[tuple[int, int, float], int] = defaultdict(int)  # pieces of one message share its start
    for transfer in plan.transfers:
        messages[transfer.src, transfer.dst, transfer.start] += transfer.nbytes
        finish = max(finish, transfer.finish)
        for before in transfer.after:
            assert transfer.start >= plan.transfers[before].finish, transfer
    for (src, dst, start), nbytes in messages.items():
        (src_host, src_nic), (dst_host, dst_nic) = place[src], place[dst]
        if src_host == dst_host:
            rate = plan.hosts[src_host].local_rate
            ends = [(("local out", src), rate), (("local in", dst), rate)]
        else:
            ends = [
                (("out", src_host, src_nic), plan.hosts[src_host].nics[src_nic].out_rate),
                (("in", dst_host, dst_nic), plan.hosts[dst_host].nics[dst_nic].in_rate),
            ]
        for lane, rate in ends:
            lanes[lane].append((start, start + nbytes / rate))
    for lane, uses in lanes.items():
        uses.sort()
        for (_, end), (start, _) in pairwise(uses):
            assert start >= end - 2e-9, (
                f"{lane} carries two messages at {start}"
            )  # times are whole nanoseconds
    assert plan.makespan == finish
    assert plan.lower_bound <= plan.makespan
