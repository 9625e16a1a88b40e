"""Pipelines on GPUs: one rank with both stages, two ranks on one GPU, and a rank for each GPU; see
cases_pipeline.py. The examples with both stages on one GPU, compared with one process."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from multiproc import training_runs
from multiproc.devices import GPU, gpus
from multiproc.harness import WorldResult, run_world

pytestmark = [pytest.mark.gpu(on_cpu=True), pytest.mark.timeout(600)]

MODULE = Path(__file__).with_name("cases_pipeline.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])
WORLDS = (
    ["one rank", "two ranks on one GPU", "a rank for each GPU"] if GPU == "cuda" else ["a rank for each GPU"]
)
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}  # for the NCCL that can


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest) -> WorldResult:
    count = gpus(5)
    if request.param == "a rank for each GPU" and count < 2:
        pytest.skip("there is one GPU, which the run with two ranks shares")
    ranks = {"one rank": 1, "two ranks on one GPU": 2}.get(request.param, count)
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    env = {**SHARED, "CUDA_VISIBLE_DEVICES": first} if "one GPU" in request.param else SHARED
    return run_world(MODULE, ranks, backend="meshcast", env=env, limit=500)


@pytest.mark.parametrize("case", CASES)
def test_pipeline(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()


@pytest.mark.parametrize("precision", ["float32", "bf16"] if GPU == "cuda" else ["float32"])
@pytest.mark.parametrize("program", ["gpt", "unet"])
def test_examples_train_as_one_process(
    program: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--verify compares losses and gradients of every step: float32 within 1e-4, bf16 within the program's
    own tolerance."""
    for package in ("rich", "sklearn") if program == "unet" else ("rich",):
        pytest.importorskip(package, reason=f"the example {program} needs {package}")
    monkeypatch.setitem(training_runs.ENVIRONMENT, "NCCL_MULTI_RANK_GPU_ENABLE", "1")
    tolerance = ["--tolerance", "1e-4"] if precision == "float32" else []
    records = training_runs.train(
        f"{program}/train.py", tmp_path, "--device", GPU, "--model", "nano", "--stages", "1,1", "--batch",
        "8", "--microbatches", "2", "--steps", "4", "--verify", "--precision", precision, *tolerance, ranks=2,
    )  # fmt: skip
    assert len(records) == 4
    assert all(record["moved_bytes"] > 0 for record in records)
