"""Ranks that are killed at random moments; see kills.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fault.kills import MOMENTS, Ranks, draw, ranks

_SLOW_SECONDS = 500.0
_SEEDS = 3  # of each moment, in the quick part
# Over gloo a death is seen by those alone who exchange bytes with the dead rank (docs/errors.md).
_OF_GLOO = ("moving", "ending")


@pytest.fixture(scope="module")
def parent() -> Iterator[Ranks]:
    with ranks() as found:
        yield found


def _check(parent: Ranks, seed: int, transport: str, phase: str) -> None:
    kill = draw(seed, transport, phase)
    outcome = parent.run(kill)
    assert not outcome.wrong, f"{kill}: " + "\n".join(outcome.wrong)


@pytest.mark.parametrize("phase", ["connecting", "agreeing", "moving"])
def test_control(parent: Ranks, phase: str) -> None:
    """Where nobody dies, what the other tests ask for is not there: no rank raises."""
    kill = replace(draw(1, "ucx", phase), delay=1000.0, calls=5, late={})
    wrong = "\n".join(parent.run(kill).wrong)
    assert "the victim did not die" in wrong
    assert wrong.count("never raised") == kill.world - 1
    assert "WRONG" not in wrong


@pytest.mark.parametrize("phase", MOMENTS)
def test_killed(parent: Ranks, phase: str) -> None:
    for seed in range(_SEEDS):
        _check(parent, seed, "ucx", phase)


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_killed_at_many_moments(parent: Ranks) -> None:
    """New rounds each time; the seed of one that fails is in its error."""
    first = time.time_ns() % 1_000_000 * 1000
    end = time.monotonic() + _SLOW_SECONDS
    number = 0
    while time.monotonic() < end:
        transport = ("ucx", "ucx", "shared memory", "gloo")[number % 4]
        for phase in _OF_GLOO if transport == "gloo" else MOMENTS:
            _check(parent, first + number, transport, phase)
        number += 1
    assert number > 0
