"""Measurement: what links and machine carry, then every method of a case in turn, round after round. Every
element is checked."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..topology import Host, Nic, Topology
from .cases import Case, Tensor
from .methods import METHODS, Box, CaseBatch, CaseMove, Groups
from .report import OURS

SLOW = 3.0  # times the bound: more repeats would show nothing new
SHORT = 0.25  # seconds: below, a method is never slow
FEW_REPEATS = 3  # of methods that are not repeated often, unless the case asks for more

Begin = Callable[[str], None]  # gets the method that comes next


def numbered(shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """Every element its own linear index, modulo 2^32, so that a misplaced element shows."""
    index = torch.zeros([1] * len(shape), dtype=torch.int64)
    for dim, (lo, hi) in enumerate(box):
        view = [1] * len(shape)
        view[dim] = -1
        index = index * shape[dim] + torch.arange(lo, hi).view(view)
    return index.to(torch.int32)


def busy() -> tuple[float, float]:
    """Ticks that this machine's cores have worked, and ticks that they had, since it started."""
    fields = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


class CaseValues:
    """The values that one rank holds and must get of one tensor, in the round `salt`. Under Partial, the
    values that are added up differ; one rank of each sum has what is missing."""

    def __init__(self, tensor: Tensor, move: CaseMove) -> None:
        rank = dist.get_rank()
        held, needed = move.held.get(rank), move.needed.get(rank)
        self._move = move
        self._held = None if held is None else numbered(tensor.shape, held)
        self._needed = None if needed is None else numbered(tensor.shape, needed)
        # With one Partial dimension of n ranks: -1, -2, ... -(n - 1) on all but the first, which makes up.
        sizes = [
            n for n, p in zip(tensor.src.mesh_shape, tensor.src.placements, strict=True) if p.is_partial()
        ]
        assert len(sizes) < 2, "cases have at most one Partial dimension"
        self._salted, self._term = True, 0
        if sizes and move.source_mesh is not None and held is not None:
            dim = next(d for d, p in enumerate(tensor.src.placements) if p.is_partial())
            place = move.source_mesh.get_local_rank(dim)
            self._salted = place == 0
            self._term = sizes[0] * (sizes[0] - 1) // 2 if place == 0 else -place
        move.source = None if self._held is None else torch.empty_like(self._held)
        move.destination = None if self._needed is None else torch.empty_like(self._needed)
        self._expected = None if self._needed is None else torch.empty_like(self._needed)

    def fill(self, salt: int) -> None:
        if self._held is not None and self._move.source is not None:
            if self._salted:
                torch.add(self._held, salt + self._term, out=self._move.source)
            else:
                self._move.source.fill_(self._term)
        if self._needed is not None and self._expected is not None and self._move.destination is not None:
            torch.add(self._needed, salt, out=self._expected)
            self._move.destination.fill_(-1)

    def wrong(self) -> int:
        """Bytes of the destination that are not what `fill` asked for, counted by elements."""
        found = self._move.destination
        if found is None or self._expected is None or torch.equal(found, self._expected):
            return 0
        return 4 * int((found != self._expected).sum())


