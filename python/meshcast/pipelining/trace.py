"""Traces: what a step really did, as a Chrome trace, and what they tell: whose value a rank waited for, how
long the stages computed. Timelines, measured or simulated, as text and as pictures.

On a GPU the host completes a step before the GPU does, so its own clock tells nothing of compute: marks
in the compute stream are read when somebody asks for the trace.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from ..base import checks
from ..base.checks import integer
from ..base.observe import job_ids
from ..errors import LayoutError, MeshcastError
from .action import Action, ActionKind, ScheduleError
from .simulate import SimulationReport

__all__ = [
    "Bar",
    "Event",
    "GpuClock",
    "Mark",
    "Panel",
    "RecentTimes",
    "StageTimes",
    "Trace",
    "bar_of",
    "draw_panels",
    "exposed_seconds",
    "format_timeline",
    "jobs_of_trace",
    "panel_of",
    "read_trace",
]


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a rank, in seconds of its host's clock. name: an action, or "wait " and a RECV."""

    rank: int
    name: str
    begin: float
    end: float


def read_trace(path: Path) -> list[Event]:
    """The events of a file that `Trace.write` wrote. Raises LayoutError for other files."""
    events = []
    try:
        content = json.loads(path.read_text())
        start = float(content.get("otherData", {}).get("begin", 0.0))
        for each in content["traceEvents"]:
            if each.get("ph") == "X":
                begin = start + float(each["ts"]) / 1e6
                end = begin + float(each["dur"]) / 1e6
                events.append(Event(int(each["pid"]), _checked(str(each["name"])), begin, end))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LayoutError(
            f"not a trace of a pipeline step ({type(error).__name__}: {checks.shown(str(error))})"
        ) from None
    return events


