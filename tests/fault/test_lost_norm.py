"""Norms of gradients where a rank of the pipeline dies; see cases_lost_norm.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from multiproc.harness import run_world

pytestmark = pytest.mark.timeout(120)

MODULE = Path(__file__).with_name("cases_lost_norm.py")


def test_lost() -> None:
    world = run_world(MODULE, 3, limit=100.0)
    world.check("clips_without_a_rank", [0, 2])
    world.check_ends({1: -signal.SIGKILL})
