"""Every reshard of 280 random layout pairs equals what plain PyTorch cuts out of the gathered tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

# Most of the time goes into starting torch seven times; the limits leave room for a busy machine.
pytestmark = pytest.mark.timeout(330)

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(FOLDER / "cases_property.py", 7, limit=300)


def _case_names() -> list[str]:
    sizes = [2, 3, 4, 5, 6, 7, 7]
    return [f"{kind}_{i}_world_{n}" for kind in ("sync", "async") for i, n in enumerate(sizes)]


@pytest.mark.parametrize("case", _case_names())
def test_equals_gather_and_slice(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
    assert {case for result in world.ranks for case in result.cases} == set(_case_names())
