"""Traces: what a step really did, as a Chrome trace, and a simulated timeline as text."""

from __future__ import annotations

import json
import os
import resource
import time
from dataclasses import dataclass, field

from meshcast.base.observe import job_ids
from meshcast.pipelining.action import ActionKind
from meshcast.pipelining.measured import Event
from meshcast.pipelining.simulate import SimulationReport

__all__ = ["Trace", "format_timeline"]


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
