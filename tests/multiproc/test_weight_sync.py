"""examples/weight_sync under torchrun, 3 trainers and 2 rollout ranks, against training in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from multiproc.training_runs import launch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpt.config import MODELS
from gpt.data import TextSamples, read_text
from gpt.model import build_stage, loss_fn

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 150  # seconds for one launch; it takes about 10 on an idle machine
pytestmark = pytest.mark.timeout(LIMIT + 60)


def expected_losses(steps: int, every: int) -> dict[int, float]:
    """{version: loss on held-out text} of the training in one process, its weights rounded to bfloat16."""
    samples = TextSamples(read_text(None), MODELS["nano"].seq_len, 0)
    model = build_stage(MODELS["nano"], 0, 1, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    found = {}
    for step in range(1, steps + 1):
        (inputs,), targets = samples.train(step - 1, 24)
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            rounded = build_stage(MODELS["nano"], 0, 1, 1).to(torch.bfloat16)
            rounded.load_state_dict(model.state_dict())
            (inputs,), targets = samples.held_out(0, 16)
            with torch.no_grad():
                found[step] = loss_fn(rounded(inputs), targets).item()
    return found


@pytest.mark.slow
def test_rollouts_have_the_weights_of_each_version(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    done = launch(
        "weight_sync/run.py",
        "--model",
        "nano",
        "--steps",
        "6",
        "--every",
        "2",
        "--metrics",
        metrics,
        limit=LIMIT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    expected = expected_losses(6, 2)
    assert [record["version"] for record in records] == list(expected)
    for record in records:
        # Each version lowers it by 0.2 and more; sums in bfloat16 differ by the cut.
        assert record["held_out_loss"] == pytest.approx(expected[record["version"]], abs=0.02)
        assert record["text"].startswith("def ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trainers", "5"), "--trainers 5 of 5 ranks; use 1 to 4"),
        (("--trainers", "2"), "4 heads cannot be shared evenly by 3 rollout ranks; use --trainers 3"),
        (("--trainers", "3", "--batch", "25"), "--batch 25: 3 trainers cannot share it; use --batch 24"),
        (("--every", "200"), "--every 200: no snapshot within --steps 120; use --every 120"),
        (("--lr", "0"), "--lr 0.0: must be above 0, as in --lr 0.003"),
        (("--trainer-s", "3"), "--trainer-s: no such option; use --trainers, or see --help"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(arguments: tuple[str, ...], message: str) -> None:
    script = str(ROOT / "examples/weight_sync/run.py")
    env = os.environ | {"WORLD_SIZE": "5", "RANK": "0"}
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stderr.strip()) == (2, f"run.py: error: {message}")
