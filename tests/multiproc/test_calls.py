"""Calls, handles and groups, over a default group of plain gloo and of the backend "meshcast"; see
cases_calls.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(270)

MODULE = Path(__file__).with_name("cases_calls.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])


@pytest.fixture(scope="module", params=["gloo", "meshcast"])
def world(request: pytest.FixtureRequest) -> WorldResult:
    return run_world(MODULE, 4, backend=request.param)


@pytest.mark.parametrize("case", CASES)
def test_calls(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
