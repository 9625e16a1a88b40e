"""Transports between hosts: which is used, what all ranks say where it cannot be, what it costs a process;
see cases_transports.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world
from multiproc.libraries import LIBRARIES, need_system

pytestmark = pytest.mark.timeout(200)

CASES = [
    "a_device_that_does_not_exist",
    "both_give_the_same_bytes",
    "ranks_with_unlike_transports",
    "a_rank_without_the_library",
    "a_rank_of_another_version",
    "without_the_library_all_take_gloo",
    "bad_values",
    "groups_share_threads_and_connections",
    "strangers_change_nothing",
]


@pytest.fixture(scope="module", params=LIBRARIES)
def world(request: pytest.FixtureRequest) -> WorldResult:
    if request.param == "system":
        need_system()
    env = {"MESHCAST_SHM": "0", "MESHCAST_UCX": request.param}
    return run_world(Path(__file__).with_name("cases_transports.py"), 4, limit=180, env=env)


@pytest.mark.parametrize("case", CASES)
def test_case(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
    assert {case for result in world.ranks for case in result.cases} == set(CASES)
