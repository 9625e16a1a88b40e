"""The benchmark of transports without processes: tables, chart, rounds, what bench-check makes of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_pages import check_chart, check_tables

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks import check  # noqa: E402
from benchmarks.transports import chart, page, rounds  # noqa: E402
from benchmarks.transports.cases import SIZES, Size  # noqa: E402

GIB = 1 << 30
SLOW = "not done within 90 s"


def row(nbytes: int, **seconds: float) -> dict[str, Any]:
    """One message takes `seconds` and twice as much CPU time; in a stream half of that."""
    return {
        "bytes": nbytes,
        "latency": {way: [taken, 2 * taken] for way, taken in seconds.items()},
        "stream": {way: [taken / 2, taken] for way, taken in seconds.items()},
    }


def results() -> dict[str, Any]:
    kinds = ("ucx", "torch", "ucx, chains")
    connects = [
        {
            "world": world,
            "first": dict.fromkeys(kinds, 0.25) | ({"torch": SLOW} if world == 64 else {}),
            "threads": dict.fromkeys(kinds, world),
            "memory": dict.fromkeys(kinds, (1 << 20) + world * 2048),
        }
        for world in (2, 16, 64)
    ]
    return {
        "header": {"command": "python -m benchmarks.transports", "commit": "c0ffee", "cores": 2,
                   "kernel": "6.1", "torch": "2.13.0", "peers": "Open MPI 4.1.4", "repeats": 7},
        "ways": ["ucx", "torch"],
        "left_out": {"commux": "undefined symbol"},
        "sizes": [row(4096, ucx=50e-6, torch=100e-6), row(1 << 20, ucx=2e-3, torch=1e-3)],
        "connects": connects,
        "groups": [{"way": "ucx", "groups": 100, "threads": 4, "ours": 3, "idle": 0.00012},
                   {"way": "gloo", "groups": 100, "failed": SLOW}],
    }  # fmt: skip


def test_tables_say_what_was_found_and_what_was_not() -> None:
    lines = page.text(results()).splitlines()
    assert lines[0].startswith("`python -m benchmarks.transports`: commit c0ffee, 2 cores")
    assert lines[0].endswith("7 rounds by turns. commux was not measured: undefined symbol.")
    assert "| 4 KiB | 50 | 100 |" in lines
    assert "| 1 MiB | 1.05 | 2.10 |" in lines, "GB/s"
    assert f"| 1 MiB | {2e-3 * GIB / (1 << 20):.2f} | {1e-3 * GIB / (1 << 20):.2f} |" in lines, "s per GiB"
    assert r"| 64 | 0.25 | \* | 0.25 |" in lines
    assert rf"\* {SLOW}" in lines
    assert "| meshcast, UCX | 2.0 | 1.0 | 1.0 | 2.0 |" in lines, "2 KiB and a thread for each further peer"
    assert "| meshcast, UCX | 100 | 4 | 3 | 0.012% |" in lines
    assert f"| meshcast, gloo | 100 | {SLOW} | - | - |" in lines


def test_every_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    check_tables(page.text(results()))


def test_the_chart_is_the_same_for_the_same_figures(tmp_path: Path) -> None:
    assert "meshcast, UCX" in check_chart(chart.draw, results, tmp_path)


def test_a_way_that_fails_is_not_tried_with_more_ranks() -> None:
    asked = []

    def run(way: str, world: int, target: str) -> dict[str, Any]:
        asked.append((way, world))
        assert target == "columns" or way == "ucx"
        if way == "torch" and world == 8:
            return {"failed": SLOW}
        return {"first": 40.0 if way == "ucx" and world == 32 else 0.5, "threads": 3, "memory": 1}

    found = rounds.connects(run, ["ucx", "torch", "mpi"], 2, (2, 8, 32, 64))
    assert ("torch", 32) not in asked
    assert [each["first"]["torch"] for each in found] == [0.5, SLOW, SLOW, SLOW]
    assert "over 30 s" in found[3]["first"]["ucx"]
    assert "torch" not in found[1]["memory"]
    assert asked.count(("mpi", 8)) == 2
    assert asked.count(("mpi", 32)) == 1, "large worlds take long"


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_a_round_of_any_size_moves_something_and_not_too_much(size: Size) -> None:
    assert size.trips >= 1
    assert size.batches >= 1
    assert size.nbytes * max(size.trips, size.batches * size.window) <= 128 << 20


def test_bench_check_sees_messages_that_became_slower() -> None:
    before = rounds.quotients([row(4096, ucx=50e-6, torch=100e-6)])
    assert before == {"4 KiB, latency": 0.5, "4 KiB, CPU time": 0.5}
    assert not check.worse_messages(before, rounds.quotients([row(4096, ucx=60e-6, torch=100e-6)]))
    slower = check.worse_messages(before, rounds.quotients([row(4096, ucx=70e-6, torch=100e-6)]))
    assert slower["4 KiB, latency"] == "message, 4 KiB, latency: 0.70 of torch's, committed 0.50"
    assert set(check.worse_messages(before, {})) == set(before), "not measured is no success"
