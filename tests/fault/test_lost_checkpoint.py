"""Every survivor of a rank that is lost in the middle of a load through MemoryStorage finds a typed error; as
cases_lost_checkpoint.py says."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from multiproc.harness import run_world

pytestmark = pytest.mark.timeout(150)

MODULE = Path(__file__).with_name("cases_lost_checkpoint.py")


@pytest.mark.parametrize("victim", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_lost_checkpoint(victim: int) -> None:
    world = run_world(MODULE, 3, limit=120.0, env={"VICTIM": str(victim)})
    world.check("lost_checkpoint", [rank for rank in range(3) if rank != victim])
    world.check_ends({victim: -signal.SIGKILL})
