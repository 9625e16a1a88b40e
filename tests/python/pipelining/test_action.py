"""Text form of actions and CSV files, against torch's own parser where it has the action."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshcast.pipelining import Action, ActionKind, ScheduleError, dump_csv, load_csv, lower
from meshcast.pipelining.orders import SCHEDULES, build
from torch.distributed.pipelining.schedules import _Action

kinds = st.sampled_from(list(ActionKind))
compute_kinds = st.sampled_from([kind for kind in ActionKind if kind.is_compute])


@st.composite
def any_action(draw: st.DrawFn) -> Action:
    kind = draw(kinds)
    peer = -1 if kind.is_compute else draw(st.integers(0, 40))
    return Action(draw(st.integers(1, 40)), kind, draw(st.integers(0, 200)), peer)


@given(any_action())
def test_text_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(st.integers(1, 40), kinds, st.integers(0, 200))
def test_torch_reads_and_writes_the_same_text(stage: int, kind: ActionKind, microbatch: int) -> None:
    action = Action(stage, kind, microbatch)
    theirs = _Action.from_str(str(action))
    assert (theirs.stage_index, theirs.computation_type.value, theirs.microbatch_index) == (
        stage,
        kind.value,
        microbatch,
    )
    assert str(theirs) == str(action)


def test_a_transfer_beyond_the_neighbour_names_its_other_end() -> None:
    send = Action(0, ActionKind.SEND_F, 3, 2)
    assert str(send) == "0SEND_F3>2"
    assert str(send.matching()) == "2RECV_F3<0"
    assert str(Action(2, ActionKind.SEND_B, 3, 0).matching()) == "0RECV_B3<2"
    assert str(Action(0, ActionKind.SEND_F, 3, 1)) == "0SEND_F3"


@given(any_action().filter(lambda action: not action.kind.is_compute))
def test_matching_is_its_own_inverse(action: Action) -> None:
    assert action.matching().matching() == action
    assert action.matching().kind.is_send != action.kind.is_send


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0", "expected"),
        ("2X1", "expected"),
        ("2F", "expected"),
        ("2F0 1", "expected"),
        ("0SEND_F3<2", "'>' names where"),
        ("0RECV_F3>2", "'<' where"),
        ("0F3>2", "'>' names where"),
        ("1UNSHARD", "UNSHARD is refused"),
        ("1REDUCE_GRAD", "REDUCE_GRAD is refused"),
        ("(0F1;1B0)OVERLAP_F_B", "OVERLAP_F_B is refused"),
    ],
)
def test_bad_text_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        Action.parse(text)
    assert repr(text) in str(caught.value)


def test_a_compute_action_takes_no_peer() -> None:
    with pytest.raises(ScheduleError, match="no peer"):
        Action(1, ActionKind.F, 0, 2)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("links", [None, [(0, 1), (1, 2), (0, 2)]])
def test_csv_round_trip(name: str, links: list[tuple[int, int]] | None, tmp_path: Path) -> None:
    stages = 4 if name in ("ZBV", "Interleaved1F1B") else 3
    actions = build(name, stages, 4)
    if name != "ForwardOnly":
        actions = lower(actions, links)
    dump_csv(actions, tmp_path / "schedule.csv")
    assert load_csv(tmp_path / "schedule.csv") == actions


def test_csv_of_torch_with_idle_cells(tmp_path: Path) -> None:
    (tmp_path / "idle.csv").write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    actions = load_csv(tmp_path / "idle.csv")
    assert [str(action) for action in actions[1]] == ["1F0", "1B0", "1F1", "1B1"]


def test_csv_errors_name_row_and_column(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("0F0,0B0\n1F0,1Q0\n")
    with pytest.raises(ScheduleError, match=r"bad\.csv, row 1 \(rank 1\), column 1: .*'1Q0'"):
        load_csv(tmp_path / "bad.csv")


def test_csv_needs_one_row_for_each_rank(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"ranks \[1\]"):
        dump_csv({1: []}, tmp_path / "none.csv")
