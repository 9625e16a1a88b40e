"""What ranks remember of their agreements, over shared memory and over gloo alone; see
cases_agreements.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(270)

MODULE = Path(__file__).with_name("cases_agreements.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])


@pytest.fixture(scope="module", params=["1", "0"], ids=["shm", "gloo"])
def world(request: pytest.FixtureRequest) -> WorldResult:
    return run_world(MODULE, 3, env={"MESHCAST_SHM": request.param})


@pytest.mark.parametrize("case", CASES)
def test_agreements(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
