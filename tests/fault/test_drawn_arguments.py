"""A rank's refusal of a call is told to the other ranks at once, whatever was wrong; see
cases_drawn_arguments.py.

A failure names its seed. MESHCAST_TEST_SEED=that MESHCAST_TEST_DRAWS=1 draws it again."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from fault.extent import part
from multiproc.harness import run_world

MODULE = Path(__file__).with_name("cases_drawn_arguments.py")
MEDIA = {
    "ucx": {"MESHCAST_TRANSPORT": "ucx", "MESHCAST_SHM": "0"},
    "gloo": {"MESHCAST_TRANSPORT": "gloo", "MESHCAST_SHM": "0"},
    "shared memory": {"MESHCAST_TRANSPORT": "ucx"},
    "shared memory, gloo": {"MESHCAST_TRANSPORT": "gloo"},
}
WORLD = 4


def _draw(medium: str, seed: int, draws: int, limit: float) -> None:
    seed = int(os.environ.get("MESHCAST_TEST_SEED", seed))
    draws = int(os.environ.get("MESHCAST_TEST_DRAWS", draws))
    env = {**MEDIA[medium], "MESHCAST_TEST_SEED": str(seed), "MESHCAST_TEST_DRAWS": str(draws)}
    world = run_world(MODULE, WORLD, limit=limit, env=env)
    world.check("drawn")
    world.check_ends()


@pytest.mark.timeout(320)
@pytest.mark.parametrize("medium", MEDIA)
def test_drawn(medium: str) -> None:
    _draw(medium, 10_000 * list(MEDIA).index(medium), 30, 300.0)


@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("medium", MEDIA)
def test_many_drawn(medium: str) -> None:
    _draw(medium, time.time_ns() % 1_000_000, part(300), 1800.0)
