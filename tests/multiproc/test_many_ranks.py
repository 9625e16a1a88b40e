"""A first reshard among many ranks connects those that exchange bytes; see cases_many_ranks.py."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from multiproc.harness import run_world

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

_RANKS = 64


def test_a_ring_of_many_ranks() -> None:
    world = run_world(Path(__file__).with_name("cases_many_ranks.py"), _RANKS, limit=280)
    world.check("a_ring")
    world.check_ends()
    found = [world.value("a_ring", rank) for rank in range(_RANKS)]
    connections = [each["connections"] for each in found]
    print(f"{max(each['seconds'] for each in found):.2f} s, connections {connections}")
    assert min(connections) >= 2
    # A rank looks after one other at a time, which ever nearer ranks that come take the place of; each of
    # these connections counts at both its ends.
    assert sum(connections) <= _RANKS * (2 + 2 * math.log2(_RANKS))
