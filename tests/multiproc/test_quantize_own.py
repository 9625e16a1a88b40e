"""Block-scaled types of the user's own; see cases_quantize_own.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(270)

MODULE = Path(__file__).with_name("cases_quantize_own.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])


@pytest.fixture(scope="module", params=[3, 5])
def world(request: pytest.FixtureRequest) -> WorldResult:
    return run_world(MODULE, request.param)


@pytest.mark.parametrize("case", CASES)
def test_quantize_own(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
