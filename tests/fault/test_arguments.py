"""Wrong or disagreeing arguments raise on every rank that called, in bounded time; see cases_arguments.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(330)

MODULE = Path(__file__).with_name("cases_arguments.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("for case in (")[1])


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(MODULE, 4, limit=300.0)


@pytest.mark.parametrize("case", CASES)
def test_arguments(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
