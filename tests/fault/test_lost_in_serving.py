"""Processes that die or freeze while trainers serve a WeightReader; see cases_lost_in_serving.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from multiproc.harness import run_world

pytestmark = pytest.mark.timeout(200)

MODULE = Path(__file__).with_name("cases_lost_in_serving.py")


@pytest.mark.parametrize("victim", [1, 2])
@pytest.mark.parametrize("fault", ["killed", "frozen", "choosing", "slow"])
def test_lost_in_serving(victim: int, fault: str) -> None:
    world = run_world(MODULE, 3, limit=150.0, env={"VICTIM": str(victim), "FAULT": fault})
    world.check("lost_in_serving", [rank for rank in range(3) if rank != victim])
    world.check_ends({victim: -signal.SIGKILL})
