"""WeightReader at the edges of being served by ranks that push; see cases_trainer_reader_edges.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = pytest.mark.timeout(270)

MODULE = Path(__file__).with_name("cases_trainer_reader_edges.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1].split("]")[0])


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(MODULE, 4)


@pytest.mark.parametrize("case", CASES)
def test_reads(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
