"""Calls that fail, again and again: the ranks of each disagree. The store must not grow with them."""

from __future__ import annotations

import gc
import resource
import time
from pathlib import Path

import meshcast
import pytest
import torch
from meshcast import Layout, LayoutError, PlanMismatchError
from torch.distributed.tensor import Replicate, Shard

CALLS = 150  # more than the board keeps of a rank
MORE_KEYS = 12  # of the test itself, by which the ranks line up


def resident() -> int:
    """Bytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def move(rank: int, columns: int, wrong: bool = False) -> None:
    full = torch.ones(4, columns)
    mine = None if rank else full[:, 1:] if wrong else full
    layouts = Layout([0], [Shard(0)]), Layout([1, 2], [Replicate()])
    meshcast.reshard_local(
        mine, layouts[0], None, layouts[1], shape=full.shape, dtype=full.dtype, timeout=60.0
    )


def disagree(rank: int, number: int) -> None:
    with pytest.raises(PlanMismatchError):
        move(rank, 10 + 3 * number + rank)


def refuse(rank: int, number: int) -> None:
    with pytest.raises(LayoutError if rank == 0 else PlanMismatchError):
        move(rank, 1000 + number, wrong=True)


def failed_calls_leave_nothing(context) -> dict:
    move(context.rank, 5)
    grown = {}
    for call in (disagree, refuse):
        for number in range(CALLS):
            call(context.rank, number)
        context.wait_for_all(f"{call.__name__} first")
        keys, memory = context.store.num_keys(), resident()
        context.wait_for_all(f"{call.__name__} counted")
        for number in range(CALLS, 2 * CALLS):
            call(context.rank, number)
        context.wait_for_all(f"{call.__name__} second")
        deadline = time.monotonic() + 10.0
        while context.store.num_keys() - keys > MORE_KEYS and time.monotonic() < deadline:
            time.sleep(0.02)  # the ranks may still take back what they said of the last call
        grown[call.__name__] = [context.store.num_keys() - keys, resident() - memory]
        context.wait_for_all(f"{call.__name__} counted again")
    move(context.rank, 6)
    return grown


CASES = [failed_calls_leave_nothing]
