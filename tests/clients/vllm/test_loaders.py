"""record_destinations with vLLM's models; see cases_loaders.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult

pytestmark = pytest.mark.timeout(270)

CASES = Path(__file__).with_name("cases_loaders.py")
RANKS, VICTIM = 5, -1


def test_loaders(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
