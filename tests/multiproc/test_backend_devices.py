"""Backend "meshcast" over both devices, where there is no GPU; see cases_backend_devices.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from multiproc.harness import WorldResult, run_world

pytestmark = [
    pytest.mark.timeout(270),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/cuda has it move something"),
]

MODULE = Path(__file__).with_name("cases_backend_devices.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])


@pytest.fixture(scope="module", params=["OFF", "DETAIL"])
def world(request: pytest.FixtureRequest) -> WorldResult:
    return run_world(MODULE, 3, backend="meshcast", env={"TORCH_DISTRIBUTED_DEBUG": request.param})


@pytest.mark.parametrize("case", CASES)
def test_backend_devices(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
