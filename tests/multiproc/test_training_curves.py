"""Fifty steps of both models over different layouts follow the curve of one process and end with its weights.

With MESHCAST_CURVES=FOLDER the curves are left there, for `python -m benchmarks curves FOLDER`.
"""

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from multiproc.training_runs import LIMIT, launch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

STEPS = 50
# At a high learning rate Adam makes whole steps of the rounding of tiny gradients: both sides would drift.
COMMON = f"--batch 12 --steps {STEPS} --warmup 10 --lr 1e-3 --checkpoint-every {STEPS}".split()
MODELS = {"gpt": ["--model", "nano", "--layers", "4"], "unet": ["--model", "nano"]}
LAYOUTS = {
    "gpt": [
        "2,3 --schedule 1F1B --microbatches 2",
        "2x2,1 --schedule Eager1F1B --microbatches 3",
        "1x2,3 --schedule ZBH1 --microbatches 4",
        "4,1 --schedule GPipe --microbatches 3",
        "1,1x2,2 --schedule Eager1F1B --microbatches 6 --recompute",
        "1,1,1,2 --schedule 1F1B --microbatches 6",
    ],
    "unet": [
        "2,3 --schedule Eager1F1B --microbatches 2",
        "1x2,3 --schedule 1F1B --microbatches 2",
        "2x2,1 --schedule Eager1F1B --microbatches 3",
        "4,1 --schedule GPipe --microbatches 3",
        "1,4 --schedule ZBH1 --microbatches 3 --recompute",
        "1,1,1,2 --schedule 1F1B --microbatches 6",
    ],
}

pytestmark = [pytest.mark.timeout(2 * LIMIT + 60), pytest.mark.slow]

Result = tuple[list[float], dict[str, torch.Tensor]]


def train(name: str, folder: Path, layout: str, ranks: int) -> Result:
    """Losses by step, and the weights at the end."""
    outputs = ["--metrics", str(folder / "metrics.jsonl"), "--checkpoint", str(folder / "state")]
    options = [*MODELS[name], *COMMON, *outputs, "--stages", *layout.split()]
    done = launch(f"{name}/train.py", *options, ranks=ranks)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["event"] == "step"]
    saved = folder / "state" / f"step-{STEPS:06d}"
    described = dcp.FileSystemReader(saved).read_metadata().state_dict_metadata
    weights = {
        key: torch.empty(value.size)
        for key, value in described.items()
        if key.startswith("model.") and isinstance(value, TensorStorageMetadata)
    }
    dcp.load(weights, checkpoint_id=saved, no_dist=True)
    return losses, weights


def keep(name: str, layout: str, losses: list[float], weights_differ: float) -> None:
    """Leave a curve in the folder of MESHCAST_CURVES. weights_differ: by how much at most, at the end."""
    if curves := os.environ.get("MESHCAST_CURVES"):
        Path(curves).mkdir(parents=True, exist_ok=True)
        curve = {"model": name, "layout": layout, "losses": losses, "weights_differ": weights_differ}
        Path(curves, f"{name} {layout}.json").write_text(json.dumps(curve) + "\n")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    layout = "1 --microbatches 1"

    @cache
    def run(name: str) -> Result:
        result = train(name, tmp_path_factory.mktemp(name), layout, 1)
        keep(name, layout, result[0], 0.0)
        return result

    return run


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in MODELS for layout in LAYOUTS[name]])
def test_layouts_follow_one_process(
    one_process: Callable[[str], Result], tmp_path: Path, name: str, layout: str
) -> None:
    losses, weights = train(name, tmp_path, layout, 5)
    expected_losses, expected_weights = one_process(name)
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert losses[-1] < losses[0] - 0.2
    assert weights.keys() == expected_weights.keys()
    differ = [float((weights[key] - value).abs().max()) for key, value in expected_weights.items()]
    keep(name, layout, losses, max(differ))
    for key, expected in expected_weights.items():
        torch.testing.assert_close(
            weights[key], expected, rtol=0, atol=1e-3, msg=lambda m, k=key: f"{k}: {m}"
        )
