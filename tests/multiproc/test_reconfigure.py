"""Groups whose members change, and hooks; see cases_reconfigure.py."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from multiproc.harness import WorldResult, run_world

pytestmark = [
    pytest.mark.timeout(270),
    pytest.mark.skipif(
        not hasattr(dist, "_reconfigure"),
        reason=f"torch {torch.__version__} cannot change the members of a group: torch 2.14 can",
    ),
]

MODULE = Path(__file__).with_name("cases_reconfigure.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("\nCASES = [")[1])


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(MODULE, 4, backend="meshcast")


@pytest.mark.parametrize("case", CASES)
def test_reconfigure(world: WorldResult, case: str) -> None:
    world.check(case, ranks=[0, 2, 3] if case == CASES[-1] else None)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends({1: -signal.SIGKILL})
