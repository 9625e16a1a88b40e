"""Pipelines over different meshes against one process: pipeline_cases.py, run in one set of six processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult

CASES = Path(__file__).with_name("pipeline_cases.py")
RANKS = 6

pytestmark = pytest.mark.timeout(450)


def test_pipeline(pipeline_world: WorldResult, pipeline_case: str) -> None:
    pipeline_world.check(pipeline_case)


def test_all_processes_end_in_time(pipeline_world: WorldResult) -> None:
    pipeline_world.check_ends()
