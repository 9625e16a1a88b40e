"""2,000 random reshards back to back on seven ranks: nothing of a process grows. Before them, large ones make
every thread and channel there is and use every slot of shared memory, and 1,500 random ones fill the caches:
all of these are bounded."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import time
from collections import Counter
from pathlib import Path

import meshcast
import torch
from multiproc.cases_property import call, verify
from multiproc.meshes import quiet_mesh, sharded
from multiproc.random_layouts import draw
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 120.0
CASE_LIMIT = 1100.0
BEFORE, CALLS = 1500, 2000
BETWEEN_LOOKS = 100  # calls
GROWTH = 5 << 20  # bytes


def threads() -> Counter[str]:
    names: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        names[(task / "comm").read_text().strip()] += 1
    return names


def resources() -> dict[str, int]:
    """Of this process: threads, descriptors, bytes of mapped shared memory, resident bytes of its own."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # else the holes that malloc keeps count as well, 3 to 6 MiB
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mapped = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:meshcast" in line:
            begin, end = line.split()[0].split("-")
            mapped += int(end, 16) - int(begin, 16)
    return {
        "threads": threads().total(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared": mapped,
        # Not RssShmem: a page of a slot counts there from its first use, up to `shared`.
        "resident": sum(int(status[kind].split()[0]) * 1024 for kind in ("RssAnon", "RssFile")),
    }


class Mallinfo(ctypes.Structure):
    """Of mallinfo2(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def in_use() -> int:
    """Bytes that malloc has given out, to Python as well (PYTHONMALLOC=malloc): a leak shows here before it
    shows in resident memory, which also holds what malloc keeps for later."""
    assert os.environ["PYTHONMALLOC"] == "malloc"
    gc.collect()
    mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return found.uordblks + found.hblkhd


def run(first: int, count: int, context) -> list[int]:
    """The calls from `first` on. Returns what was in use at each look: what the caches hold differs by some
    MiB from one to the next."""
    looks = []
    for seed in range(first, first + count):
        problem = draw(seed, context.world)
        called = call(problem, context.rank, async_op=False)
        if called is not None:
            verify(*called, problem, context.rank)
        if seed % BETWEEN_LOOKS == 0:
            looks.append(in_use())
    context.wait_for_all(f"end of {first}", limit=120.0)
    return looks


def fill(context) -> None:
    """Every rank sends every other one several MiB, in each of the groups that draw() can ask for."""
    side = 420 * context.world
    full = torch.arange(side * side).reshape(side, side)
    for ranks in (list(range(context.world)), list(range(1, context.world, 2))):
        if context.rank not in ranks:
            continue
        mesh = quiet_mesh(ranks)
        rows = sharded(full, mesh, [Shard(0)], context.rank)
        for _ in range(3):
            columns = meshcast.reshard(rows, mesh, [Shard(1)])
            rows = meshcast.reshard(columns, mesh, [Shard(0)])
        # A rank that waits for others to agree on a plan looks after them, over connections of UCX: here
        # each rank waits for all.
        for first in ranks:
            time.sleep(0.3 * (context.rank != first))
            new = sharded(torch.arange(len(ranks) * (first + 1)), mesh, [Shard(0)], context.rank)
            meshcast.reshard(new, mesh, [Replicate()])
    context.wait_for_all("filled", limit=120.0)


def nothing_grows(context) -> list[int]:
    fill(context)
    run(20_000, BEFORE, context)
    before, named = resources(), threads()
    looks = run(20_000 + BEFORE, CALLS, context)
    after = resources()
    # Of the last half over the first; the whole would grow by twice as much.
    half = len(looks) // 2
    growth = 2 * (statistics.mean(looks[half:]) - statistics.mean(looks[:half]))
    assert growth <= GROWTH, f"memory in use grows by {growth / 2**20:.1f} MiB: {looks}"
    for kind in ("threads", "descriptors", "shared"):
        assert after[kind] <= before[kind], (
            f"{kind}: {before} before, {after} after, new: {threads() - named}"
        )
    assert after["resident"] - before["resident"] <= GROWTH, (before, after)
    return looks


CASES = [nothing_grows]
