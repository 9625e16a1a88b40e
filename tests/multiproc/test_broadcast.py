"""Large broadcasts of backend "meshcast"; see cases_broadcast.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(270)

MODULE = Path(__file__).with_name("cases_broadcast.py")
UNCHECKED, CHECKED = (
    re.findall(r"\w+", MODULE.read_text().split(f"\n{name} = [")[1].split("]")[0])
    for name in ("UNCHECKED", "CHECKED")
)
SURVIVORS = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(MODULE, 5, backend="meshcast")


@pytest.mark.parametrize("case", CHECKED + UNCHECKED)
def test_broadcast(world: WorldResult, case: str) -> None:
    world.check(case, SURVIVORS if case == "a_lost_rank" else None)


def test_a_lost_rank_is_named_in_time(world: WorldResult) -> None:
    found = [world.value("a_lost_rank", rank) for rank in SURVIVORS]
    assert {each["error"] for each in found} <= {"PeerLostError", "AbortedError"}
    assert "PeerLostError" in {each["error"] for each in found}
    assert max(each["elapsed"] for each in found) < 30  # the limit of the call is 30 minutes
    assert max(each["destroyed"] for each in found) < 30


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends({4: 7})


@pytest.mark.slow
def test_broadcast_under_torchs_checks() -> None:
    world = run_world(MODULE, 5, backend="meshcast", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    for case in CHECKED:
        world.check(case)
    world.check_ends()
