"""Whether calls waited for a kernel that runs next to them, judged by plain copies of the same run.

Processes that share a GPU take turns on it, so a bound in seconds would measure the turns. DEVICE=cpu counts
as a GPU on which no kernel runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

# A busy kernel lasts so many times as long as the calls alone, and at most so many seconds.
TIMES, LONGEST_S, SHORTEST_S = 20, 15.0, 1.0
# Calls that waited for it take so many times as long, compared with copies, as calls alone.
RATIO = 8
_CALIBRATED = 50_000_000  # cycles


@dataclass
class Pace:
    """Seconds of the calls and of as many plain copies, alone and next to the kernel of rank 0. busy: that
    had not ended when the calls had; None on the other ranks."""

    calls: float
    copies: float
    busy_calls: float = 0.0
    busy_copies: float = 0.0
    busy: bool | None = None

    def value(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def ratio(self) -> float:
        return (self.busy_calls / self.busy_copies) / (self.calls / self.copies)


def waited(paces: Sequence[Pace]) -> str:
    """Returns "" where no call waited, "a fault" where one did, and "turns" where the processes took turns on
    the GPU, so that copies were delayed as much as calls."""
    if any(pace.busy for pace in paces):
        return ""
    return "a fault" if max(pace.ratio for pace in paces) > RATIO else "turns"


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def seconds_of_copies(count: int, elements: int, device: str) -> float:
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        target.copy_(source)
        synchronize()
    return time.perf_counter() - begin


def keep_busy(seconds: float) -> torch.cuda.Event:
    """Has a kernel run on a stream of its own for about so long."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(_CALIBRATED)
    end.record()
    end.synchronize()
    cycles = _CALIBRATED * seconds * 1e3 / begin.elapsed_time(end)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(int(cycles))
        return torch.cuda.current_stream().record_event()
