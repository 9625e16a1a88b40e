"""What meshcast tells about itself; see cases_observe.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(150)

MODULE = Path(__file__).with_name("cases_observe.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> WorldResult:
    record = tmp_path_factory.mktemp("flight") / "record"
    return run_world(MODULE, 2, env={"MESHCAST_FLIGHT_RECORD": str(record), "MESHCAST_LOG": "info"})


@pytest.mark.parametrize("case", CASES)
def test_observed(world: WorldResult, case: str) -> None:
    world.check(case)


def test_log(world: WorldResult) -> None:
    """Level info tells of connections, agreements and errors, and not of each call."""
    output = world.ranks[1].output
    assert "meshcast INFO] rank 1: connected with ranks 0,1" in output
    assert "meshcast INFO] rank 1: agreed on reshard float32 (4, 3)" in output
    assert "meshcast ERROR] rank 1: reshard failed: DeadlineExceededError" in output
    assert "DEBUG" not in output


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
