"""The examples of the documentation run as they stand; see cases_docs.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import run_world

pytestmark = pytest.mark.timeout(150)

MODULE = Path(__file__).with_name("cases_docs.py")


def test_examples_run() -> None:
    world = run_world(MODULE, 4, limit=140.0)
    names = list(world.ranks[0].cases)
    assert len(names) >= 45
    for case in names:
        world.check(case)
    world.check_ends()
