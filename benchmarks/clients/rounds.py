"""Rounds of several ways, in turns, on every rank of a job. Rank 0 prints what was found, as JSON."""

from __future__ import annotations

import json
import random
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Way", "measure"]

Way = Callable[[int], None]  # given the number of the round; over once this rank is through


def measure(ways: Mapping[str, Way], rounds: int, seen: Callable[[], int], head: Mapping[str, Any]) -> None:
    """The first round of each way alone, then all of them by turns.

    seen(): after each round and not timed, how many bytes are wrong on this rank; it also makes the values of
    the next round differ. head: of what is printed."""
    found: dict[str, dict[str, Any]] = {
        name: {"seconds": [], "cpu": [], "wrong_bytes": 0, "first": 0.0} for name in ways
    }
    number = 0
    for turn in range(rounds + 1):
        for name in random.Random(turn).sample(list(ways), len(ways)):
            number += 1
            seconds, cpu, wrong = _timed(lambda way=ways[name], number=number: way(number), seen)
            one = found[name]
            one["wrong_bytes"] += wrong
            if turn == 0:
                one["first"] = seconds
            else:
                one["seconds"].append(seconds)
                one["cpu"].append(cpu)
    if dist.get_rank() == 0:
        for one in found.values():
            one["median"] = statistics.median(one["seconds"])
        print(json.dumps({**head, "ways": found}))


def _timed(call: Callable[[], None], seen: Callable[[], int]) -> tuple[float, float, int]:
    """Seconds of the slowest rank, CPU seconds and wrong bytes of all."""
    dist.barrier()
    used, begin = _cpu(), time.perf_counter()
    call()
    taken = [time.perf_counter() - begin, _cpu() - used, float(seen())]
    slowest, sums = torch.tensor(taken[:1]).double(), torch.tensor(taken[1:]).double()
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(sums)
    return float(slowest), float(sums[0]), int(sums[1])


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