def jobs_of_trace(path: Path) -> list[str]:
    """Ids of the job that a trace is of, see `meshcast.base.observe.job_ids`; none in older ones. Of a file
    that read_trace has read."""
    found = json.loads(path.read_text()).get("otherData", {}).get("jobs", [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise LayoutError(f"otherData.jobs is {checks.shown(found)}: not what a trace holds there")
    return found


def _checked(name: str) -> str:
    """The name in the text form of its action."""
    waits = "wait " if name.startswith("wait ") else ""
    try:
        action = Action.parse(name.removeprefix("wait "))
    except ScheduleError:
        raise LayoutError(f"event {checks.shown(name)} is no action of a pipeline") from None
    if action.kind.is_recv != bool(waits):
        raise LayoutError(f"event {checks.shown(name)} is not one that a trace holds")
    return f"{waits}{action}"


def exposed_seconds(events: Iterable[Event]) -> dict[int, float]:
    """For each rank, how long it did nothing but wait for values that were on their way: its waits, each from
    the moment that the value was sent. What it waits before that is the bubble of the schedule.

    Counts only waits whose sender's trace is among the events; clocks of several hosts must agree.
    """
    events = list(events)
    sent: dict[str, float] = {}
    for event in events:
        if "SEND" in event.name:
            # Of a value cut over several ranks the last part counts.
            sent[event.name] = max(sent.get(event.name, event.begin), event.begin)
    exposed: dict[int, float] = {}
    for event in events:
        if event.name.startswith("wait "):
            name = str(Action.parse(event.name.removeprefix("wait ")).matching())
            if name in sent:
                waited = max(0.0, event.end - max(event.begin, sent[name]))
                exposed[event.rank] = exposed.get(event.rank, 0.0) + waited
    return exposed


@dataclass(slots=True)
class Trace:
    """Events of one step on one rank. Times are those of ``time.perf_counter``, in seconds.

    began: the moment that the trace was made, by that clock and by the clock of the host (Unix time), which
    lets the traces of several ranks be put together.
    """

    began: tuple[float, float] = field(default_factory=lambda: (time.perf_counter(), time.time()))
    events: list[tuple[str, str, float, float]] = field(default_factory=list)  # name, category, begin, end
    seconds: float = 0.0  # of the whole step
    bytes_sent: int = 0  # to other ranks in this step
    peak: int = 0  # most micro-batches whose activations this rank held at once
    _alive: int = 0

    def add(self, name: str, category: str, begin: float, end: float) -> None:
        self.events.append((name, category, begin, end))

    def count(self, kind: ActionKind) -> None:
        """Counts the micro-batches whose activations are held, after an action of this kind."""
        if kind is ActionKind.F:
            self._alive += 1
            self.peak = max(self.peak, self._alive)
        elif kind is not ActionKind.I:
            self._alive -= 1

    def finish(self, bytes_sent: int) -> None:
        """The step is over."""
        self.seconds = time.perf_counter() - self.began[0]
        self.bytes_sent = bytes_sent

    def on_the_clock(self, rank: int) -> list[Event]:
        """The events by the clock of the host."""
        offset = self.began[1] - self.began[0]
        return [Event(rank, name, begin + offset, end + offset) for name, _, begin, end in self.events]

    def summary(self, rank: int, exposed: float | None = None) -> str:
        """One line: how long the step took here, and what for. exposed: seconds that it waited for values on
        their way, where that is known."""
        spent = {"compute": 0.0, "wait": 0.0}
        for _, category, begin, end in self.events:
            if category in spent:
                spent[category] += end - begin
        whole = self.seconds or 1.0
        on_their_way = "" if exposed is None else f" ({exposed / whole:.1%} for values on their way)"
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return (
            f"rank {rank}: step of {self.seconds * 1e3:.4g} ms, computes {spent['compute'] / whole:.1%}, "
            f"bubble {1 - spent['compute'] / whole:.1%}, waits for values {spent['wait'] / whole:.1%}"
            f"{on_their_way}, held {self.peak} micro-batches at most, process memory up to "
            f"{memory / 1e6:.4g} MB, sent {self.bytes_sent / 1e6:.4g} MB"
        )

    def write(self, path: str | os.PathLike[str], rank: int) -> None:
        """Writes the Chrome trace event format (chrome://tracing, Perfetto): compute, waits and transfers in
        rows of their own."""
        start, host_time = self.began
        rows = sorted({category for _, category, _, _ in self.events})
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": category}}
            for row, category in enumerate(rows)
        ]
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for name, category, begin, end in self.events:
            events.append(
                {
                    "ph": "X",
                    "name": name,
                    "cat": category,
                    "pid": rank,
                    "tid": rows.index(category),
                    "ts": (begin - start) * 1e6,
                    "dur": (end - begin) * 1e6,
                }
            )
        with open(path, "w") as file:
            other = {"begin": host_time, "jobs": job_ids()}
            json.dump({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, file)


def format_timeline(report: SimulationReport, unit: float = 1.0) -> str:
    """A simulated timeline as text: one line per rank, idle time as dots. A ``unit`` of time is as wide as
    the name of an action, which holds its stage only where a rank has several.

    Spans must begin and end on multiples of ``unit``; the picture is exact then.
    """
    ranks = sorted({span.rank for span in report.timeline})
    several = len({span.action.stage for span in report.timeline}) > len(ranks)
    width = 4 if several else 3
    lines = []
    for rank in ranks:
        line = ""
        for span in (span for span in report.timeline if span.rank == rank):
            line += ".".ljust(width) * (round(span.start / unit) - len(line) // width)
            text = str(span.action) if several else f"{span.action.kind.value}{span.action.microbatch}"
            line += text.ljust(width * round((span.end - span.start) / unit) - 1, "-") + " "
        lines.append(f"rank {rank}  {line}".rstrip())
    return "\n".join(lines)


_MOST = 10_000  # steps


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds that a stage computes for one micro-batch on this rank; waits for values of other ranks are not
    in them.

    Attributes:
        forward, backward: of F and of the whole backward.
        weight: the part of the backward that computes gradients of weights, where the schedule splits it;
            else None.
    """

    forward: float
    backward: float
    weight: float | None


class RecentTimes:
    """Compute times of the stages in the last training steps of a schedule."""

    def __init__(self, last: int, skip: int) -> None:
        """last: how many steps are kept; skip: how many are not, before that. Raises LayoutError for what is
        no number of steps."""
        self.last = integer("measure: last", last, 0, _MOST)
        self._skip = skip
        self._steps: deque[dict[int, dict[ActionKind, float]]] = deque(maxlen=self.last)

    def add(self, trace: Trace) -> None:
        """One more step."""
        if self._skip:
            self._skip -= 1
            return
        spent: dict[int, dict[ActionKind, list[float]]] = {}
        for name, category, begin, end in trace.events:
            if category == "compute":
                action = Action.parse(name)
                spent.setdefault(action.stage, {}).setdefault(action.kind, []).append(end - begin)
        # The mean over the micro-batches: their sum is what a step takes.
        self._steps.append(
            {stage: {kind: sum(each) / len(each) for kind, each in by.items()} for stage, by in spent.items()}
        )

    def times(self) -> dict[int, StageTimes]:
        """The median of the steps, by stage; empty before there is one."""
        stages = sorted({stage for step in self._steps for stage in step})
        return {stage: self._of(stage) for stage in stages}

    def _of(self, stage: int) -> StageTimes:
        steps = [step[stage] for step in self._steps if stage in step]
        split = any(ActionKind.W in step for step in steps)
        kinds = (ActionKind.B, ActionKind.I, ActionKind.W)
        return StageTimes(
            _median([step.get(ActionKind.F, 0.0) for step in steps]),
            _median([sum(step.get(kind, 0.0) for kind in kinds) for step in steps]),
            _median([step.get(ActionKind.W, 0.0) for step in steps]) if split else None,
        )


def _median(seconds: Sequence[float]) -> float:
    return float(median(seconds))


class Mark(Protocol):
    """An event in the compute stream; torch.cuda.Event with timing is one."""

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this mark to another."""


@dataclass(slots=True)
class GpuClock:
    """The spans of one step on GPU `device`, until they are read. Enqueues events only: neither the host nor
    the compute stream waits for any of it."""

    device: torch.device
    _spans: list[tuple[str, str, Mark, Mark]] = field(default_factory=list)
    _transfers: list[tuple[str, float, Any]] = field(default_factory=list)  # name, host time, handle

    def begin_step(self) -> None:
        self._spans.clear()
        self._transfers.clear()

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def add(self, name: str, category: str, begin: Mark, end: Mark) -> None:
        self._spans.append((name, category, begin, end))

    def add_transfer(self, name: str, begin: float, handle: Any) -> None:
        """A send that was made at `begin`, by the clock of the host."""
        self._transfers.append((name, begin, handle))

    def read_into(self, trace: Trace) -> None:
        """Moves what there is into the trace, by the clock of the host. Blocks until the GPU has completed
        the step. Transfers that failed, or whose end is not known yet, are left out."""
        if self._spans:
            now = self.mark()
            now.synchronize()
            at = time.perf_counter()
            last = 0.0
            for name, category, begin, end in self._spans:
                began, ended = (at - mark.elapsed_time(now) * 1e-3 for mark in (begin, end))
                trace.add(name, category, began, ended)
                last = max(last, ended)
            trace.seconds = max(trace.seconds, last - trace.began[0])
        for name, made, handle in self._transfers:
            if handle.is_completed():
                trace.add(name, "transfer", made, made + handle.figures()["seconds"])
        self.begin_step()


_SUFFIXES = (".png", ".svg", ".pdf")
# Hues that stay apart in print and under the common colour deficiencies. F, B, I and W by kind; of the second
# and further stages of a rank a lighter tone.
_COLOURS = {
    "F": "#4477aa",
    "B": "#ee8866",
    "I": "#ddaa33",
    "W": "#44aa99",
    "wait": "#dddddd",
    "SEND_F": "#88ccee",
    "SEND_B": "#ffbb99",
}
_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "wait": "waiting for a value",
    "SEND_F": "sends activation",
    "SEND_B": "sends gradient",
}
_LABELLED = 700  # bars of a panel that carry their micro-batch; more would not be legible


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: what a rank does or sends in a span of time. kind: a key of the colours; tone: 0, or more for
    further stages of a rank."""

    rank: int
    kind: str
    start: float
    end: float
    text: str = ""
    tone: int = 0


@dataclass(frozen=True, slots=True)
class Panel:
    """One timeline."""

    title: str
    bars: Sequence[Bar]
    unit: str = ""


def panel_of(title: str, report: SimulationReport) -> Panel:
    """The panel of a simulated schedule."""
    stages: dict[int, list[int]] = {}
    for span in report.timeline:
        row = stages.setdefault(span.rank, [])
        if span.action.stage not in row:
            row.append(span.action.stage)
    bars = [
        Bar(
            span.rank,
            span.action.kind.value,
            span.start,
            span.end,
            str(span.action.microbatch),
            sorted(stages[span.rank]).index(span.action.stage),
        )
        for span in report.timeline
    ]
    bars += [Bar(span.rank, span.action.kind.value, span.start, span.end) for span in report.transfers]
    return Panel(title, bars)


def bar_of(rank: int, name: str, start: float, end: float) -> Bar:
    """The bar of an event of a trace, see `measured.Event`."""
    if name.startswith("wait "):
        return Bar(rank, "wait", start, end)
    action = Action.parse(name)
    text = str(action.microbatch) if action.kind.is_compute else ""
    return Bar(rank, action.kind.value, start, end, text)


def draw_panels(panels: Sequence[Panel], path: str | Path) -> None:
    """Writes the panels above each other, on one scale of time; the suffix of `path` tells the format.

    Raises LayoutError for other suffixes than .png, .svg and .pdf, MeshcastError without matplotlib, OSError
    where the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise LayoutError(f"path {str(path)!r}: allowed suffixes are {', '.join(_SUFFIXES)}")
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise MeshcastError("drawing needs matplotlib: pip install matplotlib") from None
    rows = [max((bar.rank for bar in panel.bars), default=0) + 1 for panel in panels]
    height = sum(0.36 * count + 0.62 for count in rows) + 0.7
    figure = Figure(figsize=(13, height), layout="constrained")
    grid = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": [n + 1 for n in rows]}
    )
    used: dict[str, None] = {}
    end = max((bar.end for panel in panels for bar in panel.bars), default=1.0)
    for axes, panel, count in zip(grid[:, 0], panels, rows, strict=True):
        _draw_panel(axes, panel, count, end)
        used |= dict.fromkeys(bar.kind for bar in panel.bars)
    grid[-1, 0].set_xlabel(f"time{f' [{panels[-1].unit}]' if panels and panels[-1].unit else ''}")
    handles = [Patch(facecolor=_COLOURS[kind], label=_NAMES[kind]) for kind in _COLOURS if kind in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) or 1, frameon=False)
    figure.savefig(path, dpi=140)


