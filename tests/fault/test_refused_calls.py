"""Calls that fail leave nothing behind that grows with their number; see cases_refused_calls.py."""

from __future__ import annotations

from pathlib import Path

from fault.cases_refused_calls import MORE_KEYS
from multiproc.harness import run_world


def test_failed_calls_leave_nothing() -> None:
    world = run_world(Path(__file__).with_name("cases_refused_calls.py"), 3, limit=110.0)
    world.check("failed_calls_leave_nothing")
    world.check_ends()
    for rank in range(3):
        for kind, (keys, _) in world.value("failed_calls_leave_nothing", rank).items():
            assert keys <= MORE_KEYS, (rank, kind, keys)
