"""Where a rank can open no more file descriptors, all ranks raise an error that says so, and the next call
goes through; see cases_no_descriptors.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import run_world


@pytest.mark.parametrize("left", ["3", "12"])
def test_no_descriptors(left: str) -> None:
    env = {"LEFT": left, "MESHCAST_SHM": "0"}
    world = run_world(Path(__file__).with_name("cases_no_descriptors.py"), 3, limit=110.0, env=env)
    world.check("a_group_without_descriptors")
    world.check_ends()
