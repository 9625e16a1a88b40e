"""Modules, shapes and memory of a pipeline: pipeline_module_cases.py, run in one set of four processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

CASES = Path(__file__).with_name("pipeline_module_cases.py")


def case_names() -> list[str]:
    spec = importlib.util.spec_from_file_location("pipeline_module_cases", CASES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [case.__name__ for case in module.CASES]


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(CASES, 4, limit=240.0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", case_names())
def test_pipeline(world: WorldResult, case: str) -> None:
    world.check(case)


@pytest.mark.timeout(300)
def test_all_processes_end_in_time(world: WorldResult) -> None:
    world.check_ends()
