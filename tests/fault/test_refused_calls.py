"""Calls that fail leave nothing behind that grows with their number; see cases_refused_calls.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault.cases_refused_calls import LATE_CALLS
from multiproc.harness import run_world


@pytest.mark.slow
def test_failed_calls_leave_nothing() -> None:
    world = run_world(Path(__file__).with_name("cases_refused_calls.py"), 3, limit=110.0)
    world.check("failed_calls_leave_nothing")
    world.check_ends()
    for rank in range(3):
        grown = world.value("failed_calls_leave_nothing", rank)
        for kind, (keys, most, _, _) in grown.items():
            assert keys <= most, (rank, kind, grown)
        assert grown["late"][2] >= LATE_CALLS, "the others were not late"
