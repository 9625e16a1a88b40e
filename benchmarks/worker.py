"""One rank of a benchmark: calibrates the links, runs every method of every case interleaved, checks every
element. Rank 0 appends one JSON object per case to a file."""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import meshcast
import torch
import torch.distributed as dist

from .calibrate import calibrate
from .cases import RANKS_PER_HOST, Case, find
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
    """Seconds that the machine's cores have worked, and seconds that they had, since it started."""
    fields = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)


class Runner:
    """Runs one case: its ranks move data, the others only take part in the barriers."""

    def __init__(self, case: Case, topology: meshcast.Topology, bound: float) -> None:
        rank = dist.get_rank()
        ranks = sorted({*case.src.ranks, *case.dst.ranks})
        self.member = rank in ranks
        self.case, self.bound = case, bound
        group = dist.new_group(ranks)
        replicas = self._replica_groups()
        if not self.member:
            return
        move = Move(case.shape, case.src, case.dst, topology, group, None, None)
        move.replicas = replicas
        held, needed = move.held.get(rank), move.needed.get(rank)
        self.values = None if held is None else numbered(case.shape, held)
        self.expected = None if needed is None else numbered(case.shape, needed)
        move.source = None if self.values is None else torch.empty_like(self.values)
        move.destination = None if self.expected is None else torch.empty_like(self.expected)
        self.move = move

    def _replica_groups(self) -> dict[Box, dist.ProcessGroup | None]:
        """A group for the ranks of each destination tile. Every rank of the world makes all of them."""
        tiles: dict[Box, list[int]] = {}
        for rank, boxes in self.case.dst.shards(self.case.shape).items():
            if boxes:
                tiles.setdefault(boxes[0], []).append(rank)
        return {tile: dist.new_group(ranks) if len(ranks) > 1 else None for tile, ranks in tiles.items()}

    def once(self, method: str, salt: int) -> tuple[float, float, int]:
        """Seconds, fraction of the cores that was busy, wrong elements on this rank."""
        if self.member:
            if self.values is not None:
                torch.add(self.values, salt, out=self.move.source)
            if self.move.destination is not None:
                self.move.destination.fill_(-1)
        dist.barrier()
        worked, had = busy()
        start = time.perf_counter()
        if self.member:
            METHODS[method](self.move)
        dist.barrier()
        seconds = time.perf_counter() - start
        worked, had = busy()[0] - worked, busy()[1] - had
        wrong = 0
        if self.member and self.expected is not None:
            wrong = int((self.move.destination - self.expected != salt).sum())
        return seconds, worked / max(had, 1), wrong

    def run(self, methods: list[str], repeats: int) -> dict[str, Any]:
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
                slow = torch.tensor([int(taken > _SLOW * self.bound)])
                dist.broadcast(slow, 0)
                if slow:
                    done.add(method)
                if repeat > 0 or slow:
                    seconds[method].append(taken)
                    load[method].append(cores)
        dist.all_reduce(wrong)
        wrong_elements = dict(zip(methods, wrong.tolist(), strict=True))
        return {"seconds": seconds, "busy": load, "wrong_elements": wrong_elements}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path, help="JSON: cases, methods, peers, repeats, seconds, folder")
    job = json.loads(parser.parse_args().job.read_text())
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    out = Path(job["folder"], "results.jsonl")

    def report(kind: str, value: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            with out.open("a") as file:
                file.write(json.dumps({kind: value}) + "\n")

    links = calibrate(RANKS_PER_HOST)
    report("calibration", links)
    topology = meshcast.Topology.uniform(RANKS_PER_HOST, links["link_mbit"] / 1e3, latency_us=100)
    for name in job["cases"]:
        (case,) = find([name])
        case = case.scaled(topology, job["seconds"])
        plan = meshcast.plan(case.shape, torch.int32, case.src, case.dst, topology=topology)
        measured = Runner(case, topology, plan.lower_bound).run(job["methods"], job["repeats"])
        report(
            "case",
            {
                "name": case.name, "group": case.group, "layouts": case.notation, "shape": case.shape,
                "nbytes": case.nbytes, "lower_bound": plan.lower_bound, "strategy": plan.strategy,
                "predicted": plan.makespan, **measured,
            },
        )  # fmt: skip
        # Peers of another kind run between the cases, while these processes sleep.
        while dist.get_rank() == 0 and job["peers"] and not Path(job["folder"], f"go {case.name}").exists():
            time.sleep(0.05)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
