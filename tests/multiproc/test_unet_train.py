"""The U-Transformer example under torchrun: skip connections over unlike meshes, equal to one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 150  # seconds for one launch; it takes about 10 on an idle machine

pytestmark = pytest.mark.timeout(LIMIT + 30)


@pytest.mark.parametrize(
    ("stages", "schedule"),
    [
        pytest.param("2,3", "Eager1F1B", marks=pytest.mark.slow),
        pytest.param("1,2x2", "ZBH1", marks=pytest.mark.slow),
        ("1x2,2,1", "1F1B"),
    ],
)
def test_skip_connections_over_unlike_meshes_train_like_one_process(
    stages: str, schedule: str, tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "5"]
    command = [*launch, str(ROOT / "examples/unet/train.py"), "--metrics", str(metrics)]
    command += f"--model nano --stages {stages} --schedule {schedule} --steps 3 --batch 24 --verify".split()
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record for record in steps if record["event"] == "step"]
    assert [record["step"] for record in steps] == [1, 2, 3]
    for record in steps:
        assert abs(record["loss"] - record["reference_loss"]) <= 1e-5
        assert max(record["gradient_differences"]) <= 1e-5
        assert record["moved_bytes"] > 0
    assert steps[-1]["loss"] < steps[0]["loss"]
