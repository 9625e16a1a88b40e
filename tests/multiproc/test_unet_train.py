"""The U-Transformer example under torchrun: skip connections over different meshes, equal to one process."""

from pathlib import Path

import pytest
from multiproc.training_runs import LIMIT, train

SMALL = ["--model", "nano", "--batch", "24"]

pytestmark = pytest.mark.timeout(2 * LIMIT + 30)


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
    options = ["--stages", stages, "--schedule", schedule, "--steps", "3", "--verify"]
    steps = train("unet/train.py", tmp_path, *SMALL, *options)
    assert [record["step"] for record in steps] == [1, 2, 3]
    for record in steps:
        assert abs(record["loss"] - record["reference_loss"]) <= 1e-5
        assert max(record["gradient_differences"]) <= 1e-5
        assert record["moved_bytes"] > 0
    assert steps[-1]["loss"] < steps[0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("2,3", "2x2,1 --schedule Eager1F1B --microbatches 3"),
        ("1x2,3 --schedule ZBH1", "4,1 --schedule GPipe --microbatches 2"),
        ("1,2x2", "1x2,2,1 --accumulate 2 --microbatches 2"),
    ],
    ids=["to tensor parallelism", "from tensor parallelism", "to other stages"],
)
def test_a_run_resumed_on_another_layout_continues_the_curve(first: str, then: str, tmp_path: Path) -> None:
    """The part before the checkpoint, and all of it, are of the first layout."""
    state = tmp_path / "state"
    several = [*SMALL, "--steps", "6", "--warmup", "3", "--checkpoint", str(state)]
    whole = train("unet/train.py", tmp_path, *several, "--checkpoint-every", "3", "--stages", *first.split())
    (state / "step-000006").rename(tmp_path / "last")  # so that --resume starts from the middle
    rest = train("unet/train.py", tmp_path, *several, "--resume", "--stages", *then.split())
    assert [record["step"] for record in whole] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in rest] == [4, 5, 6]
    expected = [record["loss"] for record in whole[3:]]
    assert [record["loss"] for record in rest] == pytest.approx(expected, rel=0, abs=1e-5)
    assert rest[-1]["held_out_loss"] == pytest.approx(whole[-1]["held_out_loss"], rel=0, abs=1e-5)
    assert whole[-1]["loss"] < whole[0]["loss"]
