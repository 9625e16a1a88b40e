"""The benchmark of calls without processes: tables, chart, rounds, what bench-check makes of them."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from benchmark_pages import check_chart, check_tables

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks import check  # noqa: E402
from benchmarks.calls import measure, page, rank, rounds, worlds  # noqa: E402
from benchmarks.calls.cases import SIZES, WAYS, Size, against, key_of, way_of  # noqa: E402
from benchmarks.calls.messages import Buffers  # noqa: E402
from benchmarks.harness import Page  # noqa: E402

SLOW = "not done within 90 s"
OURS, GLOO, FRESH = "ucx/Resharder", "torch/gloo", "torch/gloo-fresh"


def row(nbytes: int, seconds: dict[str, float]) -> dict[str, Any]:
    """One message takes `seconds` and twice as much CPU time; in a stream half of that."""
    return {
        "bytes": nbytes,
        "latency": {way: [taken, 2 * taken] for way, taken in seconds.items()},
        "stream": {way: [taken / 2, taken] for way, taken in seconds.items() if not way_of(way).latency_only},
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
    small = {
        OURS: 50e-6,
        "ucx/reshard": 60e-6,
        "ucx/stays": 9e-6,
        GLOO: 100e-6,
        FRESH: 120e-6,
        "ucp/ucp": 5e-6,
    }
    large = {OURS: 2e-3, "ucx/reshard": 3e-3, "ucx/stays": 1e-4, GLOO: 1e-3, FRESH: 4e-3, "ucp/ucp": 1e-3}
    return {
        "header": {"command": "python -m benchmarks.transports", "commit": "c0ffee", "cores": 2,
                   "kernel": "6.1", "torch": "2.13.0", "peers": "Open MPI 4.1.4", "repeats": 7},
        "ways": list(small),
        "left_out": {"commux": "undefined symbol"},
        "sizes": [row(4096, small), row(1 << 20, large)],
        "carriers": ["ucx", "torch"],
        "connects": connects,
        "groups": [{"way": "ucx", "groups": 100, "threads": 4, "ours": 3, "idle": 0.00012},
                   {"way": "gloo", "groups": 100, "failed": SLOW}],
    }  # fmt: skip


def test_tables_say_what_was_found_and_what_was_not() -> None:
    lines = page.text(results()).splitlines()
    assert lines[0].startswith("`python -m benchmarks calls`: commit c0ffee, 2 cores")
    assert lines[0].endswith("7 rounds by turns. commux was not measured: undefined symbol.")
    assert "| Resharder | 50.0 | 2000 |" in lines
    assert "| Resharder | 100 | 4000 |" in lines, "CPU time"
    assert lines.count("| stays | 9.0 | 100 |") == 1
    assert r"| 64 | 0.25 | \* | 0.25 |" in lines
    assert rf"\* {SLOW}" in lines
    assert "| meshcast, UCX | 2.0 | 1.0 | 1.0 | 2.0 |" in lines, "2 KiB and a thread for each further peer"
    assert "| meshcast, UCX | 100 | 4 | 3 | 0.012% |" in lines
    assert f"| meshcast, gloo | 100 | {SLOW} | - | - |" in lines
    assert "### Inside a host" not in lines, "nothing there but peers"


def test_ways_are_divided_by_those_that_do_the_same() -> None:
    lines = page.text(results()).splitlines()
    assert "| Resharder / gloo | 0.50 | **2.00** |" in lines
    assert "| reshard / gloo, fresh | 0.50 | **0.75** |" in lines
    assert "| reshard / UCX alone | **12.00** | 3.00 |" in lines, "which has but one way"
    assert not [line for line in lines if line.startswith("| stays / ")], "nothing travels"
    assert "Worst: 2.00 of gloo (Resharder, 1 MiB), 12.00 of UCX alone (reshard, 4 KiB)." in lines


def test_inside_a_host_ways_are_divided_by_what_shares_memory() -> None:
    found = results()
    ways = {"shm/reshard": 30e-6, "shm/reshard_": 20e-6, GLOO: 100e-6, FRESH: 120e-6, "mpi-shm/mpi": 2e-6}
    found |= {"ways": list(ways), "sizes": [row(4096, ways)]}
    lines = page.text(found).splitlines()
    assert "### Between hosts, over TCP" not in lines
    assert [line for line in lines if " / " in line][:4] == [
        "| reshard / gloo, fresh | **0.25** |",
        "| reshard_ / gloo | **0.20** |",
        "| reshard / Open MPI | **15.00** |",
        "| reshard_ / Open MPI | **10.00** |",
    ]


def test_a_part_has_tables_of_what_was_measured() -> None:
    found = results()
    del found["connects"], found["groups"], found["carriers"]
    found["ways"] = [OURS, against(OURS)]
    for each in found["sizes"]:
        for what in ("latency", "stream"):
            each[what][against(OURS)] = [0.5 * value for value in each[what][OURS]]
    lines = page.text(found).splitlines()
    assert "| Resharder, other tree | 25.0 | 1000 |" in lines
    assert "| Resharder / Resharder, other tree | **2.00** | **2.00** |" in lines
    assert not [line for line in lines if " / gloo" in line], "which was not measured"
    assert len([line for line in lines if line.startswith("| Resharder | `")]) == 1
    assert not [line for line in lines if line.startswith("| Resharder, other tree | `")]
    assert "### Connections and threads" not in lines


def test_every_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    check_tables(page.text(results()))


def test_the_chart_is_the_same_for_the_same_figures(tmp_path: Path) -> None:
    assert "meshcast, UCX" in check_chart(page.draw, results, tmp_path)


def test_the_committed_figures_are_those_of_the_page() -> None:
    committed = page.PAGE.results
    assert page.text(committed) in (ROOT / "docs/transports.md").read_text()
    assert rounds.quotients(committed["sizes"])


def test_every_way_has_a_key_of_its_own() -> None:
    assert all(key_of(way) == key for key, way in WAYS.items())
    for transport in ("ucx", "shm"):
        names = [way.name for way in WAYS.values() if transport in way.transports]
        assert len(set(names)) == len(names)


def test_a_way_that_fails_is_not_tried_with_more_ranks() -> None:
    asked = []

    def run(carrier: str, world: int, target: str) -> dict[str, Any]:
        asked.append((carrier, world))
        assert target == "columns" or carrier == "ucx"
        if carrier == "torch" and world == 8:
            return {"failed": SLOW}
        return {"first": 40.0 if carrier == "ucx" and world == 32 else 0.5, "threads": 3, "memory": 1}

    found = rounds.connects(run, ["ucx", "torch", "mpi"], 2, (2, 8, 32, 64))
    assert ("torch", 32) not in asked
    assert [each["first"]["torch"] for each in found] == [0.5, SLOW, SLOW, SLOW]
    assert "over 30 s" in found[3]["first"]["ucx"]
    assert "torch" not in found[1]["memory"]
    assert asked.count(("mpi", 8)) == 2
    assert asked.count(("mpi", 32)) == 1, "large worlds take long"


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_a_window_of_any_size_holds_something_and_not_too_much(size: Size) -> None:
    assert 1 <= size.window <= 8
    assert size.nbytes * size.window <= 128 << 20


class Pair:
    """Answers as a pair does: a message takes so many seconds, and its first ones ten times as many."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.orders = seconds, []

    def check(self, kind: str, size: Size) -> None:
        self.orders.append(("check", kind, size.nbytes))

    def latency(self, kind: str, _: Size, count: int) -> tuple[float, float]:
        self.orders.append(("latency", kind, count))
        slow = 10 if count == 1 else 1
        return slow * self.seconds, 2 * slow * self.seconds

    def stream(self, kind: str, _: Size, count: int) -> tuple[float, float]:
        self.orders.append(("stream", kind, count))
        return self.seconds, 2 * self.seconds


