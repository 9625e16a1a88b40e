"""Ranks that become slow: rebalance_slowed_cases.py, run in four processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult

CASES = Path(__file__).with_name("rebalance_slowed_cases.py")
RANKS = 4

pytestmark = [pytest.mark.timeout(450), pytest.mark.slow]


def test_slowed(pipeline_world: WorldResult, pipeline_case: str) -> None:
    pipeline_world.check(pipeline_case)
