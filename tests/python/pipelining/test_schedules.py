"""Every schedule at every small size: valid, free of deadlock, with the figures its docstring promises."""

from __future__ import annotations

import csv
import inspect
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from meshcast.pipelining import ScheduleError, lower, orders, simulate, validate
from meshcast.pipelining.orders import SCHEDULES, build, delay_weights, forward_only
from meshcast.pipelining.trace import format_timeline
from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "schedules"
TRAINING = tuple(name for name in SCHEDULES if name != "ForwardOnly")
ONE_STAGE_EACH = ("GPipe", "1F1B", "Eager1F1B", "ZBH1", "ZBH2")


def variants(name: str, stages: int) -> Iterator[dict]:
    """The options of `build` for a schedule."""
    if name == "Interleaved1F1B":
        for ranks in range(1, stages + 1):
            if stages % ranks == 0:
                yield from ({"ranks": ranks, "warmup": warmup} for warmup in ("1f1b", "eager"))
    elif name != "ZBV" or stages % 2 == 0:
        yield {}


def peaks(name: str, stages: int, microbatches: int, options: dict) -> list[int]:
    """Of each rank, by the formulas of the docstrings."""
    n, m = stages, microbatches
    if name == "ZBV":
        return [min(2 * m, n)] * (n // 2)
    if name == "Interleaved1F1B":
        p, d = options["ranks"], {"1f1b": 1, "eager": 2}[options["warmup"]]
        v = n // p
        return [min(m * v, (v - 1) * p + d * (p - 1 - rank) + 1) for rank in range(p)]
    of_stage = {
        "GPipe": lambda _: m,
        "1F1B": lambda i: min(m, n - i),
        "Eager1F1B": lambda i: min(m, 2 * (n - i) - 1),
        "ZBH1": lambda _: min(m, n),
        "ZBH2": lambda _: min(m, 2 * n - 1),
    }[name]
    return [of_stage(stage) for stage in range(n)]


def check(name: str, stages: int, microbatches: int) -> None:
    for options in variants(name, stages):
        built = build(name, stages, microbatches, **options)
        for actions in (built, delay_weights(built)):
            validate(lower(actions), stages, microbatches)
        validate(lower(forward_only(built)), stages, microbatches, forward_only=True)
        report = simulate(built, transfer=0.25)
        expected = peaks(name, stages, microbatches, options)
        # The formulas of schedules with several stages on a rank hold for full groups of micro-batches.
        if len(built) == stages or (microbatches >= 2 * len(built) and microbatches % len(built) == 0):
            assert report.peak_of_ranks == expected, (name, stages, microbatches, options)
        else:
            assert all(found <= most for found, most in zip(report.peak_of_ranks, expected, strict=True))


@pytest.mark.parametrize("name", TRAINING)
def test_valid_with_the_promised_activations(name: str) -> None:
    for stages, microbatches in itertools.product((1, 2, 3, 4, 6), (1, 2, 3, 8)):
        check(name, stages, microbatches)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("name", TRAINING)
def test_valid_at_every_small_size(name: str, stages: int) -> None:
    for microbatches in range(1, 17):
        check(name, stages, microbatches)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_valid_at_random_sizes() -> None:
    draw = random.Random(20)
    for _ in range(12):
        name = draw.choice(TRAINING)
        check(name, 2 * draw.randint(1, 16), draw.randint(1, 128))


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("name", TRAINING)
def test_valid_with_few_buffers(name: str, ahead: int) -> None:
    for stages, microbatches in itertools.product((2, 4, 8), (2, 3, 9)):
        for options in variants(name, stages):
            validate(lower(build(name, stages, microbatches, **options), ahead=ahead), stages, microbatches)


@pytest.mark.parametrize("name", TRAINING)
def test_valid_with_skip_connections(name: str) -> None:
    links = [(0, 1), (1, 2), (2, 3), (0, 2), (0, 3)]
    for microbatches in (1, 2, 5, 16):
        validate(lower(build(name, 4, microbatches), links), 4, microbatches, links=links)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Eager1F1B"])
def test_free_transfers_take_the_textbook_time(name: str) -> None:
    for stages, microbatches in itertools.product((1, 2, 5, 8), (1, 2, 7, 16)):
        report = simulate(name, stages, microbatches, forward=1.0, backward=2.0)
        assert report.makespan == pytest.approx(3.0 * (microbatches + stages - 1))
        assert report.bubble_fraction == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize("transfer", [0.0, 0.5, 1.5])
def test_delayed_weights_shorten_the_drain(transfer: float) -> None:
    for n, m in itertools.product((1, 2, 4, 7), (7, 16)):
        report = simulate("Eager1F1B", n, max(m, 2 * n), transfer=transfer, delay_weight_grad=True)
        assert report.makespan == pytest.approx(
            3 * (max(m, 2 * n) + n - 1) - (n - 1) + 2 * (n - 1) * transfer
        )


@pytest.mark.parametrize(("forward", "inputs", "weight"), [(1, 1, 1), (2, 3, 1), (3, 2, 2)])
def test_zero_bubble_idle_times(forward: float, inputs: float, weight: float) -> None:
    for n, m in ((2, 4), (4, 8), (5, 16)):
        times = {"forward": forward, "backward": inputs + weight, "weight": weight}
        h1 = simulate("ZBH1", n, m, **times)
        assert h1.idle == pytest.approx([(n - 1 - i) * (forward + inputs - weight) for i in range(n)])
    for n, m in ((2, 4), (4, 8), (5, 16)):
        h2 = simulate("ZBH2", n, m)
        assert h2.idle == pytest.approx([0.0] * n)
        assert h2.makespan == pytest.approx(3 * m + n - 1)


def test_zb_v_has_no_idle_time() -> None:
    for ranks, m in ((1, 2), (2, 4), (4, 9), (5, 16)):
        report = simulate("ZBV", 2 * ranks, m)
        assert report.idle == pytest.approx([0.0] * ranks)
        assert report.makespan == pytest.approx(2 * m * 3 + ranks - 1)


@pytest.mark.parametrize("warmup", ["1f1b", "eager"])
def test_interleaving_divides_fill_and_drain(warmup: str) -> None:
    for p, v, groups in ((2, 2, 2), (4, 2, 2), (4, 3, 3), (3, 4, 2)):
        report = simulate("Interleaved1F1B", p * v, groups * p, ranks=p, warmup=warmup)
        assert report.makespan == pytest.approx(3 * (groups * p * v + p - 1))


def test_eager_interleaving_hides_transfers() -> None:
    plain, eager = (
        simulate("Interleaved1F1B", 8, 16, ranks=4, warmup=warmup, transfer=0.5).makespan
        for warmup in ("1f1b", "eager")
    )
    assert eager < 0.85 * plain


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


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (4, 2), (3, 3)])
def test_interleaved_is_that_of_torch(ranks: int, chunks: int) -> None:
    """torch's class counts its warm-up by the same rule: two forwards for each hop."""
    microbatches, stages = 2 * ranks, ranks * chunks
    for rank in range(ranks):
        warmup = (chunks - 1) * ranks + 2 * (ranks - 1 - rank)

        def stage_of(step: int, rank: int = rank) -> int:
            return (step // ranks) % chunks * ranks + rank

        def stage_back(step: int, warmup: int = warmup, rank: int = rank) -> int:
            return (chunks - 1 - (step - warmup) // ranks % chunks) * ranks + rank

        steps = microbatches * chunks
        theirs = _get_1f1b_rank_ops(chunks, ranks, warmup, steps - warmup, warmup, rank, stage_of, stage_back)
        ours = build("Interleaved1F1B", stages, microbatches, ranks=ranks)[rank]
        assert [str(action) for action in theirs if action is not None] == [str(action) for action in ours]


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [
        ("1f1b", [4, 3, 2, 1]),
        ("eager", [7, 5, 3, 1]),
        (4, [4, 3, 2, 1]),
        (5, [5, 3, 2, 1]),
        (6, [6, 4, 2, 1]),
        (7, [7, 5, 3, 1]),
        (9, [9, 6, 3, 1]),
        ([5, 5, 2, 1], [5, 5, 2, 1]),
        ([9, 9, 9, 9], [9, 9, 9, 9]),
    ],
)
def test_warmups(warmup: object, expected: list[int]) -> None:
    report = simulate("Eager1F1B", 4, 16, warmup=warmup)
    assert report.peak_activations == expected
    validate(lower(build("1F1B", 4, 16, warmup=warmup)), 4, 16)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Eager1F1B", {"warmup": 3}, "too short for 4 stages"),
        ("Eager1F1B", {"warmup": "lazy"}, "'lazy'"),
        ("Eager1F1B", {"warmup": [4, 3, 2]}, "listed for 3 stages"),
        ("Eager1F1B", {"warmup": [4, 3, 4, 1]}, "stage 1: a warm-up of 3 is shorter than the 4"),
        ("Eager1F1B", {"warmup": [4, 3, 2, 0]}, "stage 3"),
        ("GPipe", {"warmup": "eager"}, "GPipe has no warm-up"),
        ("ZBV", {"ranks": 4}, "runs on 2 ranks, found ranks=4"),
        ("Interleaved1F1B", {"ranks": 3}, "3 ranks do not divide 4 stages"),
        ("Interleaved1F1B", {"warmup": 3}, "found 3"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build(name, 4, 8, **options)


def test_two_stages_per_rank_need_an_even_number() -> None:
    with pytest.raises(ScheduleError, match="even number of stages, found 3"):
        build("ZBV", 3, 4)
    with pytest.raises(ScheduleError, match="say how many ranks"):
        build("Interleaved1F1B", 3, 4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_golden_files(name: str) -> None:
    """A change of a schedule shows in these files; tests/golden/schedules/write.py writes them anew."""
    for stages, microbatches in ((1, 1), (2, 4), (4, 2), (4, 8)):
        if stages == 1 and name in ("ZBV", "Interleaved1F1B"):
            continue
        compare(f"{name.lower()}_{stages}x{microbatches}", lower(build(name, stages, microbatches)))


def test_golden_file_with_delayed_weights() -> None:
    compare("eager1f1b_4x8_delayed", lower(build("Eager1F1B", 4, 8, delay_weight_grad=True)))


def compare(file_name: str, lowered: dict) -> None:
    with (GOLDEN / f"{file_name}.csv").open(newline="") as file:
        golden = list(csv.reader(file))
    assert [[str(action) for action in lowered[rank]] for rank in sorted(lowered)] == golden


@pytest.mark.parametrize(
    ("order", "runs"),
    [
        ("gpipe", [("GPipe", 3, 4, {})]),
        ("one_f_one_b", [("1F1B", 3, 4, {})]),
        ("eager_1f1b", [("Eager1F1B", 3, 6, {"transfer": 1.0})]),
        ("delay_weights", [("Eager1F1B", 3, 6, {"transfer": 1.0, "delay_weight_grad": True})]),
        ("zb_h1", [("ZBH1", 3, 5, {}), ("ZBH2", 3, 5, {})]),
        ("zb_v", [("ZBV", 4, 4, {})]),
        ("interleaved_1f1b", [("Interleaved1F1B", 4, 4, {"transfer": 1.0})]),
    ],
)
def test_the_picture_in_the_docstring_is_the_simulated_one(order: str, runs: list) -> None:
    documentation = inspect.getdoc(getattr(orders, order))
    lines = [line.strip() for line in documentation.splitlines() if line.startswith("    rank ")]
    drawn = [
        format_timeline(simulate(name, stages, microbatches, **options))
        for name, stages, microbatches, options in runs
    ]
    assert "\n".join(lines) == "\n".join(drawn)


@pytest.mark.parametrize(("stages", "microbatches"), [(0, 1), (1, 0), (-1, 4)])
def test_empty_pipelines_are_refused(stages: int, microbatches: int) -> None:
    for name in TRAINING:
        with pytest.raises(ScheduleError, match=r"at least 1 stage|even|how many"):
            build(name, stages, microbatches)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ScheduleError, match="1F1B, Eager1F1B, ForwardOnly, GPipe"):
        build("ZigZag", 2, 2)
