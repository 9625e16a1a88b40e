"""One rank of the end-to-end benchmark."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshcast import Topology
from meshcast.pipelining import PipelineStage, get_schedule_class, simulate
from meshcast.pipelining.action import ActionKind
from meshcast.pipelining.simulate import Span, most_held
from meshcast.pipelining.trace import read_trace
from torch.distributed import pipelining as theirs
from torch.distributed.device_mesh import DeviceMesh

from ..harness import Found
from ..ranks import Report, calibrated, gathered, steps
from .e2e_tasks import AUTO, CHOICES, FREE, FREE_DELAYED, RealTask, Row, TimedTask, Times, rows_for

_STAGES = 2
_CPU = torch.device("cpu")


def rank(job: Found, report: Report) -> None:
    """Reports the links, and by model the times of compute, or a table of the rows."""
    per_stage = job["ranks_per_stage"]
    links = calibrated(per_stage, [job["mbit"]] * _STAGES)
    report("links", links.facts() | {"compute": job["compute"], "mbit": job["mbit"]})
    topology = links.topology(per_stage, 1)
    for name in job["models"]:
        bench = Bench(job, name, topology)
        calibrates = job["compute"] == "calibrate"
        names = [FREE, FREE_DELAYED] if calibrates else job["rows"]
        rows = CHOICES if job["choices"] and not calibrates else rows_for(per_stage)
        bench.run([row for row in rows if row.name in names], job["repeats"])
        if calibrates:
            report("times", bench.found_times() | {"model": name, "nbytes": bench.task.nbytes})
        else:
            report("table", bench.found(name))


class Bench:
    """One model, all rows in turn."""

    def __init__(self, job: Found, name: str, topology: Topology) -> None:
        rank, self._per_stage = dist.get_rank(), job["ranks_per_stage"]
        self._job, self._name, self._topology = job, name, topology
        self._microbatches = job["microbatches"]
        self._stage = rank // self._per_stage
        parts, replicas = self._shape = job["meshes"][name]
        self._part = rank % self._per_stage // replicas
        meshes = [
            DeviceMesh("cpu", torch.arange(self._per_stage).view(parts, replicas) + stage * self._per_stage)
            for stage in range(_STAGES)
        ]
        self._mesh = meshes[self._stage]
        pairs = [dist.new_group([first, first + self._per_stage]) for first in range(self._per_stage)]
        self._pair = pairs[rank % self._per_stage]
        self._times = Times(**job["times"][name]) if job["compute"] != "calibrate" else None
        self.task: RealTask | TimedTask
        if job["compute"] == "timed":
            assert self._times is not None
            rate = topology.hosts[0].nics[0].out_rate
            nbytes = round(job["ratios"][name] * self._times.compute * rate)
            shares = job["shares"][name]
            self.task = TimedTask(
                self._times, self._stage, self._microbatches, parts, nbytes, shares, self._mesh.get_group(1)
            )
        else:
            self.task = RealTask(name, self._stage, self._microbatches)
        self._runs: list[_Run] = []

    def run(self, rows: list[Row], repeats: int) -> None:
        if not all(row.free for row in rows):
            self.task.expect()
        self._runs = [self._prepared(row) for row in rows]
        turns = [run for _ in range(repeats) for run in self._runs]
        for run in steps(turns, f"{self._job['compute']} steps of {self._name}"):
            run.timed()

    def _prepared(self, row: Row) -> _Run:
        """The schedule of a row, after a first step that connects and is checked."""
        module = self.task.module(row.free, row.peer)
        schedule: Any
        if row.peer:
            stage = theirs.PipelineStage(module, self._stage, _STAGES, _CPU, group=self._pair)
            schedule = theirs.Schedule1F1B(stage, self._microbatches, loss_fn=self.task.loss)
        else:
            ours = PipelineStage(
                module, self._stage, _STAGES, _CPU, mesh=self._mesh, edges=self.task.edges,
                strategy=row.strategy, topology=self._topology,
            )  # fmt: skip
            kind: Any = get_schedule_class(row.schedule)
            options = {"show": False} if row.name == AUTO else row.options
            schedule = kind(ours, self._microbatches, loss_fn=self.task.loss, **options)
        args, target = self.task.feed(row.free, self._part if row.peer else None)

        def step() -> None:
            module.zero_grad()
            if self._stage == 0:
                schedule.step(*args)
            else:
                schedule.step(target=target, losses=[], return_outputs=False)

        def check() -> None:
            self.task.check(row.name, row.free, row.peer, self._part)

        clock = self.task.clock if isinstance(self.task, TimedTask) else None
        if clock is not None:
            clock.on = row.name == AUTO  # which measures the stages in its first step
        step()
        check()
        if clock is not None:
            clock.on = True
        return _Run(row, schedule, step, check)

    def found_times(self) -> Found:
        """Seconds of each kind of action on each stage, with free transfers."""
        whole, split = (run.typical() for run in self._runs)
        late, early = split["W"], split["I"]
        return {
            "forward": whole["F"],
            "backward": whole["B"],
            "split_forward": split["F"],
            "split_backward": [i + w for i, w in zip(early, late, strict=True)],
            "split_weight": late,
        }

    def found(self, name: str) -> Found:
        rows = {}
        for run in self._runs:
            simulated = self._simulated(run)
            rows[run.row.name] = {
                "seconds": run.seconds,
                "peak": run.peaks,
                "transfer": run.transfer(),
                "sent": run.sent,
                "simulated": None if simulated is None else simulated.makespan,
                "simulated_peak": None if simulated is None else simulated.peak_activations,
                "times": run.typical(),
                "chosen": run.chosen(),
            }
        return {
            "model": name, "compute": self._job["compute"], "mesh": self._shape,
            "ranks_per_stage": self._per_stage, "nbytes": self.task.nbytes, "mbit": self._job["mbit"],
            "microbatches": self._microbatches, "times": self._job["times"][name], "rows": rows,
            "transfer_once": self.task.nbytes / self._topology.hosts[0].nics[0].out_rate,
        }  # fmt: skip

    def _simulated(self, run: _Run) -> Any:
        """With the times of compute that were found with free transfers, and those of the planner for the
        transfers; None where nothing ran with free transfers, and for torch's schedule."""
        split = run.row.options.get("delay_weight_grad", False)
        name = FREE_DELAYED if split else FREE
        base = next((each for each in self._runs if each.row.name == name), None)
        if base is None or run.row.peer:
            return None
        typical = base.typical()
        forward, weight = typical["F"], typical["W"]
        backward = typical["B"] if not split else [i + w for i, w in zip(typical["I"], weight, strict=True)]
        return simulate(
            run.row.schedule, _STAGES, self._microbatches, forward=forward, backward=backward,
            weight=weight if split else None, transfer=run.transfer(), **run.row.simulated,
        )  # fmt: skip


