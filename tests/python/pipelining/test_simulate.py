"""The event simulation against figures that follow from the schedules by hand."""

from __future__ import annotations

import itertools

import pytest
from meshcast.pipelining import Action, ScheduleError, simulate
from meshcast.pipelining.action import Costs, lower
from meshcast.pipelining.orders import build
from meshcast.pipelining.simulate import simulate_actions

FREE = (16 + 4 - 1) * 3.0  # 4 stages, 16 micro-batches, forward 1, backward 2


@pytest.mark.parametrize(("transfer", "ratio"), [(0.1, 1.011), (0.5, 1.053), (1.0, 1.105)])
@pytest.mark.parametrize("send_model", ["buffered", "rendezvous"])
def test_eager_1f1b_exposes_only_fill_and_drain(transfer: float, ratio: float, send_model: str) -> None:
    report = simulate("Eager1F1B", 4, 16, transfer=transfer, send_model=send_model)
    assert report.makespan == pytest.approx(FREE + 2 * 3 * transfer)
    assert report.makespan / FREE == pytest.approx(ratio, abs=5e-4)


@pytest.mark.parametrize(("transfer", "ratio"), [(0.1, 1.049), (0.5, 1.246), (1.0, 1.491)])
def test_1f1b_pays_for_every_transfer(transfer: float, ratio: float) -> None:
    assert simulate("1F1B", 4, 16, transfer=transfer).makespan / FREE == pytest.approx(ratio, abs=5e-4)


def test_posting_receives_late_costs_time_under_rendezvous() -> None:
    late = simulate("Eager1F1B", 4, 16, transfer=1.5, send_model="rendezvous", ahead=1)
    early = simulate("Eager1F1B", 4, 16, transfer=1.5, send_model="rendezvous")
    assert late.makespan > early.makespan
    assert early.makespan == pytest.approx(simulate("Eager1F1B", 4, 16, transfer=1.5).makespan)


def test_one_link_for_both_directions_is_slower() -> None:
    own = simulate("Eager1F1B", 2, 8, transfer=2.0)
    shared = simulate("Eager1F1B", 2, 8, transfer=2.0, shared_links=True)
    assert shared.makespan > own.makespan
    assert shared.makespan >= 2 * 8 * 2.0


def test_stages_of_unlike_speed_wait_for_the_slowest() -> None:
    report = simulate("GPipe", 3, 10, forward=[1.0, 3.0, 1.0], backward=[0.0, 0.0, 0.0])
    assert report.makespan == pytest.approx(1.0 + 10 * 3.0 + 1.0)


def test_a_link_carries_one_micro_batch_at_a_time() -> None:
    report = simulate("ForwardOnly", 2, 5, forward=1.0, backward=0.0, transfer=4.0)
    assert report.makespan == pytest.approx(1.0 + 5 * 4.0 + 1.0)
    spans = [(span.start, span.end) for span in report.transfers]
    assert spans == [(1.0 + 4 * k, 5.0 + 4 * k) for k in range(5)]


def test_times_of_single_links() -> None:
    report = simulate("ForwardOnly", 3, 1, transfer={(0, 1): 2.0, (1, 2): 5.0})
    assert report.makespan == pytest.approx(3.0 + 7.0)


def test_split_backward_keeps_activations_until_the_weights() -> None:
    rows = {0: "0F0 0F1 0I0 0I1 0W0 0W1", 1: "1F0 1I0 1W0 1F1 1I1 1W1"}
    actions = {rank: [Action.parse(text) for text in row.split()] for rank, row in rows.items()}
    report = simulate(actions, backward=2.0, weight=0.5)
    assert report.peak_activations == [2, 1]
    durations = {str(span.action): span.end - span.start for span in report.timeline}
    assert durations["0I0"] == pytest.approx(1.5)
    assert durations["0W0"] == pytest.approx(0.5)