def test_a_figure_takes_as_long_at_every_size() -> None:
    quick, slow = Pair(10e-6), Pair(0.2)
    pairs: Any = {"ucx": quick, "torch": slow}
    (found,) = rounds.messages(pairs, [OURS, "ucx/stays", GLOO], [Size(4096)], 3)
    assert quick.orders[0] == ("check", "Resharder", 4096)
    assert quick.orders.count(("latency", "Resharder", 2500)) == 3, "0.05 s of two messages each"
    assert quick.orders.count(("stream", "Resharder", 625)) == 3, "of eight"
    assert not [order for order in quick.orders if order[:2] == ("stream", "stays")]
    assert {order[2] for order in slow.orders if order[0] != "check"} == {1}, "never less than one"
    assert found["latency"][OURS] == [10e-6, 20e-6]
    assert list(found["stream"]) == [OURS, GLOO]


@pytest.mark.parametrize(
    "options",
    ["--only messages", "--sizes 4", "--ways reshard", "--transports shm", "--against TREE", "--json FILE"],
)
def test_a_part_is_not_published(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "python/meshcast/_C.cpython.so"
    module.parent.mkdir(parents=True)
    module.touch()
    published: list[Any] = []
    monkeypatch.setattr(measure, "measure", lambda _: results())
    monkeypatch.setattr(Page, "publish", lambda *given: published.append(given))
    monkeypatch.setattr(sys, "argv", ["transports"])
    assert measure.main() == 0
    assert len(published) == 1, "the whole"
    words = options.replace("TREE", str(tmp_path)).replace("FILE", str(tmp_path / "found.json")).split()
    monkeypatch.setattr(sys, "argv", ["transports", *words])
    assert measure.main() == 0
    assert len(published) == 1
    assert "### Between hosts, over TCP" in capsys.readouterr().out


class Loop:
    """A way whose messages bring what this rank's own are, as if it were the other's."""

    def __init__(self, buffers: Buffers, wrong_from: int = 1 << 30) -> None:
        self.buffers, self.calls, self.wrong_from = buffers, [], wrong_from

    def prepare(self, nbytes: int, window: int) -> None:
        self.outs = self.buffers.prepare(nbytes, window)
        self.calls.append("prepare")

    def there(self) -> None:
        self.calls.append("there")

    def back(self) -> None:
        self.calls.append("back")

    def batch(self) -> None:
        self.calls.append("batch")
        for out in self.outs:
            out.copy_(self.buffers.wanted if len(self.calls) < self.wrong_from else self.buffers.mine)

    def right(self) -> bool:
        return self.buffers.right(self.outs)

    def settle(self) -> None:
        self.calls.append("settle")


class Orders(io.StringIO):
    """Lines to read; what is written is kept apart."""

    def __init__(self, *lines: str) -> None:
        super().__init__("".join(f"{line}\n" for line in lines))
        self.answers: list[str] = []

    def write(self, text: str) -> int:
        self.answers.append(text.strip())
        return len(text)


def test_a_rank_carries_out_orders_by_the_way_that_they_name() -> None:
    ways = {"a": Loop(Buffers(1)), "b": Loop(Buffers(1), wrong_from=3)}
    orders = Orders(
        "check 64 2 0 a", "check 64 2 0 b", "check 32 3 0 a", "latency 32 3 2 a", "stream 32 3 4 a"
    )
    rank.serve(ways.__getitem__, orders)
    assert orders.answers[:3] == ["right", "wrong values", "right"]
    for answer in orders.answers[3:]:
        assert all(float(word) >= 0 for word in answer.split())
    assert len(ways["a"].outs) == 3, "a tensor for each message in flight"
    round_of = ["there", "back"]
    assert ways["a"].calls[-15:] == [*round_of * 3, "settle", *round_of, *["batch"] * 4, "back", "settle"]


def test_a_thread_that_ends_while_a_rank_idles_takes_no_time_back(monkeypatch: pytest.MonkeyPatch) -> None:
    known, has_worked, may_end = set(worlds._threads()), threading.Event(), threading.Event()

    def work() -> None:
        sum(range(3_000_000))
        has_worked.set()
        may_end.wait()

    def idle(_: float) -> None:
        may_end.set()
        thread.join()
        while str(thread.native_id) in worlds._threads():  # the system's ends a little later
            pass

    thread = threading.Thread(target=work)
    thread.start()
    has_worked.wait()
    monkeypatch.setattr(worlds.time, "sleep", idle)
    assert worlds._idle(known) >= 0


def test_bench_check_sees_messages_that_became_slower() -> None:
    def quotients(ours: float) -> dict[str, float]:
        return rounds.quotients([row(4096, {OURS: ours, GLOO: 100e-6})])

    before = quotients(50e-6)
    assert before == {"4 KiB, latency": 0.5, "4 KiB, CPU time": 0.5}
    assert not check.worse_messages(before, quotients(60e-6))
    slower = check.worse_messages(before, quotients(70e-6))
    assert slower["4 KiB, latency"] == "message, 4 KiB, latency: 0.70 of torch's, committed 0.50"
    assert set(check.worse_messages(before, {})) == set(before), "not measured is no success"
