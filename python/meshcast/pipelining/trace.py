"""Traces: what a step really did, as a Chrome trace, and what follows: whose value a rank waited for,
how long the stages computed. Timelines, measured or simulated, as text and as pictures.

On a GPU the host completes a step before the GPU does, so its own clock shows nothing of compute: marks
in the compute stream are read when the trace is requested.
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
from .simulate import SimulationReport, Span

__all__ = [
    "GpuClock",
    "Mark",
    "RecentTimes",
    "StageTimes",
    "Timeline",
    "Trace",
    "draw_timelines",
    "exposed_seconds",
    "format_timeline",
    "jobs_of_trace",
    "read_trace",
]

_WAIT = "wait "  # before the RECV, in the name of an event


def read_trace(path: Path) -> list[Span]:
    """Returns the spans of a file that `Trace.write` wrote, by its host's clock. Raises LayoutError for other
    files."""
    spans = []
    try:
        content = json.loads(path.read_text())
        start = float(content.get("otherData", {}).get("begin", 0.0))
        for each in content["traceEvents"]:
            if each.get("ph") == "X":
                begin = start + float(each["ts"]) / 1e6
                end = begin + float(each["dur"]) / 1e6
                spans.append(Span(int(each["pid"]), _action(str(each["name"])), begin, end))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LayoutError(
            f"not a trace of a pipeline step ({type(error).__name__}: {checks.shown(str(error))})"
        ) from None
    return spans


def jobs_of_trace(path: Path) -> list[str]:
    """Returns the ids of the job that a trace is of, see `meshcast.base.observe.job_ids`; none in older ones.
    read_trace has read the file before."""
    found = json.loads(path.read_text()).get("otherData", {}).get("jobs", [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise LayoutError(f"otherData.jobs is {checks.shown(found)}: not what a trace holds there")
    return found


def _action(name: str) -> Action:
    """Returns the action that an event of a trace is named by."""
    try:
        action = Action.parse(name.removeprefix(_WAIT))
    except ScheduleError:
        raise LayoutError(f"event {checks.shown(name)} is no action of a pipeline") from None
    if action.kind.is_recv != name.startswith(_WAIT):
        raise LayoutError(f"event {checks.shown(name)} is not one that a trace holds")
    return action


def exposed_seconds(spans: Iterable[Span]) -> dict[int, float]:
    """Returns for each rank how long it did nothing but wait for values that were in flight: its waits, each
    from the moment that the value was sent. Waiting before that is the bubble of the schedule.

    Counts only waits whose sender's trace is among the spans; clocks of several hosts must agree.
    """
    spans = list(spans)
    sent: dict[Action, float] = {}
    for span in spans:
        if span.action.kind.is_send:
            # The last part of a value cut over several ranks counts.
            sent[span.action] = max(sent.get(span.action, span.start), span.start)
    exposed: dict[int, float] = {}
    for span in spans:
        if span.action.kind.is_recv and (send := span.action.matching()) in sent:
            waited = max(0.0, span.end - max(span.start, sent[send]))
            exposed[span.rank] = exposed.get(span.rank, 0.0) + waited
    return exposed


@dataclass(slots=True)
class Trace:
    """Actions of one step on one rank, a RECV as the wait for its value. Times are those of
    ``time.perf_counter``, in seconds.

    began: the moment that the trace was made, by that clock and by the clock of the host (Unix time), which
    lets the traces of several ranks be put together.
    """

    began: tuple[float, float] = field(default_factory=lambda: (time.perf_counter(), time.time()))
    events: list[tuple[Action, float, float]] = field(default_factory=list)  # action, begin, end
    seconds: float = 0.0  # of the whole step
    bytes_sent: int = 0  # to other ranks in this step
    peak: int = 0  # most micro-batches whose activations this rank held at once
    _alive: int = 0

    def add(self, action: Action, begin: float, end: float) -> None:
        self.events.append((action, begin, end))

    def count(self, kind: ActionKind) -> None:
        """Counts the micro-batches whose activations are held, after an action of this kind."""
        if kind is ActionKind.F:
            self._alive += 1
            self.peak = max(self.peak, self._alive)
        elif kind is not ActionKind.I:
            self._alive -= 1

    def finish(self, bytes_sent: int) -> None:
        """Ends the step."""
        self.seconds = time.perf_counter() - self.began[0]
        self.bytes_sent = bytes_sent

    def on_the_clock(self, rank: int) -> list[Span]:
        """Returns the spans by the clock of the host."""
        offset = self.began[1] - self.began[0]
        return [Span(rank, action, begin + offset, end + offset) for action, begin, end in self.events]

    def summary(self, rank: int, exposed: float | None = None) -> str:
        """Returns one line: how long the step took here, and what for. exposed: seconds that it waited for
        values in flight, where that is known."""
        spent = {"compute": 0.0, "wait": 0.0, "transfer": 0.0}
        for action, begin, end in self.events:
            spent[_category(action)] += end - begin
        whole = self.seconds or 1.0
        in_flight = "" if exposed is None else f" ({exposed / whole:.1%} for values in flight)"
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return (
            f"rank {rank}: step of {self.seconds * 1e3:.4g} ms, computes {spent['compute'] / whole:.1%}, "
            f"bubble {1 - spent['compute'] / whole:.1%}, waits for values {spent['wait'] / whole:.1%}"
            f"{in_flight}, held {self.peak} micro-batches at most, process memory up to "
            f"{memory / 1e6:.4g} MB, sent {self.bytes_sent / 1e6:.4g} MB"
        )

    def write(self, path: str | os.PathLike[str], rank: int) -> None:
        """Writes the Chrome trace event format (chrome://tracing, Perfetto): compute, waits and transfers in
        rows of their own."""
        start, host_time = self.began
        rows = sorted({_category(action) for action, _, _ in self.events})
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": category}}
            for row, category in enumerate(rows)
        ]
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for action, begin, end in self.events:
            events.append(
                {
                    "ph": "X",
                    "name": f"{_WAIT if action.kind.is_recv else ''}{action}",
                    "cat": _category(action),
                    "pid": rank,
                    "tid": rows.index(_category(action)),
                    "ts": (begin - start) * 1e6,
                    "dur": (end - begin) * 1e6,
                }
            )
        with open(path, "w") as file:
            other = {"begin": host_time, "jobs": job_ids()}
            json.dump({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, file)


def _category(action: Action) -> str:
    return "compute" if action.kind.is_compute else "wait" if action.kind.is_recv else "transfer"


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
        for action, begin, end in trace.events:
            if action.kind.is_compute:
                spent.setdefault(action.stage, {}).setdefault(action.kind, []).append(end - begin)
        # The mean over the micro-batches: their sum is the time of a step.
        self._steps.append(
            {stage: {kind: sum(each) / len(each) for kind, each in by.items()} for stage, by in spent.items()}
        )

    def times(self) -> dict[int, StageTimes]:
        """The median of the steps, by stage; empty before there is one."""
        stages = sorted({stage for step in self._steps for stage in step})
        return {stage: self._of([step[stage] for step in self._steps if stage in step]) for stage in stages}

    @staticmethod
    def _of(steps: Sequence[dict[ActionKind, float]]) -> StageTimes:
        def middle(*kinds: ActionKind) -> float:
            return float(median(sum(step.get(kind, 0.0) for kind in kinds) for step in steps))

        split = any(ActionKind.W in step for step in steps)
        backward = middle(ActionKind.B, ActionKind.I, ActionKind.W)
        return StageTimes(middle(ActionKind.F), backward, middle(ActionKind.W) if split else None)


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
    _spans: list[tuple[Action, Mark, Mark]] = field(default_factory=list)
    _transfers: list[tuple[Action, float, Any]] = field(default_factory=list)  # send, host time, handle

    def begin_step(self) -> None:
        self._spans.clear()
        self._transfers.clear()

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def add(self, action: Action, begin: Mark, end: Mark) -> None:
        self._spans.append((action, begin, end))

    def add_transfer(self, send: Action, begin: float, handle: Any) -> None:
        """Adds a send that was made at `begin`, by the clock of the host."""
        self._transfers.append((send, begin, handle))

    def read_into(self, trace: Trace) -> None:
        """Moves what there is into the trace, by the clock of the host. Blocks until the GPU has completed
        the step. Transfers that failed, or whose end is not known yet, are left out."""
        if self._spans:
            now = self.mark()
            now.synchronize()
            at = time.perf_counter()
            last = 0.0
            for action, begin, end in self._spans:
                began, ended = (at - mark.elapsed_time(now) * 1e-3 for mark in (begin, end))
                trace.add(action, began, ended)
                last = max(last, ended)
            trace.seconds = max(trace.seconds, last - trace.began[0])
        for send, made, handle in self._transfers:
            if handle.is_completed():
                trace.add(send, made, made + handle.figures()["seconds"])
        self.begin_step()


_SUFFIXES = (".png", ".svg", ".pdf")
# Hues that stay apart in print and under the common colour deficiencies. F, B, I and W by kind; of the second
# and further stages of a rank a lighter tone.
_STYLES = {
    "F": ("#4477aa", "forward"),
    "B": ("#ee8866", "backward"),
    "I": ("#ddaa33", "input gradient"),
    "W": ("#44aa99", "weight gradient"),
    "wait": ("#dddddd", "waiting for a value"),
    "SEND_F": ("#88ccee", "sends activation"),
    "SEND_B": ("#ffbb99", "sends gradient"),
}
_LABELLED = 700  # spans of a timeline that carry their micro-batch; more would not be legible


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of ranks, simulated or measured, as they are drawn.

    unit: of the times. facts: rows of a table of figures.
    """

    title: str
    spans: Sequence[Span]
    unit: str = ""
    facts: Sequence[tuple[str, str]] = ()

    @staticmethod
    def simulated(title: str, report: SimulationReport, unit: str = "") -> Timeline:
        """Returns that of a simulated schedule."""
        facts = [
            ("makespan", f"{report.makespan:.6g}{f' {unit}' if unit else ''}"),
            ("bubble", f"{report.bubble_fraction:.1%}"),
            ("exposed transfers", f"{report.exposed_fraction:.1%}"),
            ("most micro-batches held by a rank", str(max(report.peak_of_ranks, default=0))),
        ]
        return Timeline(title, [*report.timeline, *report.transfers], unit, facts)

    @staticmethod
    def measured(title: str, spans: Sequence[Span]) -> Timeline:
        """Returns that of a step that was recorded, in ms from its first span on."""
        first = min((span.start for span in spans), default=0.0)
        shifted = [
            Span(each.rank, each.action, (each.start - first) * 1e3, (each.end - first) * 1e3)
            for each in spans
        ]
        end = max((span.end for span in shifted), default=0.0)
        return Timeline(title, shifted, "ms", [("took", f"{end:.4g} ms")])

    @property
    def end(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    def tones(self) -> list[int]:
        """Returns for each span which of its rank's stages computes, from 0; 0 where none does."""
        stages: dict[int, set[int]] = {}
        for span in self.spans:
            stages.setdefault(span.rank, set()).add(span.action.stage)
        ordered = {rank: sorted(each) for rank, each in stages.items()}
        return [
            ordered[span.rank].index(span.action.stage) if span.action.kind.is_compute else 0
            for span in self.spans
        ]


def draw_timelines(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Writes timelines above each other, on one scale of time; the suffix of `path` decides the format.

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
    rows = [max((span.rank for span in each.spans), default=0) + 1 for each in timelines]
    height = sum(0.36 * count + 0.62 for count in rows) + 0.7
    figure = Figure(figsize=(13, height), layout="constrained")
    grid = figure.subplots(
        len(timelines), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": [n + 1 for n in rows]}
    )
    used: set[str] = set()
    end = max((each.end for each in timelines), default=0.0) or 1.0
    for axes, timeline, count in zip(grid[:, 0], timelines, rows, strict=True):
        used |= _draw(axes, timeline, count, end)
    grid[-1, 0].set_xlabel(f"time{f' [{timelines[-1].unit}]' if timelines and timelines[-1].unit else ''}")
    handles = [Patch(facecolor=tone, label=name) for kind, (tone, name) in _STYLES.items() if kind in used]
    if any(kind in used for kind in ("F", "B", "I", "W")):
        handles.append(Patch(facecolor="none", label="number: micro-batch"))
    if any(tone for each in timelines for tone in each.tones()):
        handles.append(Patch(facecolor="none", label="paler: a later stage of the rank"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) or 1, frameon=False)
    figure.savefig(path, dpi=140)


def _draw(axes: Any, timeline: Timeline, rows: int, end: float) -> set[str]:
    """Returns the kinds of bars there are."""
    axes.set_title(timeline.title, loc="left", fontsize=10)
    axes.set_ylim(rows - 0.4, -0.55)
    axes.set_xlim(0, end * 1.005)
    axes.set_yticks(range(rows), [f"rank {rank}" for rank in range(rows)], fontsize=8)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    # One call for all bars of a colour: thousands of calls would take seconds.
    groups: dict[tuple[str, int], list[Span]] = {}
    for span, tone in zip(timeline.spans, timeline.tones(), strict=True):
        kind = "wait" if span.action.kind.is_recv else span.action.kind.value
        groups.setdefault((kind, tone), []).append(span)
    for (kind, tone), spans in groups.items():
        strip = kind.startswith("SEND")
        axes.bar(
            [span.start for span in spans],
            [0.16 if strip else 0.62] * len(spans),
            width=[span.end - span.start for span in spans],
            bottom=[span.rank + (0.33 if strip else -0.31) for span in spans],
            align="edge",
            color=_lighter(_STYLES[kind][0], tone),
            edgecolor="white",
            linewidth=0.4,
        )
    # Only text that fits its bar: about 1/160 of the width for each character.
    for span in timeline.spans if len(timeline.spans) <= _LABELLED else ():
        text = str(span.action.microbatch)
        if span.action.kind.is_compute and span.end - span.start > len(text) * end / 160:
            axes.text((span.start + span.end) / 2, span.rank, text, ha="center", va="center", fontsize=6.5)
    return {kind for kind, _ in groups}


def _lighter(colour: str, tone: int) -> tuple[float, float, float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    mix = min(0.35 * tone, 0.7)
    red, green, blue = (part + (1 - part) * mix for part in parts)
    return red, green, blue
