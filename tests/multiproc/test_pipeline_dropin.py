"""Scripts for torch.distributed.pipelining: pipeline_dropin_cases.py, run in one set of three processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

CASES = Path(__file__).with_name("pipeline_dropin_cases.py")


def case_names() -> list[str]:
    spec = importlib.util.spec_from_file_location("pipeline_dropin_cases", CASES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [case.__name__ for case in module.CASES]


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(CASES, 3, limit=200.0)


@pytest.mark.timeout(260)
@pytest.mark.parametrize("case", case_names())
def test_pipeline_dropin(world: WorldResult, case: str) -> None:
    world.check(case)


@pytest.mark.timeout(260)
def test_all_processes_end_in_time(world: WorldResult) -> None:
    world.check_ends()
