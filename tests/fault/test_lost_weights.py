"""Survivors of a rank that a WeightSync loses, in a push and between two; see cases_lost_weights.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from multiproc.harness import run_world

pytestmark = pytest.mark.timeout(200)

MODULE = Path(__file__).with_name("cases_lost_weights.py")


@pytest.mark.parametrize(
    ("victim", "fault", "buffers"),
    [
        (0, "killed", 2),
        (3, "killed", 1),
        (3, "idle", 2),
        (3, "thawed", 2),
        pytest.param(2, "frozen", 1, marks=pytest.mark.slow),
    ],
)
def test_lost_weights(victim: int, fault: str, buffers: int) -> None:
    limit = 6.0 if fault in ("frozen", "thawed") else 40.0
    env = {"VICTIM": str(victim), "FAULT": fault, "LIMIT": str(limit), "BUFFERS": str(buffers)}
    world = run_world(MODULE, 4, limit=150.0, env=env)
    if fault == "thawed":
        world.check("lost_weights")
        world.check_ends()
    else:
        world.check("lost_weights", [rank for rank in range(4) if rank != victim])
        world.check_ends({victim: -signal.SIGKILL})
