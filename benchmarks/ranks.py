"""What the ranks of benchmarks have in common: how they start and report, clocks and turns.

python -m benchmarks.ranks MODULE:FUNCTION JOB REPORTS is what cluster.run_job starts on every rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import pickle
import resource
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .cluster import VARIABLE

T = TypeVar("T")
Figure = dict[str, float]  # ours, theirs: what was measured; value: what has a target
Report = Callable[[str, Any], None]  # kind and value; rank 0's counts
_LIMIT = timedelta(seconds=600)  # peers of other kinds may run while ranks wait
_CALIBRATIONS = 3  # attempts: something else may disturb one


def main() -> None:
    program, job, reports = sys.argv[1:]
    module, _, function = program.partition(":")
    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_LIMIT)
    here = dist.get_rank() == 0

    def report(kind: str, value: Any) -> None:
        if here:
            with open(reports, "a") as file:
                file.write(json.dumps({kind: value}) + "\n")

    run = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    run(pickle.loads(Path(job).read_bytes()), report)
    dist.barrier()
    dist.destroy_process_group()


def calibrated(ranks_per_host: int, mbit: list[float]) -> Any:
    """What the links carry. Measured again where the cores were the limit."""
    from meshcast.bench.measure import calibrate
    from meshcast.bench.report import overload

    for _ in range(_CALIBRATIONS):
        links = calibrate(ranks_per_host, mbit)
        if not overload(links.facts()):  # the same on all ranks: the times are summed up
            break
    return links


def gathered(mine: T) -> list[T]:
    """What each rank has, on all of them."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


class Steps:
    """How far a benchmark is: as Progress, in ranks as well. Ranks that `run_ranks` has started have no
    terminal: rank 0 writes a file, which the process that started them shows. Makes no thread, so that
    nothing disturbs what is measured."""

    def __init__(self, what: str, total: int) -> None:
        from meshcast.base.progress import Progress

        path = os.environ.get(VARIABLE)
        here = os.environ.get("RANK", "0") == "0"
        self._file = Path(path) if path and here else None
        self._shown = Progress(what, total, ticks=False, here=here and not path)
        self._what, self._total, self._count = what, total, 0

    def __enter__(self) -> Steps:
        self._shown.__enter__()
        self._tell()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._shown.__exit__(kind, error, traceback)

    def done(self) -> None:
        self._count += 1
        self._shown.done()
        self._tell()

    def _tell(self) -> None:
        if self._file is not None:
            self._file.write_text(f"{self._count} {self._total} {self._what}\n")


def steps(items: Collection[T], what: str) -> Iterator[T]:
    """The items, and how many of them are done."""
    with Steps(what, len(items)) as counted:
        for item in items:
            yield item
            counted.done()


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


_COLUMNS = {"user": 0, "nice": 1, "system": 2, "steal": 7}  # of the first line of /proc/stat, without "cpu"


@dataclass(frozen=True)
class Watch:
    """A moment: wall time, CPU time of this process, and of all processes of the machine with what the
    hypervisor took from it. Without interrupts: those are mostly of the links that are measured."""

    wall: float
    own: float
    all: float

    @staticmethod
    def now(stat: str = "/proc/stat") -> Watch:
        with open(stat) as file:
            ticks = file.readline().split()[1:]
        used = sum(int(ticks[column]) for column in _COLUMNS.values() if column < len(ticks))
        return Watch(time.monotonic(), time.process_time(), used / os.sysconf("SC_CLK_TCK"))

    def since(self, begin: Watch) -> Watch:
        """What passed between."""
        return Watch(self.wall - begin.wall, self.own - begin.own, self.all - begin.all)


def share_of_others(machine: Watch, ranks: Iterable[Watch]) -> float:
    """The part of all cores that others than the ranks had, 0 to 1. machine: what passed on one of them."""
    others = machine.all - sum(rank.own for rank in ranks)
    return max(0.0, others / (machine.wall * (os.cpu_count() or 1)))


if __name__ == "__main__":
    main()
