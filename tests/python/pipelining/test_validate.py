"""The validator finds every way to spoil a schedule, and says where."""

from __future__ import annotations

import random

import pytest
from meshcast.pipelining import Action, ScheduleError, lower, validate
from meshcast.pipelining.orders import build


def rows(text: dict[int, str]) -> dict[int, list[Action]]:
    return {rank: [Action.parse(cell) for cell in row.split()] for rank, row in text.items()}


GOOD = {
    0: "0F0 0SEND_F0 0RECV_B0 0B0",
    1: "1RECV_F0 1F0 1B0 1SEND_B0",
}


def test_the_base_of_these_tests_is_valid() -> None:
    validate(rows(GOOD), 2, 1)


@pytest.mark.parametrize(
    ("rank", "row", "message"),
    [
        (0, "0SEND_F0 0F0 0RECV_B0 0B0", "0SEND_F0 needs 0F0 before it"),
        (0, "0F0 0SEND_F0 0B0 0RECV_B0", "0B0 needs 0RECV_B0 before it"),
        (0, "0B0 0F0 0SEND_F0 0RECV_B0", "0B0 needs 0F0 before it"),
        (0, "0F0 0RECV_B0 0B0", "1RECV_F0 has no other end, 0SEND_F0 is missing"),
        (0, "0F0 0SEND_F0 0RECV_B0", "has no backward: 0B0, or 0I0 and 0W0"),
        (0, "0F0 0SEND_F0 0RECV_B0 0I0", "has no backward"),
        (0, "0F0 0SEND_F0 0RECV_B0 0W0 0I0", "0W0 needs 0I0 before it"),
        (0, "0F0 0SEND_F0 0RECV_B0 0B0 0W0", "0W0 is a part of it"),
        (0, "0F0 0F0 0SEND_F0 0RECV_B0 0B0", "0F0 comes twice"),
        (0, "0F0 0SEND_F0 0RECV_B0 0B0 0F1", "outside 2 stages and 1 micro-batches"),
        (0, "0F0 0SEND_F0 0RECV_B0 0B0 0SEND_F0>2", "belongs to no link"),
        (0, "0SEND_F0 0RECV_B0 0B0", "0F0 .* is missing"),
        (1, "1RECV_F0 1F0 1B0 1SEND_B0 0B0", "stage 0 is computed by rank 0 and by rank 1"),
        (1, "", "stage 1 is on no rank"),
    ],
)
def test_every_fault_is_found(rank: int, row: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate(rows(GOOD | {rank: row}), 2, 1)


def test_messages_name_the_cell_and_mark_it() -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(rows(GOOD | {0: "0SEND_F0 0F0 0RECV_B0 0B0"}), 2, 1)
    assert "rank 0, step 0, stage 0, micro-batch 0: 0SEND_F0" in str(caught.value)
    assert ">0SEND_F0<" in str(caught.value)
    assert "rank 0" in str(caught.value).splitlines()[3]


def test_long_schedules_are_shown_around_the_fault() -> None:
    actions = lower(build("1F1B", 4, 64))
    step = actions[2].index(Action.parse("2F40"))
    actions[2][step], actions[2][step + 1] = actions[2][step + 1], actions[2][step]
    with pytest.raises(ScheduleError) as caught:
        validate(actions, 4, 64)
    assert "micro-batch 40" in str(caught.value)
    assert len(str(caught.value).splitlines()) < 25


def test_both_ends_must_agree_on_the_order() -> None:
    actions = rows({
        0: "0F0 0SEND_F0 0F1 0SEND_F1",
        1: "1RECV_F1 1RECV_F0 1F0 1F1",
    })  # fmt: skip
    with pytest.raises(ScheduleError, match="stage 0 sends 0SEND_F0 where stage 1 receives 1RECV_F1"):
        validate(actions, 2, 2, forward_only=True)


def test_backward_does_not_belong_into_forward_only() -> None:
    with pytest.raises(ScheduleError, match="does not belong into a forward-only schedule"):
        validate(rows(GOOD), 2, 1, forward_only=True)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Eager1F1B"])
def test_any_action_that_is_dropped_is_missed(name: str) -> None:
    actions = lower(build(name, 3, 4), [(0, 1), (1, 2), (0, 2)])
    links = [(0, 1), (1, 2), (0, 2)]
    for rank, row in actions.items():
        for step in range(len(row)):
            with pytest.raises(ScheduleError):
                validate(actions | {rank: row[:step] + row[step + 1 :]}, 3, 4, links=links)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Eager1F1B"])
def test_a_shuffled_row_is_refused_or_still_right(name: str) -> None:
    """Shuffles that pass must keep every order the validator promises; most do not pass."""
    refused = 0
    for seed in range(200):
        actions = lower(build(name, 3, 3))
        rank = seed % 3
        row = list(actions[rank])
        random.Random(seed).shuffle(row)
        try:
            validate(actions | {rank: row}, 3, 3)
        except ScheduleError:
            refused += 1
            continue
        for microbatch in range(3):
            assert row.index(Action.parse(f"{rank}F{microbatch}")) < row.index(
                Action.parse(f"{rank}B{microbatch}")
            )
    assert refused > 150
