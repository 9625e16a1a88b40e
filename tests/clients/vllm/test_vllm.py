"""meshcast.integrations.vllm; see cases_vllm.py."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(270)

MODULE = Path(__file__).with_name("cases_vllm.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])
VICTIM = 4


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(MODULE, 5, limit=200.0)


@pytest.mark.parametrize("case", CASES)
def test_vllm(world: WorldResult, case: str) -> None:
    world.check(case, [0, 1, 2, 3] if case == "a_rank_is_lost" else None)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends({VICTIM: -signal.SIGKILL})
