"""The GPT with experts on 2 + 3 ranks: experts over ranks, and training in stages, equal to one process."""

import re
from pathlib import Path
from typing import Any

import pytest
from multiproc import training_runs
from multiproc.harness import WorldResult, run_world
from multiproc.training_runs import launch

LIMIT = 150  # seconds for one launch; it takes about 10 on an idle machine
STEPS = 6
# Five experts: 3 and 2 on the ranks of a stage of two, 2, 2 and 1 on those of one of three.
NANO = (
    f"--model nano --experts 5 --batch 12 --microbatches 2 --steps {STEPS} --warmup 3 --eval-every 3".split()
)
MODULE = Path(__file__).with_name("cases_moe.py")
CASES = re.findall(r"\w+", MODULE.read_text().split("CASES = [")[1])

pytestmark = pytest.mark.timeout(LIMIT + 60)


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(MODULE, 5)


@pytest.mark.parametrize("case", CASES)
def test_experts(world: WorldResult, case: str) -> None:
    world.check(case)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()


def train(folder: Path, *arguments: str | Path) -> list[dict[str, Any]]:
    """The step records of one launch that must succeed."""
    return training_runs.train("moe/train.py", folder, *NANO, *arguments, limit=LIMIT)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A verified run with a checkpoint after half of its steps."""
    folder = tmp_path_factory.mktemp("moe")
    records = train(
        folder, "--stages", "2,3", "--verify", "--checkpoint", folder / "state", "--checkpoint-every", "3"
    )
    (folder / "state" / f"step-{STEPS:06d}").rename(
        folder / "last"
    )  # so that --resume starts from the middle
    return folder, records


def test_other_expert_parallel_degrees_train_like_one_process(
    whole_run: tuple[Path, list[dict[str, Any]]],
) -> None:
    _, records = whole_run
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    for record in records:
        assert abs(record["loss"] - record["reference_loss"]) <= 1e-5
        assert max(record["gradient_differences"]) <= 1e-6
        # Of each sample 32 x 32 of hidden state and the imbalance cross once, their gradients come back.
        assert record["moved_bytes"] == 2 * 12 * (32 * 32 + 1) * 4
    assert records[-1]["loss"] < records[0]["loss"] - 0.3


@pytest.mark.slow
def test_a_run_resumed_with_other_expert_layouts_continues_the_curve(
    whole_run: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    folder, records = whole_run
    resumed = train(tmp_path, "--stages", "3,2", "--checkpoint", folder / "state", "--resume")
    rest = records[STEPS // 2 :]
    assert [r["step"] for r in resumed] == [r["step"] for r in rest]
    assert [r["loss"] for r in resumed] == pytest.approx([r["loss"] for r in rest], rel=0, abs=1e-5)
    assert resumed[-1]["held_out_loss"] == pytest.approx(rest[-1]["held_out_loss"], rel=0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "--stages 1x2,3 --tied --recompute --schedule ZBH1",
        "--stages 2,3 --experts 4 --schedule Eager1F1B",  # one of three ranks has no expert
        "--stages 2x2,1 --experts 3 --active 1 --accumulate 2 --microbatches 1",
    ],
)
def test_other_layouts_train_like_one_process(options: str, tmp_path: Path) -> None:
    records = train(tmp_path, *options.split(), "--verify", "--steps", "3")
    for record in records:
        assert abs(record["loss"] - record["reference_loss"]) <= 1e-5
        assert max(record["gradient_differences"]) <= 1e-6


@pytest.mark.slow
def test_bf16_stays_near_one_process_in_bf16(tmp_path: Path) -> None:
    records = train(tmp_path, "--stages", "2,3", "--precision", "bf16", "--verify", "--tolerance", "5e-3")
    assert records[-1]["loss"] < records[0]["loss"] - 0.2


@pytest.mark.slow
def test_the_model_is_served_with_its_experts_over_all_ranks() -> None:
    done = launch("moe/serve.py", *NANO, "--stages", "2,3", "--steps", "3", limit=LIMIT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = re.search(r"held out: (\S+) in stages on 2,3, (\S+) over all 5 ranks", done.stdout)
    assert found is not None, done.stdout
    assert float(found[2]) == pytest.approx(float(found[1]), rel=0, abs=1e-5)
