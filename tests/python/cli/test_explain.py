"""`python -m meshcast explain`: what it makes of records, and one line with exit status 2 for bad ones.
Records of real jobs: tests/fault/test_stuck_jobs.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import meshcast
import pytest
from meshcast.base.observe import FORMAT
from meshcast.cli import main

RANKS = (0, 1, 2)


def call(position: int, state: str = "ended", **more: Any) -> dict[str, Any]:
    values = {
        "op": "reshard", "what": "float32 (4, 4)", "group": "0-2", "ranks": RANKS, "within": "0", "lane": 0,
        "position": position, "state": state, "site": "train.py:7 in step", "begun": 1000.0 + position,
        "seconds": None if state == "unfinished" else 0.5, "error": None,
    }  # fmt: skip
    return values | more


def write(folder: Path, rank: int, *calls: dict[str, Any], name: str = "job", **more: Any) -> Path:
    values = {
        "format": FORMAT, "rank": rank, "world": 3, "job": "", "process": 1, "started": 900.0,
        "written": 1010.0, "at": f"train.py:{rank} in main", "exception": None, "calls": list(calls),
    }  # fmt: skip
    path = folder / f"{name}.rank{rank}"
    path.write_text(json.dumps(values | more))
    return path


def cause(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["explain", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()[-1]


def test_nothing_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in RANKS:
        write(tmp_path, rank, call(0), call(1, "not waited for"))
    assert cause(tmp_path, capsys) == "no call failed or waits"


def test_a_rank_that_does_not_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 2):
        write(tmp_path, rank, call(0), call(1, "unfinished"))
    write(tmp_path, 1, call(0))
    expected = (
        "first cause: rank 1 has not made reshard call 1 of 0-2; its main thread is at train.py:1 in main"
    )
    assert cause(tmp_path, capsys) == expected
    write(tmp_path, 1, call(0), written=990.0)
    assert cause(tmp_path, capsys) == f"{expected} (its record is 11.0 s older than that call)"
    (tmp_path / "job.rank1").unlink()
    assert "rank 1 takes no part in reshard call 1 of 0-2 and wrote no record" in cause(tmp_path, capsys)


def test_a_rank_whose_program_came_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 2):
        write(tmp_path, rank, call(0), call(1, "unfinished"))
    write(tmp_path, 1, call(0), ended=True)
    begin = "first cause: the program of rank 1 came to its end after reshard call 0 of 0-2"
    assert cause(tmp_path, capsys) == f"{begin}, and has not made reshard call 1 of 0-2"
    for rank in (0, 2):
        write(tmp_path, rank, call(0), call(1, "failed", error="PeerLostError: rank 1 is lost", peer=1))
    assert cause(tmp_path, capsys) == f"{begin}, while ranks 0,2 called reshard call 1 of 0-2"


def test_a_rank_that_completed_is_not_blamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It made the call that others wait in, left a handle alone, or caught what it raised."""
    write(tmp_path, 0, call(0), call(1, "unfinished", peer=2))
    write(tmp_path, 1, call(0), call(1, "unfinished", peer=2))
    write(tmp_path, 2, call(0), call(1), ended=True)
    expected = "first cause: rank 0 waits for rank 2 in reshard call 1 of 0-2, which has ended there"
    assert cause(tmp_path, capsys) == f"{expected}; its program came to its end"
    write(tmp_path, 2, call(0), call(1), call(2, "unfinished"), ended=True)
    write(tmp_path, 0, call(0), call(1))
    write(tmp_path, 1, call(0), call(1))
    assert cause(tmp_path, capsys) == "no call failed or waits"
    refused = call(2, "failed", error="LayoutError: bad shard") | {"position": None, "ranks": ()}
    write(tmp_path, 2, call(0), call(1), refused, ended=True)
    write(tmp_path, 0, call(0), call(1), call(2, "unfinished", ranks=(0, 1)))
    assert cause(tmp_path, capsys).startswith("first cause: rank 1 has not made reshard call 2 of 0-2")


def test_a_killed_rank_comes_before_one_that_completed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 0, call(0), call(1, "failed", error="PeerLostError: rank 2 is lost", peer=2))
    later = call(1, "failed", error="PeerLostError: rank 1 is lost", peer=1, begun=1002.0)
    write(tmp_path, 2, call(0), ended=True)
    write(tmp_path, 3, call(0), later, world=3)
    assert cause(tmp_path, capsys).startswith("first cause: rank 1 was lost: it wrote no record")


