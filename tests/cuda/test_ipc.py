"""reshard between processes that share one GPU, over CUDA IPC; see cases_ipc.py."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from multiproc.devices import GPU
from multiproc.harness import WorldResult, run_world

pytestmark = [pytest.mark.gpu(on_cpu=True), pytest.mark.timeout(400)]

MODULE = Path(__file__).with_name("cases_ipc.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])
# What torch allocates by: memory of the other two cannot be exported, and goes through memory that can.
ALLOCATORS = {"segments": "", "expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}


def one_gpu(**more: str) -> dict[str, str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {"CUDA_VISIBLE_DEVICES": visible, "MESHCAST_CUDA_TRANSPORT": "auto", **more}


WORLDS = (
    [(2, "segments"), (4, "segments"), (3, "expandable"), (3, "async")]
    if GPU == "cuda"
    else [(3, "segments")]
)


@pytest.fixture(scope="module", params=WORLDS, ids=str)
def world(request: pytest.FixtureRequest) -> WorldResult:
    size, allocator = request.param
    return run_world(MODULE, size, limit=380.0, env=one_gpu(PYTORCH_CUDA_ALLOC_CONF=ALLOCATORS[allocator]))


@pytest.mark.parametrize("case", CASES)
def test_on_one_gpu(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()


@pytest.mark.parametrize("victim", [0, 2] if GPU == "cuda" else [0])
def test_a_rank_that_is_killed(victim: int) -> None:
    world = run_world(MODULE, 3, limit=380.0, env=one_gpu(VICTIM=str(victim)))
    world.check("a_rank_that_is_killed_is_named", [rank for rank in range(3) if rank != victim])
    world.check_ends({victim: -signal.SIGKILL})
