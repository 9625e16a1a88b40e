"""However and whenever a process ends, it ends, and so do the others: see exits.py."""

from __future__ import annotations

import os

import pytest
from fault.exits import draw, run
from fault.extent import part

_SEED = int(os.environ.get("EXIT_SEED", "1"))
_MANY = int(os.environ.get("EXIT_ROUNDS", part(300)))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", [0, 1, 8])  # short ones, of several kinds
def test_exits(seed: int) -> None:
    assert run(draw(seed)) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_exits() -> None:
    wrong = [problem for seed in range(_SEED * 1000, _SEED * 1000 + _MANY) for problem in run(draw(seed))]
    assert not wrong, "\n".join(wrong)
