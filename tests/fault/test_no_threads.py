"""Where a rank can start no more threads, all ranks raise an error that says so; see cases_no_threads.py."""

from __future__ import annotations

from pathlib import Path

from multiproc.harness import run_world


def test_a_group_without_threads() -> None:
    world = run_world(Path(__file__).with_name("cases_no_threads.py"), 3, limit=100.0)
    world.check("a_group_without_threads")
    world.check_ends()
