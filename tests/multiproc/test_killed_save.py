"""Ranks that die while a pipeline is saved; see cases_killed_save.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from multiproc.harness import run_world

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

CASES = Path(__file__).with_name("cases_killed_save.py")


@pytest.mark.parametrize(("moment", "victim"), [("writing", 2), ("between", 0), ("replaced", 0)])
def test_a_checkpoint_stays_whole(tmp_path: Path, moment: str, victim: int) -> None:
    env = {"FOLDER": str(tmp_path), "MOMENT": moment}
    world = run_world(CASES, 4, limit=120.0, env={**env, "PART": "dies"})
    world.check("dies_while_it_saves", [rank for rank in range(4) if rank != victim])
    world.check_ends({victim: -signal.SIGKILL})
    world = run_world(CASES, 4, limit=120.0, env={**env, "PART": "reads"})
    world.check("another_job_reads_it_and_saves")
    world.check_ends()
