"""Topology.discover and measure_topology: cases_discovery.py, run in one set of five processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(150)

MODULE = Path(__file__).with_name("cases_discovery.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(MODULE, 5, limit=120.0)


@pytest.mark.parametrize("case", CASES)
def test_discovery(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
