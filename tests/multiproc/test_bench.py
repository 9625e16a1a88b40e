"""The benchmarks' methods and cases: cases_bench.py, run in one set of five processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from meshcast.bench.methods import METHODS
from multiproc.harness import WorldResult, run_world

pytestmark = [pytest.mark.timeout(420), pytest.mark.slow]

MODULE = Path(__file__).with_name("cases_bench.py")


def cases_of(name: str) -> list[str]:
    """Names of the cases in a list of the module."""
    spec = importlib.util.spec_from_file_location("cases_bench", MODULE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [case.__name__ for case in getattr(module, name)]


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(MODULE, 5, limit=360.0)


@pytest.mark.parametrize("case", cases_of("CASES"))
def test_bench(world: WorldResult, case: str) -> None:
    world.check(case)


def test_every_method_can_do_something(world: WorldResult) -> None:
    done = {method for case in cases_of("LAYOUT_CASES") for method in world.value(case, 0)}
    assert done == set(METHODS)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
