"""Rounds of several ways, in turns, on every rank of a job. Rank 0 prints what was found, as JSON."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from ..resources.clocks import cpu_seconds, largest, total

__all__ = ["Way", "measure"]

Way = Callable[[int], None]  # given the number of the round; over once this rank is through


def measure(ways: Mapping[str, Way], rounds: int, seen: Callable[[], int], head: Mapping[str, Any]) -> None:
    """All ways by turns, in an order that changes. The first round has their first calls, and is kept apart.

    seen(): after each round and not timed, how many bytes are wrong on this rank; it also makes the values of
    the next round differ. head: of what is printed."""
    found: dict[str, dict[str, Any]] = {
        name: {"seconds": [], "cpu": [], "wrong_bytes": 0, "first": 0.0} for name in ways
    }
    number = 0
    for turn in range(rounds + 1):
        for name in random.Random(turn).sample(list(ways), len(ways)):
            number += 1
            seconds, cpu, wrong = _timed(ways[name], number, seen)
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


def _timed(way: Way, number: int, seen: Callable[[], int]) -> tuple[float, float, int]:
    """Seconds of the slowest rank, CPU seconds and wrong bytes of all."""
    dist.barrier()
    used, begin = cpu_seconds(), time.perf_counter()
    way(number)
    seconds, used = time.perf_counter() - begin, cpu_seconds() - used
    return largest(seconds), total(used), int(total(float(seen())))
