"""One rank. Rank 0 prints what was found, as JSON."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshcast.bench.measure import SLOW, busy, calibrate
from meshcast.bench.report import overload
from meshcast.topology import Topology

from ..resources.clocks import cpu_seconds, largest, peak_above, total
from ..steps import Steps
from .models import TRAINERS, Weights
from .ways import WAYS, Way

_CALIBRATIONS = 3  # attempts: something else may disturb one
_IDLE = 5.0  # seconds over which the CPU time of ranks that do nothing is taken
_SLOW_ROUNDS = 1  # of a way that takes more than SLOW bounds

Found = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path, help="JSON, see __main__.py")
    job = json.loads(parser.parse_args().job.read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    per_host = job["ranks_per_host"]
    for _ in range(_CALIBRATIONS):
        links = calibrate(per_host, job["mbit"])
        if not overload(links.facts()):  # the same on all ranks: the times are summed up
            break
    total = len(job["models"]) * len(job["ways"]) * (1 + job["repeats"])
    with Steps("calls", total) as counted:
        models = [
            _Measured(job, links.topology(per_host, 1), name, shapes).run(counted)
            for name, shapes in job["models"].items()
        ]
    if dist.get_rank() == 0:
        print(json.dumps({"calibration": links.facts(), "models": models}))
    dist.barrier()
    dist.destroy_process_group()


class _Measured:
    """One model: every way alone first, for its first calls and its memory, then all by turns."""

    def __init__(self, job: Found, topology: Topology, name: str, shapes: Found) -> None:
        self._job, self._topology, self._name = job, topology, name
        self._weights = Weights({each: tuple(shape) for each, shape in shapes.items()}, dist.get_rank())
        described: list[Any] = [self._weights.described()]
        dist.broadcast_object_list(described, TRAINERS[0])
        self._bound = self._weights.bound(topology, described[0])
        self._ways: dict[str, Way] = {}
        self._found: dict[str, Found] = {}
        self._version = 0

    def run(self, counted: Steps) -> Found:
        idle = self._idle()
        for name in self._job["ways"]:
            self._found[name] = self._alone(name)
            if name == "two buffers":
                self._found[name]["idle"] = self._idle()
            counted.done()
        for turn in range(self._job["repeats"]):
            for name in random.Random(turn).sample(self._job["ways"], len(self._job["ways"])):
                found = self._found[name]
                if turn < _SLOW_ROUNDS or found["first"] <= SLOW * self._bound:
                    self._again(name)
                counted.done()
        for way in self._ways.values():
            way.close()
        weights = self._weights
        return {
            "name": self._name, "tensors": len(weights.shapes), "nbytes": weights.nbytes,
            "part": largest(float(weights.nbytes_here if weights.serves else 0)), "bound": self._bound,
            "idle": idle, "ways": self._found,
        }  # fmt: skip

    def _alone(self, name: str) -> Found:
        """Seconds of the first call and of the next, the first one making the way; and the memory that the
        ranks needed beyond what they had: a state dict is counted where the way itself makes it."""
        taken: list[Found] = []

        def calls() -> None:
            taken.append(self._timed(name, lambda: self._make(name)))
            if taken[0]["seconds"] <= SLOW * self._bound:
                taken.append(self._timed(name))

        extra = float(peak_above(calls))
        weights, copies = self._weights, self._ways[name].copies
        beyond = extra - (weights.nbytes_here if weights.serves and copies else 0)
        found: Found = {"first": taken[0]["seconds"], "wrong_bytes": sum(each["wrong"] for each in taken)}
        found["first_cpu"] = taken[0]["cpu"] / dist.get_world_size()
        found["memory"] = {
            "trainers": largest(extra if weights.trains else 0.0),
            "servers": largest(beyond if weights.serves else 0.0),
        }
        # What two buffers may have besides: one more copy of a server's part.
        spare = weights.nbytes_here if weights.serves and copies == 2 else 0
        found["memory"]["servers, without the spare copy"] = largest(
            beyond - spare if weights.serves else 0.0
        )
        return found | {"seconds": [], "cpu": [], "busy": []}

    def _make(self, name: str) -> None:
        self._ways[name] = WAYS[name](self._weights, self._topology, self._job["files"])

    def _again(self, name: str) -> None:
        taken, found = self._timed(name), self._found[name]
        for what in ("seconds", "cpu", "busy"):
            found[what].append(taken[what])
        found["wrong_bytes"] += taken["wrong"]

    def _timed(self, name: str, before: Callable[[], None] = lambda: None) -> Found:
        """The next version. Seconds of the slowest rank, CPU seconds of all, part of the cores that was at
        work."""
        self._version += 1
        self._weights.become(self._version)
        dist.barrier()
        worked, had = busy()
        used, begin = cpu_seconds(), time.perf_counter()
        before()
        self._ways[name].run(self._version)
        seconds = time.perf_counter() - begin
        used = cpu_seconds() - used
        now = busy()
        found = {"seconds": largest(seconds), "cpu": total(used)}
        wrong = self._weights.wrong(self._ways[name].received(), self._version) if self._weights.serves else 0
        found["wrong"] = int(total(float(wrong)))
        self._ways[name].after()
        return found | {"busy": (now[0] - worked) / max(now[1] - had, 1)}

    def _idle(self) -> float:
        """Part of a core that a rank uses while nothing moves, on the rank where it is most."""
        dist.barrier()
        time.sleep(0.5)  # what the calls before have left to do
        used = cpu_seconds()
        time.sleep(_IDLE)
        return largest(cpu_seconds() - used) / _IDLE


if __name__ == "__main__":
    main()
