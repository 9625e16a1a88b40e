"""Callbacks of futures over every transport; see cases_callbacks.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(400)

CASES = [
    "a_call_in_a_callback",
    "a_callback_of_a_groups_first_call",
    "a_chain_of_three",
    "two_groups_wait_for_each_other",
    "callbacks_end_while_calls_start",
    "slow_callbacks_hold_up_nobody",
    "a_callback_that_raises",
    "no_callback_runs_on_a_thread_of_a_transport",
    "what_a_callback_waits_for_fails",
    "a_group_ends_in_a_callback",
    "what_is_polled_is_freed",
    "staged_transfers_have_callbacks_too",
    "a_state_has_callbacks_too",
    "a_broadcast_has_callbacks_too",
    "a_child_is_forked_while_callbacks_wait",
    "a_process_ends_with_callbacks_pending",
]
TRANSPORTS = {
    "shm": {"MESHCAST_SHM": "1"},
    "gloo": {"MESHCAST_SHM": "0", "MESHCAST_TRANSPORT": "gloo"},
    "ucx": {"MESHCAST_SHM": "0", "MESHCAST_TRANSPORT": "ucx"},
}


@pytest.fixture(scope="module", params=TRANSPORTS)
def world(request: pytest.FixtureRequest) -> WorldResult:
    return run_world(
        Path(__file__).with_name("cases_callbacks.py"), 3, limit=380, env=TRANSPORTS[request.param]
    )


@pytest.mark.parametrize("case", CASES)
def test_case(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
    assert {case for result in world.ranks for case in result.cases} == set(CASES)
