"""When a GPU did what a step enqueued: marks in the compute stream, read when somebody asks for the trace.

On a GPU the host is through with a step before the GPU is, so its own clock tells nothing of compute.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from meshcast.pipelining.trace import Trace

__all__ = ["GpuClock", "Mark"]


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
        """Moves what there is into the trace, by the clock of the host. Blocks until the GPU is through with
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
