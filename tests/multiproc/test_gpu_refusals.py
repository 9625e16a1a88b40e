"""Calls for GPUs on a machine, or in a build, that has none; see cases_gpu_refusals.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from multiproc.harness import WorldResult, run_world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(270),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/cuda has it move something"),
]

MODULE = Path(__file__).with_name("cases_gpu_refusals.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(MODULE, 3)


@pytest.mark.parametrize("case", CASES)
def test_gpu_refusals(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
