"""Every schedule over every kind of pipeline: pipeline_matrix_cases.py, run in one set of seven processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.conftest import loaded
from multiproc.harness import WorldResult, run_world

CASES = Path(__file__).with_name("pipeline_matrix_cases.py")
RANKS = 7

# test_pipeline.py has the schedules over fewer pipelines in the quick suite.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(450)]


def test_pipeline(pipeline_world: WorldResult, pipeline_case: str) -> None:
    pipeline_world.check(pipeline_case)


def test_all_processes_end_in_time(pipeline_world: WorldResult) -> None:
    pipeline_world.check_ends()


@pytest.mark.timeout(540)
@pytest.mark.parametrize("part", range(loaded(CASES).PARTS))
def test_every_combination(part: int) -> None:
    world = run_world(CASES, RANKS, limit=480.0, env={"MESHCAST_PIPELINES": str(part)})
    for case in loaded(CASES).ALL[part :: loaded(CASES).PARTS]:
        world.check(case.__name__)
    world.check_ends()
