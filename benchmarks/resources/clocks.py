"""How a figure is taken on all ranks at once, beside the one that it is compared with."""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Figure", "call_seconds", "compared", "cpu_seconds", "largest", "on_core", "peak_above", "total"]

Figure = dict[str, float]  # ours, theirs: what was measured; value: what has a target


def cpu_seconds() -> float:
    """Of all threads of this process, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def total(value: float) -> float:
    return _over_ranks(value, dist.ReduceOp.SUM)


def largest(value: float) -> float:
    return _over_ranks(value, dist.ReduceOp.MAX)


def _over_ranks(value: float, operation: Any) -> float:
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, operation)
    return float(found)


def call_seconds(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    dist.barrier()
    begin = clock()
    call()
    return clock() - begin


def compared(
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    repeats: int,
    clock: Callable[[], float],
    join: Callable[[float], float],
) -> Figure:
    """Medians over rounds in which both take their turn, after one that does not count. join: what all ranks
    make of the time of each."""
    taken: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for call, found in zip((ours, theirs), taken, strict=True):
            value = join(call_seconds(call, clock))
            if turn > 0:
                found.append(value)
    mine, other = (statistics.median(found) for found in taken)
    return {"ours": mine, "theirs": other, "value": mine / other}


@contextlib.contextmanager
def on_core(number: int) -> Iterator[None]:
    """All threads of this process, and those that they start, on one core; numbers go around. Where ranks
    share memory, the cores that the scheduler picks for them decide what a copy costs."""
    allowed = sorted(os.sched_getaffinity(0))
    _pin({allowed[number % len(allowed)]})
    try:
        yield
    finally:
        _pin(set(allowed))


def _pin(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def peak_above(call: Callable[[], Any]) -> int:
    """Bytes by which the resident memory of this process exceeded, at most, what it was before the call."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = _resident("VmRSS")
    call()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
