"""The benchmark of calls with processes: every way answers, and what arrives is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.calls.cases import WAYS, Size, carrier_of, way_of  # noqa: E402
from benchmarks.calls.rounds import Pair, Started, messages  # noqa: E402
from benchmarks.peers.programs import OPEN_MPI, ucp_missing  # noqa: E402

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]
MISSING = {"mpi": OPEN_MPI.missing(), "mpi-shm": OPEN_MPI.missing(), "ucp": ucp_missing()}
CARRIERS = [
    pytest.param(carrier, marks=pytest.mark.skipif(bool(why), reason=why))
    for carrier in ("ucx", "shm", "gloo", "torch", "mpi", "mpi-shm", "ucp")
    for why in [MISSING.get(carrier, "")]
]
WORLDS = [each for each in CARRIERS if each.values[0] in ("ucx", "gloo", "torch", "mpi")]


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    found = Started(dict.fromkeys(("ucx", "gloo", "torch"), sys.executable))
    yield found
    found.close()


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_pair_measures_messages_that_arrive_as_they_were(carrier: str) -> None:
    ways = [key for key in WAYS if carrier_of(key) == carrier]
    pair = Pair(carrier, sys.executable)
    try:
        rows = messages({carrier: pair}, ways, [Size(4 << 10), Size(64 << 10)], 1)
    finally:
        pair.close()
    assert len(rows) == 2
    for row in rows:
        assert list(row["latency"]) == ways
        assert list(row["stream"]) == [key for key in ways if not way_of(key).latency_only]
        for seconds, cpu in (*row["latency"].values(), *row["stream"].values()):
            assert 0 < seconds < 10
            assert 0 < cpu < 10


def _cpu_seconds(pair: Pair) -> float:
    """CPU time of its ranks, of a launcher's children too."""
    ticks, pids = 0, [process.pid for process in pair._processes]
    while pids:
        pid = pids.pop()
        pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_pair_without_an_order_sleeps(carrier: str) -> None:
    way = next(key for key in WAYS if carrier_of(key) == carrier)
    pair = Pair(carrier, sys.executable)
    try:
        pair.check(way_of(way).kind, Size(64 << 10))
        time.sleep(0.5)  # threads that only connect have ended then
        used = _cpu_seconds(pair)
        time.sleep(2)
        assert _cpu_seconds(pair) - used <= 0.1, "a rank that polls takes two seconds"
    finally:
        pair.close()


@pytest.mark.parametrize("carrier", WORLDS)
def test_a_world_tells_what_its_connections_cost(carrier: str, started: Started) -> None:
    found = started.run(carrier, 3)
    assert found["first"] > 0
    assert found["threads"] >= 1
    assert found["memory"] >= 0


def test_a_pair_whose_interpreter_lacks_the_library_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"commux: did not start[^$]*No module named 'commux'"):
        Pair("commux", sys.executable)


def test_another_tree_takes_turns(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    options = (
        f"--only messages --sizes 4 --ways reshard gloo-fresh --transports shm --repeats 1 --against {ROOT}"
    )
    command = [sys.executable, "-m", "benchmarks.calls", *options.split()]
    done = subprocess.run([*command, "--json", str(found)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| reshard, other tree |" in done.stdout
    assert json.loads(found.read_text())["ways"] == ["shm/reshard", "torch/gloo-fresh", "against shm/reshard"]
