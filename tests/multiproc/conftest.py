"""What the pipeline tests share: each has a module of cases, which all run in one set of processes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from multiproc.harness import WorldResult, run_world

_LIMIT = 400.0  # seconds for all cases of a module


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


@pytest.fixture(scope="module")
def buildable() -> None:
    """Skips, with the reason, where this machine or container allows no network namespaces."""
    root = str(Path(__file__).resolve().parents[2])
    if root not in sys.path:
        sys.path.insert(0, root)
    from benchmarks.cluster import Cluster, ClusterError

    try:
        with Cluster(1, 100):
            pass
    except ClusterError as error:
        pytest.skip(f"no emulated cluster here: {error}")
