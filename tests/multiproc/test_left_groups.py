"""DTensors after their process groups were left; see cases_left_groups.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import run_world

pytestmark = pytest.mark.timeout(120)


def test_left_groups() -> None:
    world = run_world(Path(__file__).with_name("cases_left_groups.py"), 4, limit=100.0)
    world.check("meshes_that_are_equal_are_not_those_of_before")
    world.check_ends()
