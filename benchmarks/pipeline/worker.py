"""One rank of the pipeline benchmark: one stage on a host of its own. Rank 0 appends one JSON object per
result to a file."""

from __future__ import annotations

import argparse
import json
import math
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshcast.pipelining import simulate

from ..steps import Steps
from .disturbance import LATE, Watch, share_of_others
from .links import LinkFit, measure_links
from .methods import METHODS, Method
from .overhead import measure_overhead
from .stages import Clock, TimedStage

_TRIES = 3  # of a step that is disturbed; the least disturbed one counts
_MOST_AGAIN = 20  # steps in all, so that the whole ends also on a machine that is never quiet


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path, help="JSON, see __main__.py")
    job = json.loads(parser.parse_args().job.read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    out = Path(job["folder"], "results.jsonl")

    def report(kind: str, value: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            with out.open("a") as file:
                file.write(json.dumps({kind: value}) + "\n")

    report("overhead", _overhead(job["microbatches"]))
    whole = job["forward"] * job["mbit"] * 1e6 / 8  # bytes that travel in the time of a forward
    fit = measure_links(dist.get_rank(), dist.get_world_size(), max(4, round(0.1 * whole)), round(whole))
    report("links", {"base": fit.base, "mbit": fit.rate * 8 / 1e6})
    again = 0
    with Steps("steps", len(job["transfers"]) * Point.rounds(job["methods"], job["repeats"])) as counted:
        for share in job["transfers"]:
            point = Point(job, fit, share, _MOST_AGAIN - again)
            found = point.measure(job["methods"], job["repeats"], counted)
            again += point.again
            report("point", found | {"again": point.again})
    dist.destroy_process_group()


def _overhead(microbatches: int) -> dict[str, float]:
    """What the runtime itself costs, and the part of the cores that others had meanwhile."""
    begin = Watch.now()
    figures = measure_overhead(microbatches)
    passed: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(passed, Watch.now().since(begin))
    return figures | {"others": share_of_others(passed[0], passed)}


class Point:
    """One transfer time, as a share of the forward time.

    most_again: how many steps may be measured again, since they were disturbed; `again` were.
    """

    def __init__(self, job: dict[str, Any], fit: LinkFit, share: float, most_again: int) -> None:
        self._most_again, self.again = most_again, 0
        self._share, self._microbatches = share, job["microbatches"]
        self._forward, self._backward = job["forward"], 2 * job["forward"]
        self._rank, self._stages = dist.get_rank(), dist.get_world_size()
        elements = max(1, fit.bytes_of(share * self._forward) // 4)
        # Small whole numbers that differ from place to place and micro-batch to micro-batch: exact as
        # floats, and a misplaced or stale element shows.
        places = torch.arange(elements * self._microbatches, dtype=torch.float32)
        self._x = (places % 13 + 1).reshape(self._microbatches, elements)
        self._target = (places % 7 + 1).reshape(self._microbatches, elements)
        self._gradient = ((self._x * self._target).double().sum() / self._microbatches).item()
        self._bytes = 4 * elements

    @staticmethod
    def rounds(names: list[str], repeats: int) -> int:
        """How many steps `measure` counts: those that were disturbed count once."""
        chosen = [method for method in METHODS if method.name in names]
        return len(chosen) + (repeats - 1) * sum(method.simulated is not None for method in chosen)

    def measure(self, names: list[str], repeats: int, counted: Steps) -> dict[str, Any]:
        """The methods in turn, round after round, after a first step of each that only checks values. Only
        what is simulated takes part in all rounds: it is compared to a few per cent."""
        runs = [self._prepared(method) for method in METHODS if method.name in names]
        for number in range(repeats):
            for run in runs:
                if number == 0 or run["method"].simulated is not None:
                    self._undisturbed(run)
                    counted.done()
        free = (self._microbatches + self._stages - 1) * (self._forward + self._backward)
        found: dict[str, Any] = {"transfer": self._share, "bytes": self._bytes, "free": free, "methods": {}}
        for run in runs:
            found["methods"][run["method"].name] = {
                "seconds": run["seconds"],
                "simulated": self._simulated(run["method"]),
                "periods": run["periods"],
                "late": run["late"],
                "others": run["others"],
                "trace": run["trace"],
            }
            if run["method"].simulated is not None:
                run["schedule"].close()
        return found

    def _prepared(self, method: Method) -> dict[str, Any]:
        clock = Clock(self._forward, self._backward / 2, self._backward / 2, scale=0.0)
        module = TimedStage(clock, self._rank == 0)
        schedule = method.make(module, self._rank, self._stages, self._microbatches, _loss)
        run = {
            "method": method, "clock": clock, "module": module, "schedule": schedule,
            "seconds": [], "periods": [], "late": [], "others": [], "trace": {},
        }  # fmt: skip
        output = self._step(run, return_outputs=True)
        if self._rank == self._stages - 1 and not torch.equal(output, self._x):
            raise RuntimeError(f"{method.name}: what came out is not what went in")
        clock.scale = 1.0
        return run

    def _step(self, run: dict[str, Any], return_outputs: bool) -> Any:
        """One step, its weight gradient checked: it needs every activation and every gradient."""
        module, schedule = run["module"], run["schedule"]
        module.weight.grad = None
        if self._rank == 0:
            output = schedule.step(self._x)
        elif self._rank == self._stages - 1:
            output = schedule.step(target=self._target, return_outputs=return_outputs)
        else:
            output = schedule.step()
        found = module.weight.grad.item()
        if not math.isclose(found, self._gradient, rel_tol=1e-4):
            raise RuntimeError(
                f"{run['method'].name}, rank {self._rank}: gradient {found}, not {self._gradient}"
            )
        return output

    def _undisturbed(self, run: dict[str, Any]) -> None:
        """Adds one timed step; of several the one whose compute was least late, however long it took."""
        found: list[dict[str, Any]] = []
        while not found or (
            found[-1]["late"] > LATE * self._forward and len(found) < _TRIES and self.again < self._most_again
        ):
            self.again += bool(found)
            found.append(self._timed(run))
        best = min(found, key=lambda step: step["late"])
        run["seconds"].append(best["seconds"])
        run["late"].append(best["late"])
        run["others"].append(best["others"])
        if run["method"].traced:
            run["periods"].append(best["period"])
            run["trace"] = best["trace"]

    def _timed(self, run: dict[str, Any]) -> dict[str, Any]:
        """One step, as all ranks know it."""
        method, clock = run["method"], run["clock"]
        clock.late = 0.0
        dist.barrier()
        begin = Watch.now()
        self._step(run, return_outputs=False)
        end = Watch.now()
        events = _events(run["schedule"]) if method.traced else []
        mine = {
            "begin": begin.wall, "end": end.wall, "passed": end.since(begin), "late": clock.late,
            "period": self._period(events), "events": events,
        }  # fmt: skip
        gathered: list[dict[str, Any]] = [{} for _ in range(self._stages)]
        dist.all_gather_object(gathered, mine)
        # All ranks of one machine share the clock.
        return {
            "seconds": max(each["end"] for each in gathered) - min(each["begin"] for each in gathered),
            "late": max(each["late"] for each in gathered),
            "others": share_of_others(gathered[0]["passed"], [each["passed"] for each in gathered]),
            "period": max(each["period"] for each in gathered),
            "trace": {str(rank): each["events"] for rank, each in enumerate(gathered)},
        }

    def _period(self, events: list[list[Any]]) -> float:
        """Seconds from backward to backward between the fill and the drain, of this rank; of the whole or the
        input part."""
        first, last = self._stages, self._microbatches - self._stages
        begins = {name: begin for name, begin, _ in events}
        times = [
            begins[name]
            for microbatch in (first, last)
            for name in (f"{self._rank}B{microbatch}", f"{self._rank}I{microbatch}")
            if name in begins
        ]
        return (times[1] - times[0]) / (last - first) / 1e3 if len(times) == 2 and last > first else 0.0

    def _simulated(self, method: Method) -> float | None:
        if method.simulated is None:
            return None
        return simulate(
            stages=self._stages, microbatches=self._microbatches, forward=self._forward,
            backward=self._backward, transfer=self._share * self._forward, **method.simulated,
        ).makespan  # fmt: skip


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output * target).sum()


def _events(schedule: Any) -> list[list[Any]]:
    """Name, begin and end (ms) of what this rank did in the last step, on the clock of the machine."""
    path = Path(f"/tmp/meshcast-pipeline-{dist.get_rank()}-{time.monotonic_ns()}.json")
    try:
        schedule.trace(path)
        content = json.loads(path.read_text())
    finally:
        path.unlink(missing_ok=True)
    start = content["otherData"]["begin"] * 1e3
    return [
        [each["name"], round(start + each["ts"] / 1e3, 3), round(start + (each["ts"] + each["dur"]) / 1e3, 3)]
        for each in content["traceEvents"]
        if each["ph"] == "X"
    ]


if __name__ == "__main__":
    main()
