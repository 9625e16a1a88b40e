"""Whether something else than the schedule made a step late: others that compute on these cores, or a
machine that stood still. Compute that is timed shows it: a part that should end at a set time ends later."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["LATE", "Watch", "share_of_others"]

LATE = 0.03  # of a forward: a step in which timed compute ended later than this is measured again
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
