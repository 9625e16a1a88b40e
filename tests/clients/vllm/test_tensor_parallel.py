"""record_destinations with the tensor-parallel plans of transformers; see cases_tensor_parallel.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult

pytestmark = pytest.mark.timeout(270)

CASES = Path(__file__).with_name("cases_tensor_parallel.py")
RANKS, VICTIM = 2, -1


def test_tensor_parallel(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
