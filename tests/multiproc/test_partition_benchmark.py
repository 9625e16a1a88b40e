"""The benchmark of partition() on four ranks; see cases_partition_benchmark.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(Path(__file__).with_name("cases_partition_benchmark.py"), 4, limit=120.0)


@pytest.mark.parametrize("case", ["obvious_ones_and_the_proposal", "uneven_ones"])
def test_steps(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
