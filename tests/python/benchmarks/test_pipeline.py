"""The pipeline benchmark knows when its steps were disturbed, and measures such a step again."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.pipeline import sweep
from benchmarks.pipeline.stages import Clock
from benchmarks.ranks import Watch, share_of_others


def test_interrupts_and_idle_time_are_nobody_s(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    # user nice system idle iowait irq softirq steal guest guest_nice
    stat.write_text("cpu  100 20 30 9000 800 70 60 5 4 3\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    assert Watch.now(str(stat)).all == 155 / os.sysconf("SC_CLK_TCK")


def test_what_the_ranks_used_is_not_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    ranks = [Watch(10.0, 1.0, 9.0), Watch(9.0, 3.0, 8.0)]
    assert share_of_others(ranks[0], ranks) == 0.25  # 9 s in all, 4 s of the ranks, 20 s of two cores
    assert share_of_others(Watch(10.0, 1.0, 3.5), ranks) == 0.0  # ticks are coarse
    begin, end = Watch(5.0, 1.0, 50.0), Watch(7.0, 1.5, 53.0)
    assert end.since(begin) == Watch(2.0, 0.5, 3.0)


@pytest.mark.parametrize(
    ("late", "budget", "taken", "again"),
    [
        ([0.002], 9, 0.002, 0),
        ([0.3, 0.002], 9, 0.002, 1),
        ([0.3, 0.1, 0.2], 9, 0.1, 2),  # never quiet: the least disturbed
        ([0.3], 0, 0.3, 0),
    ],
)
def test_a_disturbed_step_is_measured_again(
    late: list[float], budget: int, taken: float, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(late)

    def timed(_self: Any, _run: Any) -> dict[str, Any]:
        found = left.pop(0)
        return {"seconds": 1 + found, "late": found, "others": 0.5, "period": found, "trace": {"0": [found]}}

    monkeypatch.setattr(sweep.Point, "_timed", timed)
    point = sweep.Point.__new__(sweep.Point)
    point._forward, point._most_again, point.again = 0.1, budget, 0
    method = sweep.METHODS[2]
    assert method.traced
    run = {"method": method, "seconds": [], "late": [], "others": [], "periods": [], "trace": {}}
    point._undisturbed(run)
    assert (left, point.again) == ([], again)
    assert run["seconds"] == [1 + taken]
    assert (run["late"], run["periods"], run["trace"]) == ([taken], [taken], {"0": [taken]})
    assert run["others"] == [0.5]


def test_compute_that_ends_late_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of this test stands still but for sleeps, which take 40 ms more than they should."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds + 0.04))
    clock = Clock(0.1, 0.1, 0.1)
    clock.begin()
    clock.sleep(clock.forward)
    assert clock.late == pytest.approx(0.04, abs=1e-3)
    clock.begin()  # what was late before does not count against the next
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds + 0.01))
    clock.late = 0.0
    clock.sleep(clock.forward)
    assert clock.late == pytest.approx(0.01, abs=1e-3)
