"""Every schedule at every small size: valid, free of deadlock, with the figures its docstring promises."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path

import pytest
from meshcast.pipelining import ScheduleError, lower, simulate, validate
from meshcast.pipelining.schedules import build
from meshcast.pipelining.trace import format_timeline
from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "schedules"
STAGES = range(1, 9)
MICROBATCHES = range(1, 17)
TRAINING = ("GPipe", "1F1B", "Eager1F1B")


def peak(name: str, stages: int, microbatches: int, stage: int) -> int:
    """The formulas of the docstrings."""
    return {
        "GPipe": microbatches,
        "1F1B": min(microbatches, stages - stage),
        "Eager1F1B": min(microbatches, 2 * (stages - stage) - 1),
    }[name]


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("name", TRAINING)
def test_valid_with_the_promised_activations(name: str, stages: int) -> None:
    for microbatches in MICROBATCHES:
        actions = build(name, stages, microbatches)
        validate(lower(actions), stages, microbatches)
        report = simulate(actions, transfer=0.25)
        assert report.peak_activations == [peak(name, stages, microbatches, stage) for stage in range(stages)]


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("name", TRAINING)
def test_valid_with_few_buffers(name: str, ahead: int) -> None:
    for stages in STAGES:
        for microbatches in (1, 2, 3, 7, 16):
            validate(lower(build(name, stages, microbatches), ahead=ahead), stages, microbatches)


@pytest.mark.parametrize("name", TRAINING)
def test_valid_with_skip_connections(name: str) -> None:
    links = [(0, 1), (1, 2), (2, 3), (0, 2), (0, 3)]
    for microbatches in MICROBATCHES:
        validate(lower(build(name, 4, microbatches), links), 4, microbatches, links=links)


def test_forward_only_is_valid() -> None:
    for stages in STAGES:
        for microbatches in MICROBATCHES:
            validate(
                lower(build("ForwardOnly", stages, microbatches)), stages, microbatches, forward_only=True
            )


@pytest.mark.parametrize("name", TRAINING)
def test_free_transfers_take_the_textbook_time(name: str) -> None:
    for stages in STAGES:
        for microbatches in MICROBATCHES:
            report = simulate(name, stages, microbatches, forward=1.0, backward=2.0)
            assert report.makespan == pytest.approx(3.0 * (microbatches + stages - 1))
            assert report.bubble_fraction == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize("stages", range(2, 6))
def test_1f1b_is_that_of_torch(stages: int) -> None:
    for microbatches in range(stages, 17):
        for stage in range(stages):
            warmup = stages - stage - 1  # torch counts the forwards before the first forward-backward pair
            theirs = _get_1f1b_rank_ops(
                1, stages, warmup, microbatches - warmup, warmup, stage,
                lambda _, stage=stage: stage, lambda _, stage=stage: stage,
            )  # fmt: skip
            ours = build("1F1B", stages, microbatches)[stage]
            assert [str(action) for action in theirs if action is not None] == [
                str(action) for action in ours
            ]


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Eager1F1B", "ForwardOnly"])
def test_golden_files(name: str) -> None:
    """A change of a schedule shows in these files; tests/golden/schedules/write.py writes them anew."""
    for stages, microbatches in ((1, 1), (2, 4), (4, 2), (4, 8)):
        lowered = lower(build(name, stages, microbatches))
        with (GOLDEN / f"{name.lower()}_{stages}x{microbatches}.csv").open(newline="") as file:
            golden = list(csv.reader(file))
        assert [[str(action) for action in lowered[rank]] for rank in sorted(lowered)] == golden


@pytest.mark.parametrize(
    ("module", "name", "microbatches", "transfer"),
    [("gpipe", "GPipe", 4, 0.0), ("one_f_one_b", "1F1B", 4, 0.0), ("eager_1f1b", "Eager1F1B", 6, 1.0)],
)
def test_the_picture_in_the_docstring_is_the_simulated_one(
    module: str, name: str, microbatches: int, transfer: float
) -> None:
    documentation = importlib.import_module(f"meshcast.pipelining.schedules.{module}").__doc__
    lines = [line.strip() for line in documentation.splitlines() if line.strip().startswith("rank ")]
    assert "\n".join(lines) == format_timeline(simulate(name, 3, microbatches, transfer=transfer))


@pytest.mark.parametrize(("stages", "microbatches"), [(0, 1), (1, 0), (-1, 4)])
def test_empty_pipelines_are_refused(stages: int, microbatches: int) -> None:
    for name in TRAINING:
        with pytest.raises(ScheduleError, match="at least 1 stage"):
            build(name, stages, microbatches)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ScheduleError, match="GPipe, 1F1B, Eager1F1B"):
        build("ZigZag", 2, 2)
