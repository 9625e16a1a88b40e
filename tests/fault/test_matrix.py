"""Ranks that fail at chosen moments, each beside a control that must not pass; see matrix.py.

The quick part needs no fault points: moments by the clock. The slow part takes ten minutes of the whole
matrix, each time with other seeds; `make test-faults` takes thirty.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

import pytest
from fault.extent import SECONDS
from fault.matrix import FAULT_BUILD, ROOT, Ranks, ranks
from fault.rounds import BY_CLOCK, BY_POINT, FAULTS, TRANSPORTS, combinations, draw


@pytest.fixture(scope="module")
def parent() -> Iterator[Ranks]:
    with ranks(points=False) as found:
        yield found


@pytest.fixture(scope="module")
def parent_with_points() -> Iterator[Ranks]:
    with ranks(points=True) as found:
        yield found


def _check(parent: Ranks, seed: int, transport: str, fault: str, moment: str) -> None:
    round_ = draw(seed, transport, fault, moment)
    outcome = parent.run(round_)
    assert not outcome.wrong, f"{round_}: " + "\n".join(outcome.wrong)
    without = parent.fails_without_fault(round_)
    assert not without, f"{round_}: {without}"


@pytest.mark.parametrize("moment", BY_CLOCK)
def test_killed(parent: Ranks, moment: str) -> None:
    for seed in range(2):
        _check(parent, seed, "ucx", "kill", moment)


@pytest.mark.parametrize("transport", ["ucx", "shared memory"])
def test_frozen(parent: Ranks, transport: str) -> None:
    _check(parent, 1, transport, "stop", "moving")


def test_a_release_has_no_fault_points() -> None:
    """Nothing that a user has can be told to fail."""
    (module,) = (ROOT / "python/meshcast").glob("_C.*.so")
    text = module.read_bytes()
    assert b"fault point" not in text
    assert b"MESHCAST_FAULT" not in text


@pytest.mark.slow
def test_a_build_with_fault_points_has_them() -> None:
    """What the test of the release looks for is there where it should be."""
    (module,) = (FAULT_BUILD / "meshcast").glob("_C.*.so")
    text = module.read_bytes()
    for point in {point for points, _ in BY_POINT.values() for point in points}:
        assert f"fault point {point}\0".encode() in text


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_matrix(parent_with_points: Ranks) -> None:
    """All faults at all moments, in an order that a seed draws; the seed of a round that fails is in its
    error."""
    first = time.time_ns() % 1_000_000 * 1000
    end = time.monotonic() + SECONDS
    wrong, done = [], 0
    for turn in itertools.count():
        rounds = combinations(TRANSPORTS, list(FAULTS), [*BY_CLOCK, *BY_POINT])
        random.Random(first + turn).shuffle(rounds)
        for transport, fault, moment in rounds:
            if time.monotonic() > end:
                assert not wrong, f"{len(wrong)} of {done} rounds:\n" + "\n\n".join(wrong)
                assert done > SECONDS / 60
                return
            try:
                _check(parent_with_points, first + done, transport, fault, moment)
            except AssertionError as error:
                wrong.append(str(error))
            done += 1
