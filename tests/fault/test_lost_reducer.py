"""Every survivor of a rank that is lost in the middle of a reduction raises a typed error; see
cases_lost_reducer.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from multiproc.harness import run_world

pytestmark = pytest.mark.timeout(200)

MODULE = Path(__file__).with_name("cases_lost_reducer.py")


def _run(victim: int, fault: str, shm: str, limit: float) -> None:
    env = {"VICTIM": str(victim), "FAULT": fault, "LIMIT": str(limit), "MESHCAST_SHM": shm}
    world = run_world(MODULE, 3, limit=150.0, env=env)
    world.check("lost_reducer", [rank for rank in range(3) if rank != victim])
    world.check_ends({victim: -signal.SIGKILL} if victim >= 0 else None)


@pytest.mark.slow
def test_control() -> None:
    """Without a fault the same calls succeed."""
    _run(-1, "killed", "0", 60.0)


@pytest.mark.parametrize(("victim", "shm"), [(1, "0"), pytest.param(0, "1", marks=pytest.mark.slow)])
def test_killed(victim: int, shm: str) -> None:
    _run(victim, "killed", shm, 60.0)


@pytest.mark.slow
def test_frozen() -> None:
    _run(0, "frozen", "0", 5.0)
