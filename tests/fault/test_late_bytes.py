"""After the error of a call no byte is written into its tensors; see cases_late_bytes.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world
from multiproc.libraries import need_system

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

MODULE = Path(__file__).with_name("cases_late_bytes.py")
CASES = [
    "contiguous",
    "strided",
    "transposed",
    "resharder",
    "resharder_strided",
    "a_sender_that_comes_late",
]


def _run(shm: str, library: str, freezes: str) -> WorldResult:
    env = {"MESHCAST_SHM": shm, "MESHCAST_TRANSPORT": "ucx", "MESHCAST_UCX": library, "FREEZES": freezes}
    return run_world(MODULE, 2, limit=250, env=env)


def test_control() -> None:
    """Where the sender is not frozen the same calls end with all their bytes."""
    world = _run("0", "wheel", "0")
    for case in CASES[:-1]:
        world.check(case)
    world.check_ends()


@pytest.fixture(
    scope="module",
    params=[("1", "wheel"), ("0", "wheel"), ("0", "system")],
    ids=lambda param: "shared memory" if param[0] == "1" else f"ucx of the {param[1]}",
)
def world(request: pytest.FixtureRequest) -> WorldResult:
    if request.param[1] == "system":
        need_system()
    return _run(*request.param, "1")


@pytest.mark.parametrize("case", CASES)
def test_late_bytes(world: WorldResult, case: str) -> None:
    world.check(case)
    world.check_ends()
