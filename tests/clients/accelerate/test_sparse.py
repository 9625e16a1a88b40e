"""Pruned weights of transformers' Llama stay away while its stages train; see cases_sparse.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from multiproc.harness import WorldResult

pytestmark = pytest.mark.timeout(270)

CASES = Path(__file__).with_name("cases_sparse.py")
RANKS, VICTIM = 3, -1


def test_sparse(world: WorldResult, case: str, ranks: list[int]) -> None:
    world.check(case, ranks)


def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()
