"""Shared memory between ranks of one host; see cases_shared_memory.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(200)

CASES = [
    "nothing_grows",
    "one_thread_for_all_groups",
    "one_rank_has_it_off",
    "all_have_it_off",
    "one_rank_has_no_room",
    "strangers_call",
    "other_hosts",
    "bad_values",
    "destroying_ends_its_threads",
    "destroying_unmaps",
]


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(Path(__file__).with_name("cases_shared_memory.py"), 4, limit=180)


@pytest.mark.parametrize("case", CASES)
def test_case(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
    assert {case for result in world.ranks for case in result.cases} == set(CASES)
