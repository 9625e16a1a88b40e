"""The GPT example and the quickstart under torchrun, 2 + 3 ranks: equal to one process, and resumable."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from multiproc import training_runs
from multiproc.training_runs import ENVIRONMENT, ROOT, launch

LIMIT = 150  # seconds for one launch; it takes about 10 on an idle machine
STEPS = 6
NANO = f"--model nano --batch 12 --microbatches 2 --steps {STEPS} --warmup 3 --eval-every 3".split()

pytestmark = pytest.mark.timeout(LIMIT + 30)


def train(folder: Path, *arguments: str | Path) -> list[dict[str, Any]]:
    """The step records of one launch that must succeed."""
    return training_runs.train("gpt/train.py", folder, *NANO, *arguments, limit=LIMIT)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A verified run with a checkpoint after half of its steps, and after all of them."""
    folder = tmp_path_factory.mktemp("gpt")
    checkpoints = ["--checkpoint", folder / "state", "--checkpoint-every", str(STEPS // 2)]
    records = train(folder, "--stages", "2,3", "--verify", *checkpoints)
    newest = folder / "state" / f"step-{STEPS:06d}"
    assert newest.is_dir()
    newest.rename(folder / "last")  # so that --resume starts from the middle
    return folder, records


def test_unlike_meshes_train_like_one_process(whole_run: tuple[Path, list[dict[str, Any]]]) -> None:
    _, records = whole_run
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    for record in records:
        assert abs(record["loss"] - record["reference_loss"]) <= 1e-5
        assert len(record["gradient_differences"]) == 2
        assert max(record["gradient_differences"]) <= 1e-5
        # Each sample of hidden state crosses once, its gradient comes back: 12 x 32 x 32 float32 both ways.
        assert record["moved_bytes"] == 2 * 12 * 32 * 32 * 4
    assert records[-1]["loss"] < records[0]["loss"] - 0.3


@pytest.mark.parametrize(
    ("layout", "tolerance"),
    [
        pytest.param(("--stages", "2,3"), 0.0, marks=pytest.mark.slow),
        pytest.param(
            ("--stages", "2x2,1", "--schedule", "Eager1F1B", "--microbatches", "3"),
            1e-5,
            marks=pytest.mark.slow,
        ),
        (("--stages", "3,2", "--accumulate", "2", "--microbatches", "1"), 1e-5),
    ],
    ids=["same layout", "another layout", "another layout, gradients of two passes"],
)
def test_a_resumed_run_continues_the_curve(
    whole_run: tuple[Path, list[dict[str, Any]]], tmp_path: Path, layout: tuple[str, ...], tolerance: float
) -> None:
    folder, records = whole_run
    for step in (folder / "state").iterdir():
        if step.name != f"step-{STEPS // 2:06d}":
            step.rename(tmp_path / step.name)
    resumed = train(tmp_path, *layout, "--checkpoint", folder / "state", "--resume")
    rest = records[STEPS // 2 :]
    assert [r["step"] for r in resumed] == [r["step"] for r in rest]
    assert [r["loss"] for r in resumed] == pytest.approx([r["loss"] for r in rest], rel=0, abs=tolerance)
    assert resumed[-1]["held_out_loss"] == pytest.approx(rest[-1]["held_out_loss"], rel=0, abs=tolerance)


@pytest.mark.slow
def test_tensor_parallel_tied_and_recomputed_trains_like_one_process(tmp_path: Path) -> None:
    records = train(
        tmp_path,
        *("--stages", "1x2,3", "--tied", "--recompute", "--verify", "--steps", "3"),
        *("--tensorboard", tmp_path / "board", "--profile", tmp_path / "profile"),
    )
    for record in records:
        assert abs(record["loss"] - record["reference_loss"]) <= 1e-5
        assert max(record["gradient_differences"]) <= 1e-5
    assert list((tmp_path / "board").glob("events.*"))
    traces = [json.loads(path.read_text()) for path in (tmp_path / "profile").glob("rank?.json")]
    assert len(traces) == 5
    for trace in traces:  # of the last training step, not of the evaluation behind it
        names = {event["name"] for event in trace["traceEvents"]}
        assert any(re.fullmatch(r"\d+B\d+", name) for name in names), names


@pytest.mark.slow
def test_bf16_stays_near_one_process_in_bf16(tmp_path: Path) -> None:
    records = train(tmp_path, "--stages", "2x2,1", "--precision", "bf16", "--verify")
    assert records[-1]["loss"] < records[0]["loss"] - 0.2


@pytest.mark.slow
def test_text_is_drawn_from_a_checkpoint(whole_run: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = whole_run
    (folder / "sampled").mkdir()
    (folder / "sampled" / f"step-{STEPS:06d}").symlink_to(folder / "last")

    def sample(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "examples/gpt/sample.py"), *arguments]
        return subprocess.run(
            command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT, check=False
        )

    done = sample(str(folder / "sampled"), "--prompt", "import ", "--length", "40")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("import ")
    assert len(done.stdout) > len("import ") + 1
    done = sample(str(folder / "none"))
    assert (done.returncode, "no checkpoint in" in done.stderr) == (2, True)


@pytest.mark.slow
def test_a_difference_above_the_tolerance_fails_the_run() -> None:
    done = launch(
        "gpt/train.py",
        *NANO,
        "--stages",
        "2,3",
        "--steps",
        "2",
        "--verify",
        "--tolerance",
        "1e-12",
        limit=LIMIT,
    )
    assert done.returncode != 0
    assert "exceeds" in done.stdout


def test_ranks_that_do_not_fit_are_refused_in_one_sentence() -> None:
    done = launch("gpt/train.py", "--stages", "2,2", limit=LIMIT)
    assert done.returncode != 0
    assert (
        "train.py: error: --stages 2,2 needs 4 ranks, but 5 started; use torchrun --nproc-per-node 4"
        in done.stderr
    )
    assert done.stderr.count("train.py: error") == 1


def test_quickstart_prints_what_every_rank_holds() -> None:
    done = launch("quickstart.py", limit=LIMIT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(done.stdout.splitlines()) == [
        "rank 0: x [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]  y []",
        "rank 1: x [[12, 13, 14, 15, 16, 17], [18, 19, 20, 21, 22, 23]]  y []",
        "rank 2: x []  y [[0, 1], [6, 7], [12, 13], [18, 19]]",
        "rank 3: x []  y [[2, 3], [8, 9], [14, 15], [20, 21]]",
        "rank 4: x []  y [[4, 5], [10, 11], [16, 17], [22, 23]]",
    ]
