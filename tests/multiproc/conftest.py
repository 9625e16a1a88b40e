"""What the pipeline tests share: each has a module of cases, which all run in one set of processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from multiproc.harness import WorldResult, run_world

_LIMIT = 240.0  # seconds for all cases of a module


def loaded(cases: Path) -> ModuleType:
    """The module of cases, in this process: to read its lists."""
    spec = importlib.util.spec_from_file_location(cases.stem, cases)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each case in the file that the test module calls CASES."""
    if "pipeline_case" in metafunc.fixturenames:
        names = [case.__name__ for case in loaded(metafunc.module.CASES).CASES]
        metafunc.parametrize("pipeline_case", names)


@pytest.fixture(scope="module")
def pipeline_world(request: pytest.FixtureRequest) -> WorldResult:
    """How the cases ended on each of RANKS processes."""
    return run_world(request.module.CASES, request.module.RANKS, limit=_LIMIT)