def _draw_panel(axes: Any, panel: Panel, rows: int, end: float) -> None:
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.set_ylim(rows - 0.4, -0.55)
    axes.set_xlim(0, end * 1.005)
    axes.set_yticks(range(rows), [f"rank {rank}" for rank in range(rows)], fontsize=8)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for kind, tone, bars in _grouped(panel.bars):
        strip = kind.startswith("SEND")
        axes.bar(
            [bar.start for bar in bars],
            [0.16 if strip else 0.62] * len(bars),
            width=[bar.end - bar.start for bar in bars],
            bottom=[bar.rank + (0.33 if strip else -0.31) for bar in bars],
            align="edge",
            color=_lighter(_COLOURS[kind], tone),
            edgecolor="white",
            linewidth=0.4,
        )
    # Only text that fits its bar: about 1/160 of the width for each character.
    if len(panel.bars) <= _LABELLED:
        for bar in panel.bars:
            if bar.text and bar.end - bar.start > len(bar.text) * end / 160:
                axes.text(
                    (bar.start + bar.end) / 2, bar.rank, bar.text, ha="center", va="center", fontsize=6.5
                )


def _grouped(bars: Iterable[Bar]) -> list[tuple[str, int, list[Bar]]]:
    """One call for all bars of a colour: thousands of calls would take seconds."""
    groups: dict[tuple[str, int], list[Bar]] = {}
    for bar in bars:
        groups.setdefault((bar.kind, bar.tone), []).append(bar)
    return [(kind, tone, members) for (kind, tone), members in groups.items()]


def _lighter(colour: str, tone: int) -> tuple[float, float, float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    mix = min(0.35 * tone, 0.7)
    red, green, blue = (part + (1 - part) * mix for part in parts)
    return red, green, blue
