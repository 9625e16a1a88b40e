"""Every survivor of a rank that dies in a large broadcast raises an error; see cases_lost_broadcast.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from multiproc.harness import run_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

MODULE = Path(__file__).with_name("cases_lost_broadcast.py")


@pytest.mark.parametrize(
    ("victim", "shm"), [(-1, "0"), (0, "0"), (1, "1")], ids=["control", "root", "receiver"]
)
def test_killed(victim: int, shm: str) -> None:
    env = {"VICTIM": str(victim), "MESHCAST_SHM": shm}
    world = run_world(MODULE, 3, limit=150.0, backend="meshcast", env=env)
    world.check("lost_broadcast", [rank for rank in range(3) if rank != victim])
    world.check_ends({victim: -signal.SIGKILL} if victim >= 0 else None)
