"""How long a transfer takes here: measured with plain point-to-point over gloo, on idle links."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["LinkFit", "measure_links"]

_REPEATS = 7
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
            times[nbytes] += _timed(rank, sender, sender + 1, nbytes)
            dist.barrier()
    gathered: list[dict[int, list[float]]] = [{} for _ in range(world)]
    dist.all_gather_object(gathered, times)
    short, long = (
        statistics.median(seconds for found in gathered for seconds in found[nbytes])
        for nbytes in (small, large)
    )
    rate = (large - small) / (long - short)
    return LinkFit(short - small / rate, rate)


def _timed(rank: int, sender: int, receiver: int, nbytes: int) -> list[float]:
    """Seconds from send to arrival, on the receiver; all ranks of one machine share the clock."""
    if rank not in (sender, receiver):
        return []
    payload = torch.zeros(nbytes, dtype=torch.uint8)
    began = torch.zeros(1, dtype=torch.float64)
    seconds = []
    for _ in range(_REPEATS + 1):
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