class Runner:
    """One case: its ranks move data, the other ranks of the job only take part in the barriers."""

    def __init__(self, case: Case, topology: Topology, bound: float, methods: Sequence[str]) -> None:
        rank = dist.get_rank()
        self._case, self._bound = case, bound
        self._groups = Groups()
        group = self._groups.new(case.ranks)
        moves = [CaseMove(*tensor) for tensor in case.tensors]
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for move in moves:
            for tile, ranks in move.wanted.items():
                key = tuple(ranks)
                if len(key) > 1 and key not in made:
                    made[key] = self._groups.new(key)
                move.replicas[tile] = made.get(key)
            if move.src.has_partial:
                move.source_mesh = self._groups.mesh_of(move.src)
                move.destination_mesh = self._groups.mesh_of(move.dst)
        kept = {method: METHODS[method].setup(case, self._groups) for method in methods}
        self._batch: CaseBatch | None = None
        self._values: list[CaseValues] = []
        if rank in case.ranks:
            self._batch = CaseBatch(moves, topology, group, {k: v for k, v in kept.items() if v is not None})
            self._values = [CaseValues(*pair) for pair in zip(case.tensors, moves, strict=True)]

    def close(self) -> None:
        dist.barrier()
        self._batch = None
        self._groups.close()

    def once(self, name: str, salt: int) -> tuple[float, float, int]:
        """Seconds of the slowest rank, fraction of this machine's cores that was busy, and wrong bytes on
        this rank."""
        method = METHODS[name]
        for values in self._values:
            values.fill(salt)
        dist.barrier()
        worked, had = busy()
        start = time.perf_counter()
        if self._batch is not None:
            if not method.adds_up:
                for move in self._batch.moves:
                    move.add_up()
            method.run(self._batch)
        # The longest call, not the time between two barriers on one rank: traffic of ranks that leave
        # the barrier early can hold up its last messages, and such a rank would start its clock late.
        taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        worked, had = busy()[0] - worked, busy()[1] - had
        return float(taken), worked / max(had, 1), sum(values.wrong() for values in self._values)

    def run(self, methods: Sequence[str], repeats: int, begin: Begin = lambda _: None) -> dict[str, Any]:
        """The first round warms up: connections, plans, page faults. A slow method's first run that shows
        something is its last; what the others are compared with is never slow."""
        seconds: dict[str, list[float]] = {method: [] for method in methods}
        load: dict[str, list[float]] = {method: [] for method in methods}
        wrong = torch.zeros(len(methods), dtype=torch.int64)
        least = self._case.least_repeats
        left = {m: max(least, repeats if METHODS[m].often else min(repeats, FEW_REPEATS)) for m in methods}
        for turn in range(max(left.values(), default=0) + 1):
            for number, method in enumerate(methods):
                if left[method] < turn:
                    continue
                begin(method)
                taken, cores, bad = self.once(method, 1 + turn * len(methods) + number)
                wrong[number] += bad
                # Only long repeats are cut short: short messages are repeated even if they are slow.
                slow = torch.tensor([int(method != OURS and taken > max(SLOW * self._bound, SHORT))])
                dist.broadcast(slow, 0)
                counts = turn > 0
                if slow and turn == 0:
                    counts = not METHODS[method].prepares
                    left[method] = 0 if counts else 1
                elif slow:
                    left[method] = 0
                if counts:
                    seconds[method].append(taken)
                    load[method].append(cores)
        dist.all_reduce(wrong)
        return {
            "seconds": seconds,
            "busy": load,
            "wrong_bytes": dict(zip(methods, wrong.tolist(), strict=True)),
        }


def facts(case: Case, topology: Topology) -> dict[str, Any]:
    """Returns what is known of a case before anything moves."""
    planned = case.plan(topology)
    return {
        "name": case.name,
        "group": case.group,
        "layouts": case.notation,
        "tensors": len(case.tensors),
        "shape": case.shape,
        "nbytes": case.nbytes,
        "lower_bound": planned.lower_bound,
        "strategy": planned.strategy,
        "predicted": planned.makespan,
    }


