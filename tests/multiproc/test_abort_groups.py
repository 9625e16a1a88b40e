"""abort_groups, whichever rank died; see cases_abort_groups.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from multiproc.harness import run_world

pytestmark = pytest.mark.timeout(120)

CASES = Path(__file__).with_name("cases_abort_groups.py")


@pytest.mark.parametrize("victim", [0, 2])
def test_waits_end(victim: int) -> None:
    world = run_world(CASES, 4, limit=60.0, env={"VICTIM": str(victim)})
    world.check("what_waits_for_one_that_lives_ends", [rank for rank in range(4) if rank != victim])
    world.check_ends({victim: -signal.SIGKILL})
