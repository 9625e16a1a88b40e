"""Threads, descriptors and memory over 2,000 random reshards; see cases_soak.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import run_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MODULE = Path(__file__).with_name("cases_soak.py")

# Resident memory is to show what is in use. By itself malloc keeps an arena for each thread, and raises the
# size from which it gives blocks back with every one that is freed: what it keeps grows by 10 to 25 MiB.
MALLOC = {"PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "65536"}


@pytest.mark.parametrize("shared_memory", ["1", "0"], ids=["shm", "gloo"])
def test_nothing_grows(shared_memory: str) -> None:
    env = {"MESHCAST_SHM": shared_memory, "SIZES": "7", "HOSTS": "0", **MALLOC}
    world = run_world(MODULE, 7, limit=1150, env=env)
    world.check("nothing_grows")
    world.check_ends()
