"""Batches of random combinations against plain PyTorch; see cases_combinations.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(210)

MODULE = Path(__file__).with_name("cases_combinations.py")


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(MODULE, 5, limit=200.0)


@pytest.mark.parametrize("first", range(0, 120, 12))
def test_combinations(world: WorldResult, first: int) -> None:
    world.check(f"seeds_from_{first}")


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
