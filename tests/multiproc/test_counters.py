"""What meshcast.counters() says of real calls; see cases_counters.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(150)

MODULE = Path(__file__).with_name("cases_counters.py")
_LISTS = dict(re.findall(r"^(\w+) = \[(.*?)\]$", MODULE.read_text(), re.MULTILINE | re.DOTALL))
CASES, MORE = (re.findall(r"\w+", _LISTS[name]) for name in ("CASES", "IN_SHARED_MEMORY"))


@pytest.fixture(scope="module")
def in_shared_memory() -> WorldResult:
    return run_world(MODULE, 3, env={"MESHCAST_SHM": "1"})


@pytest.fixture(scope="module")
def over_the_network() -> WorldResult:
    return run_world(MODULE, 3, env={"MESHCAST_SHM": "0"})


@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_counted_in_shared_memory(in_shared_memory: WorldResult, case: str) -> None:
    in_shared_memory.check(case)


@pytest.mark.parametrize("case", CASES)
def test_counted_over_the_network(over_the_network: WorldResult, case: str) -> None:
    over_the_network.check(case)


def test_processes_end_cleanly(in_shared_memory: WorldResult, over_the_network: WorldResult) -> None:
    in_shared_memory.check_ends()
    over_the_network.check_ends()
