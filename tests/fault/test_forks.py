"""Forked children of ranks: see cases_forks.py and cases_forked_death.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(200)

CASES = [
    "a_child_calls",
    "a_child_ends_the_group",
    "a_child_just_exits",
    "forks_while_calls_are_in_flight",
    "children_make_a_group_of_their_own",
]
WAYS = {
    "shared memory": ("auto", "1", "gloo"),
    "ucx": ("auto", "0", "gloo"),
    "gloo": ("gloo", "0", "gloo"),
    "backend": ("auto", "1", "meshcast"),
}


@pytest.fixture(scope="module", params=list(WAYS))
def world(request: pytest.FixtureRequest) -> WorldResult:
    transport, shm, backend = WAYS[request.param]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MESHCAST_TRANSPORT": transport, "MESHCAST_SHM": shm, "BACKEND": backend}
    env["CHILDREN_PORT"] = str(store.port)
    cases = Path(__file__).with_name("cases_forks.py")
    return run_world(cases, 3, limit=150.0, backend=backend, env=env)


@pytest.mark.parametrize("case", CASES)
def test_forks(world: WorldResult, case: str) -> None:
    world.check(case)


def test_ends(world: WorldResult) -> None:
    world.check_ends()


@pytest.mark.parametrize("shm", ["0", "1"])
def test_a_child_outlives_its_parent(shm: str) -> None:
    """Not over gloo, whose connections the child has as well."""
    env = {"MESHCAST_TRANSPORT": "ucx", "MESHCAST_SHM": shm}
    world = run_world(Path(__file__).with_name("cases_forked_death.py"), 3, limit=100.0, env=env)
    world.check("a_child_outlives_its_parent", [0, 2])
    world.check_ends({1: -signal.SIGKILL})
