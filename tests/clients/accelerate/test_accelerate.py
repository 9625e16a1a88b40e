"""accelerate's prepare_pippy gives the same with the pipelines of torch and of meshcast, and what one process
gives; see program.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

PROGRAM = Path(__file__).with_name("program.py")
ROOT = Path(__file__).resolve().parents[3]
RANKS = 3
COMPARED = ("layers by themselves", "one more micro-batch", "padded", "by keywords")
LIMIT = 240.0


@pytest.fixture(scope="module", params=["torch", "meshcast"])
def package(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def found(package: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict]]:
    """By rank, what its cases gave."""
    folder = tmp_path_factory.mktemp(package)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "python"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RES_OPTIONS": "attempts:0",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += ["--redirects=3", f"--log-dir={folder}", str(PROGRAM), package]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    ranks = []
    for rank in range(RANKS):
        (output,) = folder.glob(f"**/{rank}/stdout.log")
        (errors,) = folder.glob(f"**/{rank}/stderr.log")
        text = output.read_text()
        assert done.returncode == 0, f"rank {rank}:\n{text[-2000:]}\n{errors.read_text()[-5000:]}"
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        ranks.append({line["case"]: line for line in lines})
    return ranks


@pytest.mark.parametrize("name", COMPARED)
def test_equals_one_process(package: str, found: list[dict[str, dict]], name: str) -> None:
    for rank, cases in enumerate(found):
        assert cases[name]["home"].startswith(package), cases[name]
        if rank == RANKS - 1:
            assert cases[name]["far"] is not None and cases[name]["far"] <= 1e-5, cases[name]
        else:
            assert cases[name]["far"] is None, cases[name]
