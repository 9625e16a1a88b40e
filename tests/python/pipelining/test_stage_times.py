"""Stage times from traces that are given."""

from __future__ import annotations

import pytest
from meshcast.errors import LayoutError
from meshcast.pipelining import Action, StageTimes
from meshcast.pipelining.trace import RecentTimes, Trace


def trace(*events: tuple[str, float], wait: float = 0.0) -> Trace:
    """A step of compute one after the other, and a wait."""
    found, now = Trace(), 0.0
    for name, seconds in events:
        found.add(Action.parse(name), now, now + seconds)
        now += seconds
    found.add(Action.parse("1RECV_F0"), now, now + wait)
    found.add(Action.parse("0SEND_F0"), now, now + 100.0)
    return found


def recent(last: int, skip: int, *traces: Trace) -> RecentTimes:
    found = RecentTimes(last, skip)
    for each in traces:
        found.add(each)
    return found


def test_mean_over_microbatches_and_median_over_steps() -> None:
    steps = [trace(("0F0", f), ("0F1", f + 2), ("0B0", 8.0), ("0B1", 4.0), wait=50.0) for f in (1, 90, 3)]
    assert recent(5, 0, *steps).times() == {0: StageTimes(4.0, 6.0, None)}


def test_only_the_last_steps_count_and_the_first_is_left_out() -> None:
    steps = [trace(("0F0", float(f)), ("0B0", 1.0)) for f in (1000, 1, 2, 3)]
    assert recent(2, 0, *steps).times()[0].forward == 2.5
    assert recent(9, 1, *steps).times()[0].forward == 2.0
    assert recent(9, 1, steps[0]).times() == {}


def test_several_stages_and_a_split_backward() -> None:
    step = trace(("2F0", 1.0), ("5F0", 2.0), ("5I0", 3.0), ("5W0", 4.0), ("2B0", 5.0))
    assert recent(3, 0, step).times() == {2: StageTimes(1.0, 5.0, None), 5: StageTimes(2.0, 7.0, 4.0)}


@pytest.mark.parametrize("last", [-1, 2.5, True, "5", None, 10**9])
def test_what_is_no_number_of_steps(last: object) -> None:
    with pytest.raises(LayoutError, match="measure: last"):
        RecentTimes(last, 0)  # type: ignore[arg-type]
