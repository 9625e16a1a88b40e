"""meshcast.elastic.Replicas; see cases_replicas.py and cases_replicas_killed.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(270)

KILLED = Path(__file__).with_name("cases_replicas_killed.py")
MODULE = Path(__file__).with_name("cases_replicas.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(MODULE, 5)


@pytest.mark.parametrize("case", CASES)
def test_replicas(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()


def check_killed(victim: int, moment: str, case: str) -> None:
    world = run_world(KILLED, 5, env={"MESHCAST_TEST_KILL": f"{victim} {moment}"})
    world.check(case, [rank for rank in range(5) if rank != victim])
    world.check_ends({victim: -9})


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(5))
@pytest.mark.parametrize("moment", ["begin", "move", "end", "commit"])
def test_a_rank_is_killed_in_a_refresh(victim: int, moment: str) -> None:
    check_killed(victim, moment, "killed_in_a_refresh")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_rank_is_killed_at_random(seed: int) -> None:
    check_killed(seed % 5, f"random {seed}", "killed_at_random")
