"""reshard to another dtype between GPUs, one rank for each, and between processes that share one; see
cases_casts.py."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from multiproc.devices import GPU, gpus
from multiproc.harness import WorldResult, run_world

pytestmark = [pytest.mark.gpu(on_cpu=True), pytest.mark.timeout(300)]

MODULE = Path(__file__).with_name("cases_casts.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])


@pytest.fixture(
    scope="module", params=["a GPU for each", "one GPU for three"] if GPU == "cuda" else ["a GPU for each"]
)
def world(request: pytest.FixtureRequest) -> WorldResult:
    if request.param == "a GPU for each":
        return run_world(MODULE, gpus())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    shared = {"CUDA_VISIBLE_DEVICES": visible, "MESHCAST_CUDA_TRANSPORT": "auto"}
    return run_world(MODULE, 3, limit=280.0, env=shared)


@pytest.mark.parametrize("case", CASES)
def test_casts(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
