"""What the emulated links and the machine below them really carry, measured with torch's own point-to-point
before anything else, so that bounds are those of the links that were there."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

_SECONDS = 0.15  # of one measured transfer
_REPEATS = 5


def calibrate(ranks_per_host: int) -> dict[str, float]:
    """Called by all ranks. Rates in Mbit/s: of one link alone (median and least over the hosts), and of the
    slowest while every host sends to the next at once; the local copy rate in GB/s of all ranks together."""
    hosts = dist.get_world_size() // ranks_per_host
    nbytes = _sized(ranks_per_host)
    alone = []
    for host in range(hosts):
        alone.append(_transfer([host], hosts, ranks_per_host, nbytes)[0])
    together = _transfer(list(range(hosts)), hosts, ranks_per_host, nbytes)
    return {
        "hosts": hosts,
        "link_mbit": statistics.median(alone),
        "slowest_link_mbit": min(alone),
        "all_at_once_mbit": min(together),
        "local_copy_gbytes": _copy_rate(),
    }


def _sized(ranks_per_host: int) -> int:
    """Bytes that take about _SECONDS."""
    nbytes = 1 << 20
    rate = _transfer([0], dist.get_world_size() // ranks_per_host, ranks_per_host, nbytes)[0]
    return max(int(rate * 1e6 / 8 * _SECONDS), nbytes)


def _transfer(senders: list[int], hosts: int, ranks_per_host: int, nbytes: int) -> list[float]:
    """Mbit/s from each of the sending hosts to the next one, all at once; medians."""
    rank = dist.get_rank()
    host, leader = rank // ranks_per_host, rank % ranks_per_host == 0
    target, origin = (host + 1) % hosts, (host - 1) % hosts
    data = torch.zeros(nbytes, dtype=torch.uint8)
    rates = []
    for _ in range(_REPEATS + 1):
        dist.barrier()
        start = time.perf_counter()
        works = []
        if leader and origin in senders:
            works.append(dist.irecv(data.clone(), origin * ranks_per_host))
        if leader and host in senders:
            works.append(dist.isend(data, target * ranks_per_host))
        for work in works:
            work.wait()
        # Only a receiver knows that everything is there.
        taken = time.perf_counter() - start if leader and origin in senders else 0.0
        times = torch.zeros(hosts, dtype=torch.float64)
        if leader:
            times[origin] = taken
        dist.all_reduce(times)
        rates.append([nbytes * 8e-6 / float(times[sender]) for sender in senders])
    return [statistics.median(of_sender[1:]) for of_sender in zip(*rates, strict=True)]


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
