"""What a handler of a signal raises ends every wait, and the others hear of it; see cases_signals.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(200)

CASES = [
    "in_a_call",
    "in_the_wait_of_a_handle",
    "in_the_wait_of_a_future",
    "in_a_backward",
    "while_ranks_meet",
    "while_a_group_is_prepared",
    "while_ranks_agree",
    "in_a_pipeline_step",
    "a_handler_that_raises_nothing",
]
WAYS = {"shared memory": ("auto", "1"), "ucx": ("ucx", "0"), "gloo": ("gloo", "0")}


@pytest.fixture(scope="module", params=list(WAYS))
def world(request: pytest.FixtureRequest) -> WorldResult:
    transport, shm = WAYS[request.param]
    env = {"MESHCAST_TRANSPORT": transport, "MESHCAST_SHM": shm}
    return run_world(Path(__file__).with_name("cases_signals.py"), 4, limit=150.0, env=env)


@pytest.mark.parametrize("case", CASES)
def test_signals(world: WorldResult, case: str) -> None:
    world.check(case)


def test_ends(world: WorldResult) -> None:
    world.check_ends()
