"""What the clients' tests share: a module of cases, which all run in one set of processes, the last of which
loses a rank. A test module has CASES, a path, RANKS and VICTIM."""

from __future__ import annotations

import re

import pytest
from multiproc.harness import WorldResult, run_world


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each case. The module is read, not imported: it imports the client."""
    if "case" in metafunc.fixturenames:
        text = metafunc.module.CASES.read_text().split("\nCASES = [")[1]
        metafunc.parametrize("case", re.findall(r"\w+", text))


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest) -> WorldResult:
    """How the cases ended on each rank."""
    return run_world(request.module.CASES, request.module.RANKS, limit=200.0)


@pytest.fixture
def ranks(request: pytest.FixtureRequest, case: str) -> list[int]:
    """That the case ends on."""
    module = request.module
    return [rank for rank in range(module.RANKS) if case != "a_rank_is_lost" or rank != module.VICTIM]
