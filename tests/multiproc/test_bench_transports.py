"""The benchmark of transports with processes: every way answers, and what arrives is right."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.peers.mpi import OPEN_MPI  # noqa: E402
from benchmarks.transports.cases import Size  # noqa: E402
from benchmarks.transports.pair import Pair  # noqa: E402
from benchmarks.transports.rounds import Started, messages  # noqa: E402

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]
WAYS = [
    "ucx",
    "gloo",
    "torch",
    pytest.param("mpi", marks=pytest.mark.skipif(bool(OPEN_MPI.missing()), reason=OPEN_MPI.missing())),
]


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    found = Started(dict.fromkeys(("ucx", "gloo", "torch"), sys.executable))
    yield found
    found.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_pair_measures_messages_that_arrive_as_they_were(way: str) -> None:
    pair = Pair(way, sys.executable)
    try:
        (row,) = messages([pair], [Size(64 << 10)], 1)
    finally:
        pair.close()
    for what in ("latency", "stream"):
        seconds, cpu = row[what][way]
        assert 0 < seconds < 10
        assert 0 < cpu < 10


@pytest.mark.parametrize("way", WAYS)
def test_a_world_tells_what_its_connections_cost(way: str, started: Started) -> None:
    found = started.run(way, 3)
    assert found["first"] > 0
    assert found["threads"] >= 1
    assert found["memory"] >= 0


def test_a_pair_whose_interpreter_lacks_the_library_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"commux: did not start[^$]*No module named 'commux'"):
        Pair("commux", sys.executable)
