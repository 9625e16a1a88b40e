"""Measurement: every method of a case in turn, round after round, every element checked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshcast.plan import plan
from meshcast.topology import Topology

from .cases import Case
from .methods import METHODS, Box, Move

_SLOW = 3.0  # times the bound: more repeats would only tell the same again


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
    fields = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


class Runner:
    """One case: its ranks move data, the other ranks of the job only take part in the barriers."""

    def __init__(self, case: Case, topology: Topology, bound: float) -> None:
        rank = dist.get_rank()
        ranks = sorted({*case.src.ranks, *case.dst.ranks})
        self.case, self.bound = case, bound
        group = dist.new_group(ranks)
        replicas = self._replica_groups()
        self.move: Move | None = None
        self.values = self.expected = None
        if rank in ranks:
            self.move = Move(case.shape, case.src, case.dst, topology, group, None, None, replicas)
            held, needed = self.move.held.get(rank), self.move.needed.get(rank)
            self.values = None if held is None else numbered(case.shape, held)
            self.expected = None if needed is None else numbered(case.shape, needed)
            self.move.source = None if self.values is None else torch.empty_like(self.values)
            self.move.destination = None if self.expected is None else torch.empty_like(self.expected)

    def _replica_groups(self) -> dict[Box, dist.ProcessGroup | None]:
        """A group for the ranks of each destination tile. Every rank of the job makes all of them."""
        tiles: dict[Box, list[int]] = {}
        for rank, boxes in self.case.dst.shards(self.case.shape).items():
            if boxes:
                tiles.setdefault(boxes[0], []).append(rank)
        return {tile: dist.new_group(ranks) if len(ranks) > 1 else None for tile, ranks in tiles.items()}

    def once(self, method: str, salt: int) -> tuple[float, float, int]:
        """Seconds of the slowest rank, fraction of this machine's cores that was busy, and wrong elements on
        this rank."""
        move = self.move
        if move is not None and self.values is not None:
            torch.add(self.values, salt, out=move.source)
        if move is not None and move.destination is not None:
            move.destination.fill_(-1)
        dist.barrier()
        worked, had = busy()
        start = time.perf_counter()
        if move is not None:
            METHODS[method](move)
        # The longest call, not the time between two barriers on one rank: traffic of ranks that are through
        # the barrier early can hold up its last messages, and such a rank would start its clock late.
        taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        seconds = float(taken)
        worked, had = busy()[0] - worked, busy()[1] - had
        wrong = 0
        if move is not None and move.destination is not None and self.expected is not None:
            wrong = int((move.destination - self.expected != salt).sum())
        return seconds, worked / max(had, 1), wrong

    def run(self, methods: Sequence[str], repeats: int) -> dict[str, Any]:
        """The first round warms up: connections, plans, page faults. A slow method's only run counts."""
        seconds: dict[str, list[float]] = {method: [] for method in methods}
        load: dict[str, list[float]] = {method: [] for method in methods}
        wrong = torch.zeros(len(methods), dtype=torch.int64)
        done: set[str] = set()
        for repeat in range(repeats + 1):
            for number, method in enumerate(methods):
                if method in done:
                    continue
                taken, cores, bad = self.once(method, 1 + repeat * len(methods) + number)
                wrong[number] += bad
                slow = torch.tensor([int(taken > _SLOW * self.bound and not self.case.fixed)])
                dist.broadcast(slow, 0)
                if slow:
                    done.add(method)
                if repeat > 0 or slow:
                    seconds[method].append(taken)
                    load[method].append(cores)
        dist.all_reduce(wrong)
        wrong_elements = dict(zip(methods, wrong.tolist(), strict=True))
        return {"seconds": seconds, "busy": load, "wrong_elements": wrong_elements}


def measure(case: Case, topology: Topology, methods: Sequence[str], repeats: int) -> dict[str, Any]:
    """All there is to know of one case; called by every rank of the job, the same on each but for times."""
    planned = plan(case.shape, torch.int32, case.src, case.dst, topology=topology)
    facts = {
        "name": case.name,
        "group": case.group,
        "layouts": case.notation,
        "shape": case.shape,
        "nbytes": case.nbytes,
        "lower_bound": planned.lower_bound,
        "strategy": planned.strategy,
        "predicted": planned.makespan,
    }
    return facts | Runner(case, topology, planned.lower_bound).run(methods, repeats)