@pytest.mark.parametrize(
    "error",
    [
        "MeshcastError: UCX 1.22: no way to the peer from lo: it has ended, or the interface does not lead",
        "MeshcastError: its process has ended: it refuses connections",
    ],
)
def test_interfaces_explain_only_what_a_living_rank_refuses(
    error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """UCX finds no way to a peer that has ended either."""
    for rank in (0, 1):
        write(tmp_path, rank, call(0), call(1, "failed", error=error))
    assert cause(tmp_path, capsys).startswith("first cause: rank 2 was lost: it wrote no record")
    write(tmp_path, 2, call(0), call(1, "failed", error="AbortedError: by rank 0", peer=0))
    assert error in cause(tmp_path, capsys)


def test_ranks_that_disagree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 2):
        write(tmp_path, rank, call(3, "unfinished"), call(4, "unfinished", what="later"))
    other = call(3, "unfinished", what="int8 (2,)", site="eval.py:3 in run")
    write(tmp_path, 1, other, call(4, "unfinished"))
    assert main(["explain", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "ranks 0,2: reshard, float32 (4, 4)\n    at train.py:7 in step\n" in out
    assert "rank 1: reshard, int8 (2,)\n    at eval.py:3 in run\n" in out
    assert out.endswith("first cause: the ranks disagree on call 3 of group 0-2\n")


def test_ranks_in_a_circle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two groups, which two ranks use in different order."""
    a, b = {"ranks": (0, 1), "group": "0,1"}, {"ranks": (0, 1, 2), "group": "0-2"}
    write(tmp_path, 0, call(0, "unfinished", **a))
    write(tmp_path, 1, call(0, "unfinished", **b))
    write(tmp_path, 2)
    said = cause(tmp_path, capsys)
    assert "wait for each other in different calls" in said
    assert "rank 0 waits for rank 1 in reshard call 0 of 0,1" in said
    assert "rank 1 waits for rank 0 in reshard call 0 of 0-2" in said


def test_what_came_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An exception of the program before what it did to the others; a refused call before both sides of
    it."""
    lost = call(1, "failed", error="PeerLostError: rank 0: rank 1 is lost", peer=1)
    for rank in (0, 2):
        write(tmp_path, rank, call(0), lost, call(2, "failed", error="AbortedError: before", peer=1))
    assert cause(tmp_path, capsys).startswith("first cause: rank 1 was lost: it wrote no record")
    raised = {"error": "ValueError: 5 samples", "site": "data.py:9 in load", "raised": 1001.0}
    write(tmp_path, 1, call(0), exception=raised)
    expected = "first cause: rank 1 ended with ValueError: 5 samples, raised at data.py:9 in load"
    assert cause(tmp_path, capsys) == expected
    refused = call(1, "failed", error="LayoutError: bad shard") | {"position": None, "ranks": ()}
    write(tmp_path, 1, call(0), refused, exception={**raised, "error": "AbortedError: of another"})
    assert cause(tmp_path, capsys).startswith("first cause: rank 1 raised in reshard, at train.py:7 in step")


def test_what_a_rank_writes_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    meshcast.dump_flight_record(tmp_path / "own.rank0")
    assert main(["explain", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("1 records of 1 ranks\n")


def test_what_the_program_went_on_after_is_no_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call that ranks disagreed on, and one that was refused, with calls behind them that ended."""
    for rank in RANKS:
        differs = call(0, "failed", what=f"int8 ({rank},)", error="PlanMismatchError: unlike")
        refused = call(1, "failed", error="LayoutError: bad shard")
        last = [] if rank == 1 else [call(3, "unfinished")]
        write(tmp_path, rank, differs, refused, call(2), *last)
    assert cause(tmp_path, capsys).startswith("first cause: rank 1 has not made reshard call 3 of 0-2")


def test_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last calls by their state; one that did not end goes on until its record was written."""
    for rank in (0, 1):
        waiting = call(1, "unfinished" if rank else "failed", error="PeerLostError: rank 2", peer=2)
        write(tmp_path, rank, call(0), waiting, call(2, "not waited for"), world=2)
    assert main(["explain", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    found = re.search(r'id="data">(.*?)</script>', page)
    assert found is not None
    data = json.loads(found[1])
    assert data["text"] + "\n" == capsys.readouterr().out
    (panel,) = data["panels"]
    assert [bar[:4] for bar in panel["bars"]] == [
        [0, "ended", 0.0, 0.5], [0, "failed", 1.0, 1.5], [0, "late", 2.0, 2.5],
        [1, "ended", 0.0, 0.5], [1, "unfinished", 1.0, 10.0], [1, "late", 2.0, 2.5],
    ]  # fmt: skip
    assert main(["explain", str(tmp_path), "--html", str(tmp_path / "page.txt")]) == 2


def test_records_that_share_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an elastic job whose group was made anew: a worker that came later has another restart count, and
    one that died knew the first group alone. A record without an id, as of an earlier version, is read."""
    write(tmp_path, 0, jobs=["a", "b"], job="TORCHELASTIC_RESTART_COUNT=0")
    write(tmp_path, 1, jobs=["b"], job="TORCHELASTIC_RESTART_COUNT=1")
    write(tmp_path, 2, jobs=["a"], job="TORCHELASTIC_RESTART_COUNT=0")
    assert cause(tmp_path, capsys) == "no call failed or waits"
    write(tmp_path, 2, job="TORCHELASTIC_RESTART_COUNT=0")
    assert cause(tmp_path, capsys) == "no call failed or waits"


def test_a_job_may_have_changed_its_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, call(0), jobs=["a", "b"], world=2)
    write(tmp_path, 2, call(0), jobs=["a"], job="MASTER_PORT=2")  # ended with the third
    write(tmp_path, 1, call(0), jobs=["b"], world=2)
    assert cause(tmp_path, capsys) == "no call failed or waits"


def _cut(folder: Path) -> None:
    path = write(folder, 0, call(0))
    path.write_text(path.read_text()[:200])


BAD = {
    "empty": (lambda _folder: None, ["no flight records", "*.rankN", "python -m meshcast dump"]),
    "no folder": (lambda folder: folder.rmdir(), ["expected a folder"]),
    "cut": (_cut, ["job.rank0", "not JSON", "cut short"]),
    "version": (lambda folder: write(folder, 0, format="meshcast.flight/9"), ["meshcast.flight/9", FORMAT]),
    "old": (
        lambda folder: (folder / "a.rank0").write_text('{"process": 1, "calls": []}'),
        ["a.rank0", "no format", FORMAT],
    ),
    "other world": (
        lambda folder: (write(folder, 0), write(folder, 1, world=8)),
        ["world 3", "has 8", "different jobs"],
    ),
    "other job": (
        lambda folder: (write(folder, 0), write(folder, 1, job="MASTER_PORT=2")),
        ["job.rank1", "MASTER_PORT=2", "different jobs"],
    ),
    "twice": (
        lambda folder: (write(folder, 1), write(folder, 1, name="other")),
        ["job.rank1", "other.rank1", "both of rank 1"],
    ),
    "before": (
        lambda folder: (write(folder, 0, call(0)), write(folder, 1, started=2000.0, written=2001.0)),
        ["job.rank0", "job.rank1", "before the process", "1970-01-01 00:33:20"],
    ),
    "jobs": (
        lambda folder: [write(folder, rank, jobs=[f"id{rank % 2}"]) for rank in RANKS],
        ["job.rank0, job.rank2 and job.rank1 are of different jobs", "a folder with those of one"],
    ),
    "ids": (lambda folder: write(folder, 0, jobs="a"), ["job.rank0.jobs is 'a'"]),
    "id": (lambda folder: write(folder, 0, jobs=[3]), ["job.rank0.jobs[0] is 3"]),
    "started": (lambda folder: write(folder, 0, started="early"), ["job.rank0.started is 'early'"]),
    "calls": (lambda folder: write(folder, 0, calls=3), ["job.rank0.calls is 3"]),
    "call": (lambda folder: write(folder, 0, call(0, "flying")), ["calls[0].state", "unfinished"]),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_line(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, parts = BAD[kind]
    folder = tmp_path / "records"
    folder.mkdir()
    make(folder)
    assert main(["explain", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for part in parts:
        assert part in err
