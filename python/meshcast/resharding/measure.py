"""Topology of a running job by the rates that transfers between its hosts reach."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..base import checks
from ..base.settings import host_identity
from ..layout import Layout
from ..topology import Host, Nic, Topology, gather_facts, ranks_by_host
from .reshard import reshard_local

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["measure_topology"]

_PROBE_BYTES = 1 << 20  # first transfer, which connects and gives a first idea of the rate
_MOST_BYTES = 1 << 30  # of one measured transfer, over all ranks
_REPEATS = 3
_PINGS = 20
_TAG = 0x6D63


def measure_topology(group: dist.ProcessGroup | None = None, *, seconds: float = 0.2) -> Topology:
    """The hosts of a group's ranks with the rates that transfers between them reach.

    A collective of all ranks of `group` (None: the default group), to be called while the network is
    otherwise idle. Host after host sends to all others and receives from all others, all its ranks at once,
    so that a rate is that of the whole host; then all hosts move data between two of their own ranks. Each
    figure is the median of three transfers of about `seconds` (at most 1 GiB each). All ranks get an equal
    result.

    The NICs of a host are measured together and reported as one. Between two hosts the slower end is what is
    seen of both. A host with a single rank gets its network rate as its internal rate, which nothing uses.

    Args:
        group: of all ranks that are measured; None for the default group.
        seconds: about how long a transfer takes that is measured.

    Raises:
        LayoutError: `seconds` is not positive.
        MeshcastError: no process group, or the errors of meshcast.reshard_local.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        topology = meshcast.measure_topology(seconds=0.01)
        source, target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        x = distribute_tensor(torch.ones(4, 2), source, [Shard(0)])
        y = meshcast.reshard(x, target, [Shard(1)], topology=topology)
    """
    checks.positive("seconds", seconds)
    facts = gather_facts((host_identity(),), group)
    hosts = ranks_by_host({rank: identity for rank, (identity,) in facts.items()})
    everybody = tuple(sorted(rank for ranks in hosts for rank in ranks))

    sending, receiving = [], []
    for ranks in hosts:
        others = tuple(rank for rank in everybody if rank not in ranks)
        if others:
            sending.append(_rate_of([(ranks, others)], group, seconds)[0])
            receiving.append(_rate_of([(others, ranks)], group, seconds)[0])
    inside = [(ranks[:1], ranks[1:2]) for ranks in hosts if len(ranks) > 1]
    local = dict(zip((source for source, _ in inside), _rate_of(inside, group, seconds), strict=True))

    measured = []
    for index, ranks in enumerate(hosts):
        own = local.get(ranks[:1])
        # A single host has no network to measure, a single rank no neighbour.
        out_rate = sending[index] if sending else own or 1
        in_rate = receiving[index] if receiving else own or 1
        measured.append(Host(ranks, (Nic(out_rate, in_rate),), own or min(out_rate, in_rate)))
    return Topology(measured, 1e6 * _latency([ranks[0] for ranks in hosts], everybody, group))


def _rate_of(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], group: dist.ProcessGroup | None, seconds: float
) -> list[int]:
    """Bytes/s of each pair (senders, receivers), all pairs at once. Called by every rank of the group."""
    if not pairs:
        return []
    bytes_of = [_PROBE_BYTES] * len(pairs)
    taken: list[list[float]] = [[] for _ in pairs]
    for repeat in range(-2, _REPEATS):
        dist.barrier(group)
        begin = time.perf_counter()
        for pair, nbytes in zip(pairs, bytes_of, strict=True):
            _move(pair, nbytes, group)
        ended = gather_facts((time.perf_counter() - begin,), group)
        # A pair is complete when its last receiver is.
        last = [max(ended[rank][0] for rank in receivers) for _, receivers in pairs]
        if repeat >= 0:
            for times, now in zip(taken, last, strict=True):
                times.append(now)
        elif repeat == -1:  # the first transfer connected, this one sets the size of the measured ones
            rates = [nbytes / now for nbytes, now in zip(bytes_of, last, strict=True)]
            bytes_of = [int(min(max(rate * seconds, _PROBE_BYTES), _MOST_BYTES)) for rate in rates]
    return [max(int(n / statistics.median(times)), 1) for n, times in zip(bytes_of, taken, strict=True)]


def _move(pair: tuple[Sequence[int], Sequence[int]], nbytes: int, group: dist.ProcessGroup | None) -> None:
    """Moves nbytes from the ranks of one side, each an equal part, to those of the other."""
    senders, receivers = pair
    rank = dist.get_rank()
    if rank not in senders and rank not in receivers:
        return
    # Equal parts on both sides that few pairs of ranks exchange: rank i sends to rank i, or to its
    # neighbours.
    shape = (nbytes // len(senders) * len(senders),)
    source, destination = _row(senders), _row(receivers)
    local = source.local_shapes(shape).get(rank)
    data = None if local is None else torch.zeros(local, dtype=torch.uint8)
    reshard_local(
        data, source, None, destination, shape=shape, dtype=torch.uint8, group=group, strategy="send_recv"
    )


def _row(ranks: Sequence[int]) -> Layout:
    from torch.distributed.tensor.placement_types import Shard

    placements: list[Placement] = [Shard(0)]
    return Layout(list(ranks), placements)


def _latency(leaders: Sequence[int], everybody: Sequence[int], group: dist.ProcessGroup | None) -> float:
    """Seconds one way of a small message between two hosts, or between two ranks of the only host."""
    pair = leaders[:2] if len(leaders) > 1 else everybody[:2]
    if len(pair) < 2:
        return 0.0
    rank, message = dist.get_rank(), torch.zeros(8, dtype=torch.uint8)
    dist.barrier(group)
    times = []
    if rank == pair[0]:
        for _ in range(_PINGS):
            begin = time.perf_counter()
            dist.send(message, pair[1], group, _TAG)
            dist.recv(message, pair[1], group, _TAG)
            times.append(time.perf_counter() - begin)
    elif rank == pair[1]:
        for _ in range(_PINGS):
            dist.recv(message, pair[0], group, _TAG)
            dist.send(message, pair[0], group, _TAG)
    found = gather_facts((statistics.median(times) / 2 if times else 0.0,), group)
    return float(found[pair[0]][0])
