"""A rank dies in a call before a refused one: nobody waits for it; see cases_lost_after_refusal.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from multiproc.harness import run_world

pytestmark = pytest.mark.timeout(110)


@pytest.mark.parametrize(
    "dies", [pytest.param(True, id="killed"), pytest.param(False, id="control", marks=pytest.mark.slow)]
)
def test_lost_after_refusal(dies: bool) -> None:
    env = {"MESHCAST_SHM": "0", "DIES": str(int(dies))}
    world = run_world(Path(__file__).with_name("cases_lost_after_refusal.py"), 3, limit=90.0, env=env)
    world.check("lost_after_refusal", [0, 1] if dies else [0, 1, 2])
    world.check_ends({2: -signal.SIGKILL} if dies else None)
