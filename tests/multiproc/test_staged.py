"""reshard between CPUs and GPUs, with fake GPUs: what it moves (cases_staged.py), and what it refuses and
how it fails (cases_staged_faults.py). tests/cuda runs the same on hardware."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from multiproc.harness import WorldResult, run_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(270)]

FOLDER = Path(__file__).parent
MODULES = {"cases_staged": 7, "cases_staged_faults": 5}


def _cases(module: str) -> list[str]:
    return re.findall(r"\w+", (FOLDER / f"{module}.py").read_text().split("CASES = [")[1])


@pytest.fixture(scope="module")
def worlds() -> dict[str, WorldResult]:
    return {module: run_world(FOLDER / f"{module}.py", size) for module, size in MODULES.items()}


@pytest.mark.parametrize(
    ("module", "case"), [(module, case) for module in MODULES for case in _cases(module)]
)
def test_staged(worlds: dict[str, WorldResult], module: str, case: str) -> None:
    worlds[module].check(case)


@pytest.mark.parametrize("module", MODULES)
def test_processes_end_cleanly(worlds: dict[str, WorldResult], module: str) -> None:
    worlds[module].check_ends()
