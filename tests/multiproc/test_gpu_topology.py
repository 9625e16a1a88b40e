"""measure_topology between GPUs, and what is kept of it: cases_gpu_topology.py, in five processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(200)

MODULE = Path(__file__).with_name("cases_gpu_topology.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(MODULE, 5, limit=170.0)


@pytest.mark.parametrize("case", CASES)
def test_gpu_topology(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
