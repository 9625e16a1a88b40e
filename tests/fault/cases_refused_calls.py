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
from meshcast.groups.parent import parent_group
from torch.distributed.tensor import Replicate, Shard

CALLS = 150  # more than the board keeps of a rank
MORE_KEYS = 12  # of the test itself, by which the ranks line up
LATE_CALLS = 5
# What stays of a generation of the group, which a refused call ends where the others come to it late.
KEYS_OF_A_LIFE = 4


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


def late(rank: int, number: int) -> None:
    """As refuse(), but the others come once the refusing rank has stopped looking for them."""
    if rank:
        time.sleep(0.4)
    refuse(rank, 1000 + number)


def lives() -> int:
    """Of all groups, so far. A busy machine may make others late in refuse() as well."""
    return sum(group.generation for group in parent_group(None, "test")._groups.values())


def failed_calls_leave_nothing(context) -> dict:
    move(context.rank, 5)
    grown = {}
    for call, count in ((disagree, CALLS), (refuse, CALLS), (late, LATE_CALLS)):
        for number in range(count):
            call(context.rank, number)
        context.wait_for_all(f"{call.__name__} first")
        keys, memory, lived = context.store.num_keys(), resident(), lives()
        context.wait_for_all(f"{call.__name__} counted")
        for number in range(count, 2 * count):
            call(context.rank, number)
        context.wait_for_all(f"{call.__name__} second")
        lived = lives() - lived
        most = MORE_KEYS + KEYS_OF_A_LIFE * lived
        deadline = time.monotonic() + 10.0
        while context.store.num_keys() - keys > most and time.monotonic() < deadline:
            time.sleep(0.02)  # the ranks may still take back what they said of the last call
        grown[call.__name__] = [context.store.num_keys() - keys, most, lived, resident() - memory]
        context.wait_for_all(f"{call.__name__} counted again")
    move(context.rank, 6)
    return grown


CASES = [failed_calls_leave_nothing]
