"""Plain tensors, state dicts and compiled functions on GPUs, one rank for each; see cases_wiring.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from multiproc.devices import gpus
from multiproc.harness import WorldResult, run_world

pytestmark = [pytest.mark.gpu(on_cpu=True), pytest.mark.timeout(300)]

MODULE = Path(__file__).with_name("cases_wiring.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(MODULE, gpus())


@pytest.mark.parametrize("case", CASES)
def test_wiring(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
