"""Partial sources are reduced on the way: equal to torch's reduction on random layouts of 3 to 7 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(700)

MODULE = Path(__file__).with_name("cases_partial.py")
CASES = [
    "random_world_3",
    "random_world_5",
    "random_world_7",
    "a_late_rank",
    "refused",
    "in_plan_order",
    "bytes_of_the_plan",
    "several_in_flight",
    "reused",
    "gradients",
    "plain_shards",
    "state_dicts",
]


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(MODULE, 7, limit=600)


@pytest.mark.parametrize("case", CASES)
def test_equals_torch(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
    assert {case for result in world.ranks for case in result.cases} == set(CASES)


@pytest.mark.slow
def test_equals_torch_on_many_layouts() -> None:
    world = run_world(MODULE, 7, limit=600, env={"PARTIAL_CASES": "30"})
    world.check_ends()
    for case in CASES:
        world.check(case)