def test_the_timeline_never_overlaps_on_a_rank_and_respects_data() -> None:
    report = simulate("Eager1F1B", 4, 7, transfer=0.3)
    end_of = {str(span.action): span.end for span in report.timeline}
    arrival = {str(span.action.matching()): span.end for span in report.transfers}
    for rank in range(4):
        spans = [span for span in report.timeline if span.rank == rank]
        for before, after in itertools.pairwise(spans):
            assert before.end <= after.start + 1e-12
        for span in spans:
            stage, k = span.action.stage, span.action.microbatch
            if span.action.kind.value == "F" and stage > 0:
                assert span.start >= arrival[f"{stage}RECV_F{k}"] - 1e-12
            if span.action.kind.value == "B":
                assert span.start >= end_of[f"{stage}F{k}"] - 1e-12


def deadlocked(send_model: str) -> str:
    """Stage 0 sends two activations before it posts the receive of a gradient; stage 1 the reverse."""
    rows = {
        0: "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        1: "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    }
    actions = {rank: [Action.parse(text) for text in row.split()] for rank, row in rows.items()}
    with pytest.raises(ScheduleError) as caught:
        simulate_actions(actions, Costs.of(2, 1.0, 1.0, None, 1.0), send_model)
    return str(caught.value)


def test_a_deadlock_shows_its_cycle() -> None:
    message = deadlocked("rendezvous")
    assert "deadlocks with rendezvous sends, ranks 0 -> 1 -> 0" in message
    assert "rank 0, step 3: 0SEND_F1 (stage 0, micro-batch 1) waits for 1RECV_F1 on rank 1" in message
    assert "rank 1, step 3: 1SEND_B0 (stage 1, micro-batch 0) waits for 0RECV_B0 on rank 0" in message
    assert ">0SEND_F1<" in message
    assert ">1SEND_B0<" in message


