"""examples/huggingface under torchrun: losses equal to one process. Needs requirements-hf.txt."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240  # seconds for one launch; it takes about 20 on an idle machine
pytestmark = [pytest.mark.timeout(LIMIT + 30), pytest.mark.slow]


@pytest.mark.parametrize("arguments", ["gpt2 --stages 1,2", "gpt2 --stages 1,1,1", "unet --stages 2,1"])
def test_losses_equal_those_of_one_process(arguments: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [*torchrun, str(ROOT / "examples/huggingface/train.py"), *arguments.split(), "--steps", "4"]
    paths = [str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(paths), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len([line for line in done.stdout.splitlines() if line.startswith("step ")]) == 4
    assert float(done.stdout.split("largest difference ")[1]) <= 1e-5
