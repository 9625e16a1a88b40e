"""Every survivor of a rank that is lost in the middle of reshard_state_dict raises a typed error; see
cases_lost_state.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from multiproc.harness import run_world

pytestmark = pytest.mark.timeout(200)

MODULE = Path(__file__).with_name("cases_lost_state.py")


@pytest.mark.parametrize(
    ("victim", "fault"),
    [
        (0, "killed"),
        pytest.param(1, "killed", marks=pytest.mark.slow),
        pytest.param(2, "frozen", marks=pytest.mark.slow),
    ],
)
def test_lost_state(victim: int, fault: str) -> None:
    limit = 60.0 if fault == "killed" else 8.0
    env = {"VICTIM": str(victim), "FAULT": fault, "LIMIT": str(limit)}
    world = run_world(MODULE, 3, limit=150.0, env=env)
    world.check("lost_state", [rank for rank in range(3) if rank != victim])
    world.check_ends({victim: -signal.SIGKILL})
