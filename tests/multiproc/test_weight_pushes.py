"""WeightSync, 2 trainers and 2 or 3 servers; see cases_weight_pushes.py and cases_weight_refusals.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(270)

PUSHES = Path(__file__).with_name("cases_weight_pushes.py")
REFUSALS = Path(__file__).with_name("cases_weight_refusals.py")


def cases(module: Path) -> list[str]:
    return re.findall(r"\w+", module.read_text().split("CASES = [")[1])


@pytest.fixture(scope="module", params=[4, 5])
def pushes(request: pytest.FixtureRequest) -> WorldResult:
    return run_world(PUSHES, request.param)


@pytest.fixture(scope="module")
def refusals() -> WorldResult:
    return run_world(REFUSALS, 4)


@pytest.mark.parametrize("case", cases(PUSHES))
def test_pushes(pushes: WorldResult, case: str) -> None:
    pushes.check(case)


def test_pushes_end_cleanly(pushes: WorldResult) -> None:
    pushes.check_ends()


@pytest.mark.parametrize("case", cases(REFUSALS))
def test_refusals(refusals: WorldResult, case: str) -> None:
    refusals.check(case)


def test_refusals_end_cleanly(refusals: WorldResult) -> None:
    refusals.check_ends()