class _Run:
    """A row and what was measured of it. Collective."""

    def __init__(self, row: Row, schedule: Any, step: Callable[[], None], check: Callable[[], None]) -> None:
        self.row = row
        self._schedule, self._step, self._check = schedule, step, check
        self.seconds: list[float] = []
        self.peaks: list[int] = []  # micro-batches held at once, by stage
        self._spans: dict[str, list[list[float]]] = {kind: [[], []] for kind in "FBIW"}
        self.sent = 0  # bytes over the links in the last step, both directions, frames with their headers

    def timed(self) -> None:
        dist.barrier()
        before = _left_host()
        begin = time.monotonic()
        self._step()
        end = time.monotonic()
        self._check()
        events = [] if self.row.peer else _events(self._schedule)
        peak = _peak(events)
        # The others may be in this step's last transfers, or in the gathering below: what is counted is
        # the whole step and some hundred bytes.
        sent = _left_host() - before
        mine = {"begin": begin, "end": end, "peak": peak, "sent": sent, "spans": _seconds(events)}
        every = gathered(mine)
        # All ranks of one machine share the clock.
        self.seconds.append(max(each["end"] for each in every) - min(each["begin"] for each in every))
        self.peaks = [max(each["peak"] for each in half) for half in _halves(every)]
        self.sent = sum(half[0]["sent"] for half in _halves(every))
        for stage, half in enumerate(_halves(every)):
            for each in half:
                for kind, spans in each["spans"].items():
                    self._spans[kind][stage] += spans

    def typical(self) -> dict[str, list[float]]:
        """Median seconds of an action, by its kind and stage; 0 where there is none."""
        return {
            kind: [statistics.median(spans) if spans else 0.0 for spans in stages]
            for kind, stages in self._spans.items()
        }

    def chosen(self) -> str | None:
        """The schedule that was chosen, where it was not given."""
        return self._schedule.choice.chosen.name if self.row.name == AUTO else None

    def transfer(self) -> float:
        """Seconds of a micro-batch between the stages, by the planner; torch's is not ours to plan."""
        return 0.0 if self.row.peer else max(self._schedule.transfer_times().values())


def _halves(every: list[Any]) -> list[list[Any]]:
    half = len(every) // _STAGES
    return [every[stage * half : (stage + 1) * half] for stage in range(_STAGES)]


def _left_host() -> int:
    """Bytes that have left this host so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[:1] == ["eth0:"])


def _events(schedule: Any) -> list[Span]:
    path = Path(f"/tmp/meshcast-e2e-{dist.get_rank()}-{time.monotonic_ns()}.json")
    try:
        schedule.trace(path)
        return read_trace(path)
    finally:
        path.unlink(missing_ok=True)


def _seconds(spans: list[Span]) -> dict[str, list[float]]:
    return {kind: [e.end - e.start for e in spans if e.action.kind is ActionKind(kind)] for kind in "FBIW"}


def _peak(spans: list[Span]) -> int:
    """Returns the most micro-batches whose activations were held at once."""
    return int(most_held(each.action for each in sorted(spans, key=lambda each: each.start)))
