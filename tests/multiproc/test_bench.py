"""The benchmarks' methods and cases: cases_bench.py, run in one set of five processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(150)

MODULE = Path(__file__).with_name("cases_bench.py")


def case_names() -> list[str]:
    spec = importlib.util.spec_from_file_location("cases_bench", MODULE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [case.__name__ for case in module.CASES]


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(MODULE, 5, limit=120.0)


@pytest.mark.parametrize("case", case_names())
def test_bench(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
