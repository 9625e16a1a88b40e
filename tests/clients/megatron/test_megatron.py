"""meshcast.integrations.megatron; see cases_megatron.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from multiproc.harness import WorldResult

pytestmark = pytest.mark.timeout(270)

CASES = Path(__file__).with_name("cases_megatron.py")
RANKS, VICTIM = 4, 3


def test_megatron(world: WorldResult, case: str, ranks: list[int]) -> None:
    world.check(case, ranks)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends({VICTIM: -signal.SIGKILL})