def test_the_same_rows_run_with_buffered_sends() -> None:
    with pytest.raises(pytest.fail.Exception):
        deadlocked("buffered")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forward": [1.0]}, "forward must be one time"),
        ({"backward": -1.0}, "backward must be one time"),
        ({"backward": 1.0, "weight": 2.0}, "weight is a part of backward"),
        ({"transfer": -0.5}, "transfer times"),
        ({"send_model": "eager"}, "send_model"),
        ({"ahead": 0}, "ahead=0"),
        ({"links": [(1, 0)]}, "later stage"),
        ({"links": [(0, 5)]}, "stage 5 is on no rank"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate("1F1B", 2, 4, **arguments)


def test_lowering_twice_is_refused() -> None:
    with pytest.raises(ScheduleError, match="rank 0, step 0: 0RECV_B0 is a transfer"):
        lower(lower(build("1F1B", 2, 2)))


@pytest.mark.parametrize(("transfer", "ratio"), [(0.1, 0.958), (0.5, 1.000), (1.0, 1.053)])
@pytest.mark.parametrize("send_model", ["buffered", "rendezvous"])
def test_eager_1f1b_with_delayed_weights(transfer: float, ratio: float, send_model: str) -> None:
    report = simulate("Eager1F1B", 4, 16, transfer=transfer, send_model=send_model, delay_weight_grad=True)
    assert report.makespan / FREE == pytest.approx(ratio, abs=5e-4)


def test_waiting_for_every_send_costs_what_it_hides() -> None:
    """Two stages, forward only: the producer makes a value, waits until it has arrived, makes the next."""
    times = {"forward": 1.0, "backward": 0.0, "transfer": 2.0}
    assert simulate("ForwardOnly", 2, 5, buffers=0, **times).makespan == pytest.approx(5 * 3.0 + 1.0)
    assert simulate("ForwardOnly", 2, 5, **times).makespan == pytest.approx(1.0 + 5 * 2.0 + 1.0)


def test_fewer_buffers_are_never_faster() -> None:
    for name in ("GPipe", "1F1B", "Eager1F1B", "ZBH2"):
        for model in ("buffered", "rendezvous"):
            spans = [
                simulate(name, 4, 8, transfer=1.5, send_model=model, buffers=buffers).makespan
                for buffers in (None, 4, 2, 1, 0)
            ]
            assert all(more <= fewer + 1e-9 for more, fewer in itertools.pairwise(spans)), (
                name,
                model,
                spans,
            )
            assert spans[0] < spans[-1]


def test_a_full_buffer_holds_the_sender() -> None:
    """A slow consumer: with one buffer the producer gets one value ahead of what is on its way."""
    rows = {
        0: "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2",
        1: "1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2",
    }
    actions = {rank: [Action.parse(text) for text in row.split()] for rank, row in rows.items()}
    costs = Costs.of(2, [1.0, 10.0], 0.0, None, 2.0)
    report = simulate_actions(actions, costs, buffers=1)
    starts = {str(span.action): span.start for span in report.timeline}
    # 0SEND_F1 waits for the arrival of micro-batch 0 at 3; 0SEND_F2 until 1RECV_F1 is posted at 13.
    assert starts["0F2"] == pytest.approx(3.0)
    assert [span.start for span in report.transfers] == pytest.approx([1.0, 3.0, 13.0])


def test_a_deadlock_of_full_buffers_shows_its_cycle() -> None:
    rows = {
        0: "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        1: "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    }
    actions = {rank: [Action.parse(text) for text in row.split()] for rank, row in rows.items()}
    costs = Costs.of(2, 1.0, 1.0, None, 1.0)
    simulate_actions(actions, costs, buffers=2)
    with pytest.raises(ScheduleError, match="buffered sends and 0 buffers, ranks 0 -> 1 -> 0") as caught:
        simulate_actions(actions, costs, buffers=0)
    assert "0SEND_F1 (stage 0, micro-batch 1) waits for 1RECV_F1 on rank 1" in str(caught.value)
    assert "1SEND_B0 (stage 1, micro-batch 0) waits for 0RECV_B0 on rank 0" in str(caught.value)


def test_exposed_communication_is_what_waits_for_transfers() -> None:
    report = simulate("ForwardOnly", 2, 1, forward=1.0, backward=0.0, transfer=3.0)
    assert report.makespan == pytest.approx(5.0)
    assert report.exposed_fraction == pytest.approx(3.0 / 10.0)  # stage 1 waits 1 for F0, then 3 for its way
    assert simulate("1F1B", 4, 8).exposed_fraction == 0.0
    hidden = simulate("Eager1F1B", 4, 64, transfer=0.5).exposed_fraction
    assert hidden < 0.15 * simulate("1F1B", 4, 64, transfer=0.5).exposed_fraction


@pytest.mark.parametrize(("budget", "expected"), [(None, [7, 5, 3, 1]), (7, [7, 5, 3, 1]), (4, [4, 3, 2, 1])])
def test_auto_warmup_within_its_budget(budget: int | None, expected: list[int]) -> None:
    report = simulate("Eager1F1B", 4, 16, transfer=0.5, warmup="auto", memory_budget=budget)
    assert report.peak_activations == expected


def test_auto_warmup_spends_memory_only_where_it_helps() -> None:
    free = simulate("Eager1F1B", 4, 16, warmup="auto")
    assert free.peak_activations == [4, 3, 2, 1]
    slow = simulate("Eager1F1B", 4, 16, transfer={(1, 2): 1.0}, warmup="auto")
    assert slow.peak_activations == [5, 4, 2, 1]
    assert slow.makespan == pytest.approx(simulate("Eager1F1B", 4, 16, transfer={(1, 2): 1.0}).makespan)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup": "auto", "memory_budget": 3}, "stage 0: a memory budget of 3 .* minimum of 4"),
        ({"warmup": "auto", "memory_budget": [4, 3, 1, 1]}, "stage 2: a memory budget of 1 .* minimum of 2"),
        ({"warmup": "auto", "memory_budget": [4, 3]}, "one for each of the 4 stages"),
        ({"memory_budget": 6}, "stage 0 holds the activations of 7 micro-batches, the memory budget is 6"),
        ({"buffers": -1}, "buffers"),
        ({"forward": float("nan")}, "forward"),
    ],
)
def test_budgets_that_do_not_suffice(arguments: dict, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate("Eager1F1B", 4, 16, **arguments)


def test_auto_is_for_schedules_with_a_choice() -> None:
    with pytest.raises(ScheduleError, match="GPipe has no such choice"):
        simulate("GPipe", 4, 16, warmup="auto")
