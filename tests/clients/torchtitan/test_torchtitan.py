"""torchtitan trains the same with the pipelines of torch and of meshcast: losses and gradient norms of three
steps, in all digits that it prints, pipeline degree 2 by FSDP2 of degree 2 on four ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

PROGRAM = Path(__file__).with_name("program.py")
ROOT = Path(__file__).resolve().parents[3]
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")
OURS = ("Eager1F1B", "ZBH1")  # which torch has not: the sums are those of 1F1B
STEP = re.compile(r"step: *(\d+).*?loss: *(-?[\d.]+).*?grad_norm: *([\d.]+)")
LIMIT = 400.0


Steps = dict[int, list[tuple[str, ...]]]  # by rank


def trained(folder: Path, package: str, schedules: Sequence[str]) -> dict[str, Steps]:
    """{schedule: {rank: [(step, loss, gradient norm), ...]}}"""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "python"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command += ["--redirects=3", f"--log-dir={folder / package}"]
    command += [str(PROGRAM), str(folder), package, *schedules]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    found: dict[str, Steps] = {}
    for rank in range(4):
        (output,) = (folder / package).glob(f"**/{rank}/stdout.log")
        (errors,) = (folder / package).glob(f"**/{rank}/stderr.log")
        text = re.sub(r"\x1b\[[0-9;]*m", "", output.read_text())
        assert done.returncode == 0, f"rank {rank}:\n{text[-6000:]}\n{errors.read_text()[-3000:]}"
        for part in text.split("SCHEDULE ")[1:]:
            found.setdefault(part.split()[0], {})[rank] = STEP.findall(part)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchtitan")
    subprocess.run([sys.executable, str(PROGRAM), "--assets", str(folder)], check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def torchs(folder: Path) -> dict:
    return trained(folder, "torch", SCHEDULES)


@pytest.fixture(scope="module")
def ours(folder: Path) -> dict:
    return trained(folder, "meshcast", SCHEDULES + OURS)


@pytest.mark.parametrize("schedule", SCHEDULES + OURS)
def test_same_digits(torchs: dict, ours: dict, schedule: str) -> None:
    expected = torchs[schedule if schedule in SCHEDULES else "1F1B"]
    assert sorted(expected) == [0, 1, 2, 3]
    for rank, steps in expected.items():
        assert [step for step, _, _ in steps] == ["1", "2", "3"]
        assert ours[schedule][rank] == steps, f"rank {rank}"
    assert any(float(steps[0][1]) > 5 for steps in expected.values())
