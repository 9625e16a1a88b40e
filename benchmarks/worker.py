"""One rank of one case: calibrates the link, runs every method interleaved, checks every element."""

from __future__ import annotations

import argparse
import json
import statistics
import time
import zlib
from datetime import timedelta

import meshcast
import torch
import torch.distributed as dist

from .cases import CASES, RANKS_PER_HOST
from .methods import METHODS, ONCE, Move


def true_values(shape: tuple[int, ...], box: tuple[tuple[int, int], ...], salt: int) -> torch.Tensor:
    """Every element its own linear index, shifted by a salt, so that a misplaced or a stale element shows."""
    index = torch.zeros([1] * len(shape), dtype=torch.int64)
    for dim, (lo, hi) in enumerate(box):
        view = [1] * len(shape)
        view[dim] = -1
        index = index * shape[dim] + torch.arange(lo, hi).view(view)
    return ((index + salt) % (2**31 - 1)).to(torch.int32)


def link_rate(repeats: int = 3, nbytes: int = 8 << 20) -> float:
    """Bytes/s from host 0 to host 1 in one gloo message: the rate that bounds are computed with."""
    rank, data = dist.get_rank(), torch.zeros(nbytes, dtype=torch.uint8)
    rates = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            dist.send(data, RANKS_PER_HOST)
            dist.recv(data[:1], RANKS_PER_HOST)
        elif rank == RANKS_PER_HOST:
            dist.recv(data, 0)
            dist.send(data[:1], 0)
        rates.append(nbytes / (time.perf_counter() - start))
    rate = torch.tensor([statistics.median(rates[1:])], dtype=torch.float64)
    dist.broadcast(rate, 0)
    return float(rate)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    parser.add_argument("--factor", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    args = parser.parse_args()
    case = next(c for c in CASES if c.name == args.case)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank = dist.get_rank()
    rate = link_rate()
    shape = case.scaled(args.factor)
    src, dst = meshcast.Layout.parse(case.src), meshcast.Layout.parse(case.dst)
    topology = meshcast.Topology.uniform(RANKS_PER_HOST, rate * 8 / 1e9, latency_us=100)
    held, needed = src.shards(shape).get(rank), dst.shards(shape).get(rank)
    source = true_values(shape, held[0], 0) if held else None
    destination = torch.empty([hi - lo for lo, hi in needed[0]], dtype=torch.int32) if needed else None
    move = Move(shape, src, dst, topology, source, destination)

    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    wrong = 0
    for repeat in range(args.repeats + 1):  # the first warms up: connections, plan agreement, page faults
        for number, (name, method) in enumerate(METHODS.items()):
            if name in ONCE and repeat > 1:
                continue
            salt = zlib.crc32(f"{repeat} {number}".encode()) % 1000
            if source is not None and held:
                source.copy_(true_values(shape, held[0], salt))
            if destination is not None:
                destination.fill_(-1)
            dist.barrier()
            start = time.perf_counter()
            method(move)
            dist.barrier()
            if repeat > 0:
                seconds[name].append(time.perf_counter() - start)
            if destination is not None and needed:
                wrong += int((destination != true_values(shape, needed[0], salt)).sum())
    total_wrong = torch.tensor([wrong])
    dist.all_reduce(total_wrong)
    if rank == 0:
        plan = meshcast.plan(shape, torch.int32, src, dst, topology=topology)
        print(json.dumps({
            "case": case.name, "src": case.src, "dst": case.dst, "shape": shape,
            "nbytes": 4 * torch.Size(shape).numel(), "rate_mbit": rate * 8 / 1e6,
            "lower_bound": plan.lower_bound, "strategy": plan.strategy,
            "predicted": plan.makespan, "seconds": seconds, "wrong_elements": int(total_wrong),
        }))  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
