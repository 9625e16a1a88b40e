"""Scripts for torch.distributed.pipelining: pipeline_dropin_cases.py, run in one set of three processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult

CASES = Path(__file__).with_name("pipeline_dropin_cases.py")
RANKS = 3

pytestmark = pytest.mark.timeout(450)


def test_pipeline_dropin(pipeline_world: WorldResult, pipeline_case: str) -> None:
    pipeline_world.check(pipeline_case)


def test_all_processes_end_in_time(pipeline_world: WorldResult) -> None:
    pipeline_world.check_ends()
