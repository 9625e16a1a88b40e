"""meshcast.elastic; see cases_elastic.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(270)

MODULE = Path(__file__).with_name("cases_elastic.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])
KILLED = 3


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(MODULE, 5)


@pytest.mark.parametrize("case", CASES[:-1])
def test_elastic(world: WorldResult, case: str) -> None:
    world.check(case)


def test_a_rank_is_killed(world: WorldResult) -> None:
    world.check(CASES[-1], [rank for rank in range(5) if rank != KILLED])


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends({KILLED: -9})
