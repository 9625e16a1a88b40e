"""2,000 random reshards back to back on seven ranks: nothing of a process grows. The first half fills the
caches, whose sizes are bounded; the second is measured."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from multiproc.cases_property import call, verify
from multiproc.random_layouts import draw

GROUP_TIMEOUT = 120.0
CASE_LIMIT = 800.0
HALF = 1000


def resources() -> dict[str, int]:
    """Of this process: threads, descriptors, bytes of mapped shared memory, resident bytes."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mapped = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:meshcast" in line:
            begin, end = line.split()[0].split("-")
            mapped += int(end, 16) - int(begin, 16)
    return {
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared": mapped,
        "resident": int(status["VmRSS"].split()[0]) * 1024,
    }


def run(first: int, context) -> None:
    for seed in range(first, first + HALF):
        problem = draw(seed, context.world)
        called = call(problem, context.rank, async_op=False)
        if called is not None:
            verify(*called, problem, context.rank)
    context.wait_for_all(f"end of {first}", limit=120.0)


def nothing_grows(context) -> dict[str, dict[str, int]]:
    run(20_000, context)
    before = resources()
    run(20_000 + HALF, context)
    after = resources()
    for kind in ("threads", "descriptors", "shared"):
        assert after[kind] <= before[kind], f"{kind}: {before[kind]} before, {after[kind]} after"
    assert after["resident"] - before["resident"] <= 5 << 20, (before, after)
    return {"before": before, "after": after}


CASES = [nothing_grows]