def choose(case: Case, methods: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the methods that can do the case, and why each of the others cannot."""
    able, unable = [], {}
    for name in methods:
        why = METHODS[name].why_not(case)
        if case.methods and name not in case.methods:
            why = why or "not what this case compares"
        if why:
            unable[name] = why
        else:
            able.append(name)
    return able, unable


def measure(
    case: Case, topology: Topology, methods: Sequence[str], repeats: int, begin: Begin = lambda _: None
) -> dict[str, Any]:
    """Returns all there is to know of one case. Every rank of the job calls it, and gets the same, apart from
    times."""
    found = facts(case, topology)
    able, unable = choose(case, methods)
    runner = Runner(case, topology, found["lower_bound"], able)
    measured = runner.run(able, repeats, begin)
    runner.close()
    return found | measured | {"not_run": unable}


# The length of one transfer: about that of what is measured later, which also begins with a full bucket.
_SECONDS = 0.3
_REPEATS = 3
_LATENCY_US = 100.0
_LOCAL_GBPS = 80.0


@dataclass(frozen=True)
class Links:
    """Measured rates of the first link of each host, in Mbit/s."""

    nominal: tuple[float, ...]
    alone: tuple[float, ...]  # from each host to the next, nothing else at work
    together: tuple[float, ...]  # the same, all at once
    local_copy_gbytes: float  # of all ranks of the job at once

    @property
    def efficiency(self) -> float:
        """Measured over nominal rate. A link is as fast as the slower of its two ends."""
        hosts = len(self.nominal)
        return statistics.median(
            rate / min(self.nominal[host], self.nominal[(host + 1) % hosts])
            for host, rate in enumerate(self.alone)
        )

    def topology(self, ranks_per_host: int, nics: int) -> Topology:
        """Nominal rates times the efficiency, 100 us latency, 80 Gbit/s inside a host. A measured rate above
        the nominal one shows the depth of the bucket, or no link at all: it does not last."""
        hosts = []
        for host, mbit in enumerate(self.nominal):
            rate = int(mbit * min(self.efficiency, 1.0) * 1e6 / 8)
            ranks = tuple(range(host * ranks_per_host, (host + 1) * ranks_per_host))
            hosts.append(Host(ranks, (Nic(rate, rate),) * nics, int(_LOCAL_GBPS * 1e9 / 8)))
        return Topology(hosts, _LATENCY_US)

    def facts(self) -> dict[str, float]:
        return {
            "hosts": len(self.nominal),
            "efficiency": self.efficiency,
            "slowest_link_mbit": min(self.alone),
            "slowest_all_at_once": min(b / a for a, b in zip(self.alone, self.together, strict=True)),
            "local_copy_gbytes": self.local_copy_gbytes,
        }


def calibrate(ranks_per_host: int, nominal: Sequence[float]) -> Links:
    """Called by all ranks of the job, host by host ranks_per_host each. nominal: Mbit/s of each host."""
    hosts = dist.get_world_size() // ranks_per_host
    probe = _transfer([0], hosts, ranks_per_host, 1 << 20)[0]
    nbytes = max(int(probe * 1e6 / 8 * _SECONDS), 1 << 20)
    alone = [_transfer([host], hosts, ranks_per_host, nbytes)[0] for host in range(hosts)]
    together = _transfer(list(range(hosts)), hosts, ranks_per_host, nbytes)
    return Links(tuple(nominal), tuple(alone), tuple(together), _copy_rate())


def _transfer(senders: list[int], hosts: int, ranks_per_host: int, nbytes: int) -> list[float]:
    """Mbit/s from each of the sending hosts to the next one, all at once; the most of several times, since
    any disturbance makes a transfer longer, and a link measured too slow flatters all ratios."""
    rank = dist.get_rank()
    host, leader = rank // ranks_per_host, rank % ranks_per_host == 0
    target, origin = (host + 1) % hosts, (host - 1) % hosts
    data = torch.zeros(nbytes, dtype=torch.uint8)
    arriving = torch.zeros_like(data)  # touched: no page faults while the clock runs
    rates = []
    for _ in range(_REPEATS + 1):
        dist.barrier()
        start = time.perf_counter()
        receives = leader and origin in senders
        work_in = dist.irecv(arriving, origin * ranks_per_host) if receives else None
        work_out = dist.isend(data, target * ranks_per_host) if leader and host in senders else None
        taken = 0.0
        if work_in is not None:  # only a receiver knows that everything is there
            work_in.wait()
            taken = time.perf_counter() - start
        if work_out is not None:  # perhaps to a slower host, so outside of what was measured
            work_out.wait()
        times = torch.zeros(hosts, dtype=torch.float64)
        if leader:
            times[origin] = taken
        dist.all_reduce(times)
        rates.append([nbytes * 8e-6 / float(times[sender]) for sender in senders])
    return [max(of_sender[1:]) for of_sender in zip(*rates, strict=True)]


def _copy_rate() -> float:
    """Warm memory copies by every rank at once, GB/s in total."""
    source = torch.ones(16 << 20, dtype=torch.uint8)
    target = torch.ones_like(source)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(4):
        target.copy_(source)
    dist.barrier()
    return 4 * source.numel() * dist.get_world_size() / (time.perf_counter() - start) / 1e9
