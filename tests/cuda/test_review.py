"""Doubts of docs/cuda.md that only hardware can answer, between processes; see cases_review.py."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from multiproc.devices import GPU
from multiproc.harness import WorldResult, run_world

sys.path.append(str(Path(__file__).parent))
import pace

pytestmark = [pytest.mark.gpu(on_cpu=True), pytest.mark.timeout(300)]

MODULE = Path(__file__).with_name("cases_review.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])
# On one GPU, over CUDA IPC. Without torch's cache allocations of CUDA may be smaller than what is mapped of
# them, and every free goes to the GPU. With one queue of the hardware streams are in each other's way.
SETTINGS = {
    "three on a GPU": (3, {}),
    "without a cache": (2, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    "with one queue": (3, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
}


@pytest.fixture(scope="module", params=[*SETTINGS, "a GPU for each"] if GPU == "cuda" else ["three on a GPU"])
def world(request: pytest.FixtureRequest) -> WorldResult:
    if request.param == "a GPU for each":
        if torch.cuda.device_count() < 2:
            pytest.skip("NCCL has one rank for each GPU, and there are fewer than two")
        return run_world(MODULE, min(torch.cuda.device_count(), 7), limit=280.0)
    ranks, more = SETTINGS[request.param]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    env = {"CUDA_VISIBLE_DEVICES": visible, "MESHCAST_CUDA_TRANSPORT": "auto", **more}
    return run_world(MODULE, ranks, limit=280.0, env=env)


@pytest.mark.parametrize("case", CASES)
def test_review(world: WorldResult, case: str) -> None:
    world.check(case)


def test_no_call_waited_for_a_busy_stream(world: WorldResult) -> None:
    case = "nothing_waits_for_a_busy_stream"
    world.check(case)
    values = [world.value(case, rank) for rank in range(len(world.ranks))]
    if None in values:
        pytest.skip("torch itself waits without its cache")
    paces = [pace.Pace(**value) for value in values]
    found = pace.waited(paces)
    assert found != "a fault", f"calls waited for another stream: {paces}"
    if found:
        pytest.skip(f"processes take turns on this GPU, which says nothing: {paces[0]}")


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
