"""Pipeline schedules on an emulated cluster, one stage on each host, compute timed by sleeps; measured beside
simulated, and beside torch.distributed.pipelining. Needs root and iproute2.

Writes the raw results, then the pictures and the tables of docs/pipelining.md from them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshcast.pipelining import PipelineStage, Schedule1F1B, simulate
from torch import nn

from ..cluster import Cluster, ClusterError, join_neighbours, run_job
from ..harness import Found, machine, names, positive
from ..ranks import Report, Steps, Watch, gathered, share_of_others
from .stages import Clock, TimedStage, timed_step
from .sweep_page import LATE, METHODS, PAGE, Method, row, table_head

_CPU = torch.device("cpu")
_TRIES = 3  # of a step that is disturbed; the least disturbed one counts
_MOST_AGAIN = 20  # steps in all, so that the whole ends also on a machine that is never quiet


def rank(job: Found, report: Report) -> None:
    """One stage on a host of its own. Reports the overhead, the links and each point."""
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


def _overhead(microbatches: int) -> dict[str, float]:
    """What the runtime itself costs, and the part of the cores that others had meanwhile."""
    begin = Watch.now()
    figures = measure_overhead(microbatches)
    passed = gathered(Watch.now().since(begin))
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

        def traced() -> tuple[float, list[list[Any]]]:
            events = _events(run["schedule"]) if run["method"].traced else []
            return self._period(events), events

        found, every = timed_step(lambda: self._step(run, return_outputs=False), run["clock"], traced)
        return found | {
            "period": max(period for period, _ in every),
            "trace": {str(rank): events for rank, (_, events) in enumerate(every)},
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


_TRANSFERS = 7
_IDLE = 0.03  # seconds before each transfer, in which the token buckets fill up


@dataclass(frozen=True)
class LinkFit:
    """seconds = base + bytes / rate, for one transfer between two neighbours. base holds the latency less
    what the token buckets let through at once, so it may be below zero."""

    base: float
    rate: float  # bytes/s

    def bytes_of(self, seconds: float) -> int:
        """How many bytes take this long."""
        return max(4, round((seconds - self.base) * self.rate))


def measure_links(rank: int, world: int, small: int, large: int) -> LinkFit:
    """Called by all ranks; every link between neighbours is measured, alone, and the fit is that of the
    median. small, large: bytes."""
    times: dict[int, list[float]] = {small: [], large: []}
    for sender in range(world - 1):
        for nbytes in (small, large):
            times[nbytes] += _transfers(rank, sender, sender + 1, nbytes)
            dist.barrier()
    every = gathered(times)
    short, long = (
        statistics.median(seconds for found in every for seconds in found[nbytes])
        for nbytes in (small, large)
    )
    rate = (large - small) / (long - short)
    return LinkFit(short - small / rate, rate)


def _transfers(rank: int, sender: int, receiver: int, nbytes: int) -> list[float]:
    """Seconds from send to arrival, on the receiver; all ranks of one machine share the clock."""
    if rank not in (sender, receiver):
        return []
    payload = torch.zeros(nbytes, dtype=torch.uint8)
    began = torch.zeros(1, dtype=torch.float64)
    seconds = []
    for _ in range(_TRANSFERS + 1):
        if rank == sender:
            dist.recv(torch.zeros(1), receiver)  # its receive is posted
            time.sleep(_IDLE)
            began[0] = time.monotonic()
            dist.send(payload, receiver)
            dist.send(began, receiver)
        else:
            work = dist.irecv(payload, sender)
            dist.send(torch.zeros(1), sender)
            assert work is not None
            work.wait()
            ended = time.monotonic()
            dist.recv(began, sender)
            seconds.append(ended - float(began[0]))
    return seconds[1:]  # without the one that made the connection


_STEPS = 15
_NEW_SHAPES = 5
_WIDTH = 16


def measure_overhead(microbatches: int) -> dict[str, float]:
    """Seconds per action of a rank, where not said otherwise; called by all ranks.

    alone: one stage on one rank, nothing travels. CPU time of the thread that runs the actions.
    chain: a stage on each rank and values of 64 bytes, of a rank in the middle. The same.
    chain_wall: wall time of that step, which holds the latency of the links and whatever else the cores
        have to do.
    fixed_step, varying_step: wall time of a step of that chain, and of one whose micro-batches may vary in
        shape.
    new_shape: how much longer a step takes whose micro-batches have a shape that none had before.

    Of the CPU times, the same forwards and backwards in a plain loop are taken off.
    """
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    found = {"alone": _alone(groups[dist.get_rank()], microbatches)} | _chain(microbatches)
    found |= _varying(microbatches)
    every = gathered(found)
    return {"alone": every[0]["alone"]} | {
        name: max(each[name] for each in every[1:-1] or every) for name in found if name != "alone"
    }


def _alone(group: dist.ProcessGroup, microbatches: int) -> float:
    module = nn.Linear(_WIDTH, _WIDTH)
    schedule = Schedule1F1B(PipelineStage(module, 0, 1, _CPU, group=group), microbatches, loss_fn=_loss)
    x = torch.ones(microbatches, _WIDTH)

    def step() -> None:
        schedule.step(x, target=x, return_outputs=False)

    found = 0.0
    if dist.get_rank() == 0:  # one rank at a time has the cores
        plain = _typical(lambda: _plain(module, x, microbatches), time.thread_time)
        found = (_typical(step, time.thread_time) - plain) / (2 * microbatches)
    schedule.close()
    dist.barrier()
    return found


def _chain(microbatches: int) -> dict[str, float]:
    rank, stages = dist.get_rank(), dist.get_world_size()
    module = nn.Linear(_WIDTH, _WIDTH)
    schedule = Schedule1F1B(PipelineStage(module, rank, stages, _CPU), microbatches, loss_fn=_loss)
    x = torch.ones(microbatches, _WIDTH)

    def step() -> None:
        schedule.step(x, target=x, return_outputs=False)

    actions = len(schedule.actions[rank])
    plain = _typical(lambda: _plain(module, x.requires_grad_(), microbatches), time.thread_time)
    x.requires_grad_(False)
    cpu, wall = _typical(step, time.thread_time), _typical(step, time.perf_counter)
    schedule.close()
    return {"chain": (cpu - plain) / actions, "chain_wall": wall / actions, "fixed_step": wall}


def _varying(microbatches: int) -> dict[str, float]:
    rank, stages = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(nn.Linear(_WIDTH, _WIDTH), rank, stages, _CPU)
    schedule = Schedule1F1B(stage, microbatches, loss_fn=_loss, varying_shapes=True)

    def step(rows: int) -> None:
        x = torch.ones(rows * microbatches, _WIDTH)
        schedule.step(x, target=x, return_outputs=False)

    known = _typical(lambda: step(1), time.perf_counter)
    fresh = []
    for rows in range(2, 2 + _NEW_SHAPES):
        dist.barrier()
        begin = time.perf_counter()
        step(rows)
        fresh.append(time.perf_counter() - begin)
    schedule.close()
    return {"varying_step": known, "new_shape": statistics.median(fresh) - known}


def _plain(module: nn.Module, x: torch.Tensor, microbatches: int) -> None:
    for part in x.detach().chunk(microbatches):
        (_loss(module(part.requires_grad_(x.requires_grad)), part.detach()) / microbatches).backward()


def _typical(run: Any, clock: Any) -> float:
    """Median of several runs; two before them do not count."""
    times = []
    for _ in range(_STEPS + 2):
        begin = clock()
        run()
        times.append(clock() - begin)
    return statistics.median(times[2:])


_LIMIT = 900.0  # seconds for everything


def parse() -> argparse.Namespace:
    options = PAGE.parser(__doc__)
    known = [method.name for method in METHODS]
    options.add_argument("--stages", type=int, default=4)
    options.add_argument("--microbatches", type=positive(int), default=16)
    options.add_argument(
        "--forward", type=positive(float), default=0.1, help="seconds; a backward takes twice that"
    )
    options.add_argument(
        "--transfers", type=_shares, default=[0.1, 0.25, 0.5, 0.75, 1.0], help="over forward"
    )
    options.add_argument("--methods", type=names(known, "method", ";"), default=known, help="separated by ;")
    options.add_argument("--mbit", type=positive(float), default=50.0, help="rate of a link, each way")
    options.add_argument(
        "--repeats", type=positive(int), default=2, help="steps of ours; torch's are timed once"
    )
    args = options.parse_args()
    if args.stages < 2:
        options.error("--stages must be 2 or more")
    return args


def _shares(text: str) -> list[float]:
    shares = [float(share) for share in text.split(",")]
    if min(shares) <= 0:
        raise argparse.ArgumentTypeError("transfer times must be positive")
    return shares


def header(args: argparse.Namespace) -> dict[str, Any]:
    """What a reader must know to take the figures for what they are."""
    return {
        **machine("pipeline"),
        "stages": args.stages,
        "microbatches": args.microbatches,
        "forward_seconds": args.forward,
        "link_mbit": args.mbit,
        "repeats": args.repeats,
    }


def main() -> int:
    args = parse()
    results: Found = {"header": header(args), "points": []}
    print("# " + ", ".join(f"{k} {v}" for k, v in results["header"].items()), flush=True)
    begin, failed = time.monotonic(), False

    def heard(kind: str, value: Any) -> None:
        if kind == "point":
            results["points"].append(value)
            if len(results["points"]) == 1:
                print(table_head(value))
            print(row(value), flush=True)
        else:
            results[kind] = value
            print(f"# {kind}: " + ", ".join(f"{k} {v:.4g}" for k, v in value.items()), flush=True)

    try:
        with Cluster(args.stages, args.mbit, own_cores=False) as cluster:
            join_neighbours(cluster, args.mbit)
            run_job(cluster, 1, "pipeline.sweep:rank", vars(args), limit=_LIMIT, heard=heard)
    except ClusterError as error:
        print(f"the benchmark did not run to its end: {error}", file=sys.stderr)
        failed = True
    if not results["points"]:
        return 1
    results["header"]["seconds"] = round(time.monotonic() - begin)
    if args.out or not failed:
        PAGE.finish(args, results)
    return 1 if failed else 0
