"""Processes that die or freeze while a WeightReader reads; see cases_lost_readers.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from multiproc.harness import run_world

pytestmark = pytest.mark.timeout(200)

MODULE = Path(__file__).with_name("cases_lost_readers.py")


@pytest.mark.parametrize(("victim", "fault"), [(3, "killed"), (3, "offering"), (3, "frozen"), (4, "killed")])
def test_lost_readers(victim: int, fault: str) -> None:
    world = run_world(MODULE, 5, limit=150.0, env={"VICTIM": str(victim), "FAULT": fault})
    world.check("lost_readers", [rank for rank in range(5) if rank != victim])
    world.check_ends({victim: -signal.SIGKILL})
