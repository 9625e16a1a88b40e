"""The rates that links and machine really carry, measured with torch's own point-to-point before anything
else, so that bounds are those of the links that were there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshcast.topology import Host, Nic, Topology

# Of one transfer: about as long as what is measured later, which also begins with a full bucket.
_SECONDS = 0.3
_REPEATS = 3
_LATENCY_US = 100.0
_LOCAL_GBPS = 80.0


@dataclass(frozen=True)
class Links:
    """Measured rates of the first link of each host, in Mbit/s."""

    nominal: tuple[float, ...]
    alone: tuple[float, ...]  # from each host to the next, nothing else at work
    together: tuple[float, ...]  # the same, all at once
    local_copy_gbytes: float  # of all ranks of the job at once

    @property
    def efficiency(self) -> float:
        """Measured over nominal rate. A link is as fast as the slower of its two ends."""
        hosts = len(self.nominal)
        return statistics.median(
            rate / min(self.nominal[host], self.nominal[(host + 1) % hosts])
            for host, rate in enumerate(self.alone)
        )

    def topology(self, ranks_per_host: int, nics: int) -> Topology:
        """Nominal rates times the efficiency, 100 us latency, 80 Gbit/s inside a host. What was measured
        above the nominal rate is the depth of the bucket, or no link at all: it does not last."""
        hosts = []
        for host, mbit in enumerate(self.nominal):
            rate = int(mbit * min(self.efficiency, 1.0) * 1e6 / 8)
            ranks = tuple(range(host * ranks_per_host, (host + 1) * ranks_per_host))
            hosts.append(Host(ranks, (Nic(rate, rate),) * nics, int(_LOCAL_GBPS * 1e9 / 8)))
        return Topology(hosts, _LATENCY_US)

    def facts(self) -> dict[str, float]:
        return {
            "hosts": len(self.nominal),
            "efficiency": self.efficiency,
            "slowest_link_mbit": min(self.alone),
            "slowest_all_at_once": min(b / a for a, b in zip(self.alone, self.together, strict=True)),
            "local_copy_gbytes": self.local_copy_gbytes,
        }


def calibrate(ranks_per_host: int, nominal: Sequence[float]) -> Links:
    """Called by all ranks of the job, host by host ranks_per_host each. nominal: Mbit/s of each host."""
    hosts = dist.get_world_size() // ranks_per_host
    probe = _transfer([0], hosts, ranks_per_host, 1 << 20)[0]
    nbytes = max(int(probe * 1e6 / 8 * _SECONDS), 1 << 20)
    alone = [_transfer([host], hosts, ranks_per_host, nbytes)[0] for host in range(hosts)]
    together = _transfer(list(range(hosts)), hosts, ranks_per_host, nbytes)
    return Links(tuple(nominal), tuple(alone), tuple(together), _copy_rate())


def _transfer(senders: list[int], hosts: int, ranks_per_host: int, nbytes: int) -> list[float]:
    """Mbit/s from each of the sending hosts to the next one, all at once; the most of several times, since
    whatever disturbs a transfer makes it longer, and a link taken for slower flatters all ratios."""
    rank = dist.get_rank()
    host, leader = rank // ranks_per_host, rank % ranks_per_host == 0
    target, origin = (host + 1) % hosts, (host - 1) % hosts
    data = torch.zeros(nbytes, dtype=torch.uint8)
    arriving = torch.zeros_like(data)  # touched: no page faults while the clock runs
    rates = []
    for _ in range(_REPEATS + 1):
        dist.barrier()
        start = time.perf_counter()
        receives = leader and origin in senders
        work_in = dist.irecv(arriving, origin * ranks_per_host) if receives else None
        work_out = dist.isend(data, target * ranks_per_host) if leader and host in senders else None
        taken = 0.0
        if work_in is not None:  # only a receiver knows that everything is there
            work_in.wait()
            taken = time.perf_counter() - start
        if work_out is not None:  # perhaps to a slower host, so outside of what was measured
            work_out.wait()
        times = torch.zeros(hosts, dtype=torch.float64)
        if leader:
            times[origin] = taken
        dist.all_reduce(times)
        rates.append([nbytes * 8e-6 / float(times[sender]) for sender in senders])
    return [max(of_sender[1:]) for of_sender in zip(*rates, strict=True)]


def _copy_rate() -> float:
    """Warm memory copies by every rank at once, GB/s in total."""
    source = torch.ones(16 << 20, dtype=torch.uint8)
    target = torch.ones_like(source)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(4):
        target.copy_(source)
    dist.barrier()
    return 4 * source.numel() * dist.get_world_size() / (time.perf_counter() - start) / 1e9
