"""Backend "meshcast" on GPUs against plain NCCL: with one rank, and with as many as there are GPUs; see
cases_backend.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from multiproc.devices import GPU, gpus
from multiproc.harness import WorldResult, run_world

pytestmark = [pytest.mark.gpu(on_cpu=True), pytest.mark.timeout(600)]

MODULE = Path(__file__).with_name("cases_backend.py")
WORLDS = (
    ["one rank", "a rank for each GPU", "the same under DETAIL"] if GPU == "cuda" else ["a rank for each GPU"]
)
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest) -> WorldResult:
    ranks = 1 if request.param == "one rank" else gpus()
    if request.param == "a rank for each GPU" and ranks == 1:
        pytest.skip("there is one GPU, which the run with one rank has")
    level = "DETAIL" if "DETAIL" in request.param else "OFF"
    return run_world(MODULE, ranks, backend="meshcast", env={"TORCH_DISTRIBUTED_DEBUG": level})


@pytest.mark.parametrize("case", CASES)
def test_backend(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
