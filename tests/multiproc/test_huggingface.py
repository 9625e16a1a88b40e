"""examples/huggingface under torchrun: losses equal to one process. Needs requirements-hf.txt."""

import os

import pytest
from multiproc.training_runs import ENVIRONMENT, launch

LIMIT = 240  # seconds for one launch; it takes about 20 on an idle machine
pytestmark = [pytest.mark.timeout(LIMIT + 30), pytest.mark.slow]


@pytest.mark.parametrize("arguments", ["gpt2 --stages 1,2", "gpt2 --stages 1,1,1", "unet --stages 2,1"])
def test_losses_equal_those_of_one_process(arguments: str) -> None:
    paths = [ENVIRONMENT["PYTHONPATH"], *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = ENVIRONMENT | {"PYTHONPATH": ":".join(paths), "HF_HUB_OFFLINE": "1"}
    done = launch(
        "huggingface/train.py",
        *arguments.split(),
        "--steps",
        "4",
        ranks=3,
        environment=environment,
        limit=LIMIT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len([line for line in done.stdout.splitlines() if line.startswith("step ")]) == 4
    assert float(done.stdout.split("largest difference ")[1]) <= 1e-5
