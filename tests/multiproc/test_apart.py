"""Ranks that come late; see cases_apart.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(270)

MODULE = Path(__file__).with_name("cases_apart.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(MODULE, 3)


@pytest.mark.parametrize("case", CASES)
def test_apart(world: WorldResult, case: str) -> None:
    world.check(case)


def test_nothing_is_printed_while_ranks_wait(world: WorldResult) -> None:
    """torch prints two lines for each wait in a store that comes to its limit."""
    world.check_ends()
    for rank, result in enumerate(world.ranks):
        assert "timed out" not in result.output, f"rank {rank} printed:\n{result.output}"
