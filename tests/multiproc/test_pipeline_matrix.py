"""Every schedule over every kind of pipeline: pipeline_matrix_cases.py, run in one set of seven processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from multiproc.harness import WorldResult, run_world

# test_pipeline.py has the schedules over fewer pipelines in the quick suite.
pytestmark = pytest.mark.slow

CASES = Path(__file__).with_name("pipeline_matrix_cases.py")


def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pipeline_matrix_cases", CASES)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(CASES, 7, limit=240.0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [case.__name__ for case in module().QUICK])
def test_pipeline(world: WorldResult, case: str) -> None:
    world.check(case)


@pytest.mark.timeout(300)
def test_all_processes_end_in_time(world: WorldResult) -> None:
    world.check_ends()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(module().PARTS))
def test_every_combination(part: int) -> None:
    world = run_world(CASES, 7, limit=240.0, env={"MESHCAST_PIPELINES": str(part)})
    for case in module().ALL[part :: module().PARTS]:
        world.check(case.__name__)
    world.check_ends()
