"""What goes wrong in a pipeline: pipeline_fault_cases.py, run in one set of five processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult

CASES = Path(__file__).with_name("pipeline_fault_cases.py")
RANKS = 5

pytestmark = pytest.mark.timeout(450)


def test_pipeline_fault(pipeline_world: WorldResult, pipeline_case: str) -> None:
    pipeline_world.check(pipeline_case)


def test_all_processes_end_in_time(pipeline_world: WorldResult) -> None:
    """A pipeline that failed does not keep its process from leaving."""
    pipeline_world.check_ends()
