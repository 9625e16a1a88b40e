"""What is in the pages, and what is refused before one is written. How they move: test_browser.py."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import meshcast
import pytest
from meshcast import Layout, Topology
from meshcast.cli import main
from meshcast.errors import LayoutError
from meshcast.pages.page import critical_path, panel_of, write_page, write_plan_page, write_timeline_page
from meshcast.pipelining import simulate
from meshcast.pipelining.trace import Timeline

PLAN = ["plan", "--shape", "64,64,8", "--dtype", "int32", "--src", "2x4:S0RR", "--dst", "3x4@8:S0RR"]


def data_of(path: Path) -> Any:
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL
    )
    assert found is not None
    return json.loads(found[1])


def test_pages_need_no_numpy(tmp_path: Path) -> None:
    """torch does without, and `pip install meshcast` brings none."""
    program = (
        "import sys; sys.modules['numpy'] = None; from meshcast.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    simulated = ["simulate", "--stages", "2", "--microbatches", "2", "--compare"]
    for command in (PLAN, simulated):
        page = tmp_path / f"{command[0]}.html"
        done = subprocess.run(
            [sys.executable, "-c", program, *command, "--html", str(page)],
            env={**os.environ, "PYTHONPATH": str(Path(meshcast.__file__).parents[1])},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert data_of(page)


def test_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each hop and each figure is that of the plan's JSON."""
    page = tmp_path / "plan.html"
    assert main([*PLAN, "--json", "--html", str(page), "--ranks-per-host", "4"]) == 0
    expected = json.loads(capsys.readouterr().out)["result"]
    data = data_of(page)
    assert (data["makespan"], data["bound"]) == (expected["makespan_ns"], expected["lower_bound_ns"])
    for mine, its in (("src", "src"), ("dst", "dst"), ("start", "start_ns"), ("finish", "finish_ns")):
        assert data["hops"][mine] == expected["hops"][its]
    sizes = [data["chunk_bytes"][chunk] for chunk in data["hops"]["chunk"]]
    assert sizes == [expected["chunks"][chunk][2] for chunk in expected["hops"]["chunk"]]
    tasks = [expected["pieces"][expected["chunks"][chunk][0]][1] for chunk in expected["hops"]["chunk"]]
    assert data["hops"]["task"] == tasks
    assert data["about"] == [
        ["tensor", "64x64x8 int32, 128 KiB"],
        ["from", "mesh 2x4: Shard(0), Replicate() on ranks 0-7, each 32x64x8"],
        ["to", "mesh 3x4: Shard(0), Replicate() on ranks 8-19, each 22x64x8 or 20x64x8"],
        ["topology", repr(Topology.uniform(4, 10))],
    ]
    assert [host["ranks"] for host in data["hosts"]] == [list(range(4 * h, 4 * h + 4)) for h in range(5)]
    assert [data["host_of"][rank] for rank in range(20)] == [rank // 4 for rank in range(20)]


def test_schedules(tmp_path: Path) -> None:
    page = tmp_path / "schedules.html"
    argv = ["simulate", "--stages", "4", "--microbatches", "8", "--transfer", "0.5", "--compare"]
    assert main([*argv, "--html", str(page)]) == 0
    panels = data_of(page)["panels"]
    assert len(panels) == 10
    assert {panel["unit"] for panel in panels} == {"units"}
    assert data_of(page)["text"].startswith("Times are in the unit in which those of a forward")
    report = simulate("Eager1F1B", 4, 8, transfer=0.5)
    eager = panels[3]
    assert eager["title"] == f"Eager1F1B: {report.makespan:.6g}"
    assert eager["makespan"] == report.makespan
    spans = [[s.rank, s.action.kind.value, s.start, s.end] for s in (*report.timeline, *report.transfers)]
    assert [bar[:4] for bar in eager["bars"]] == spans


def test_the_critical_path_reaches_from_begin_to_end() -> None:
    """In a schedule without gaps on it: each span begins when the one before ends, and they add up."""
    for name, transfer in (("1F1B", 0.0), ("1F1B", 0.5), ("Eager1F1B", 0.5), ("GPipe", 1.0), ("ZBH1", 0.25)):
        report = simulate(name, 4, 8, transfer=transfer)
        panel = panel_of(Timeline.simulated(name, report))
        path = [panel.bars[index] for index in panel.critical]
        assert path[0].start == 0.0
        assert path[-1].end == report.makespan
        for before, after in itertools.pairwise(path):
            assert after.start == pytest.approx(before.end)


def test_critical_path_takes_what_ended_last() -> None:
    starts, ends = [0, 0, 2, 3], [1, 2, 3, 5]
    assert critical_path(starts, ends, [[], [], [0, 1], [2, 3]]) == [1, 2, 3]
    assert critical_path([], [], []) == []


def test_nothing_in_a_page_ends_its_script(tmp_path: Path) -> None:
    data = {"text": "</script><!-- STYLE --><script>alert(1)", "panels": []}
    write_page(tmp_path / "page.html", "<b>title", "timeline", data)
    text = (tmp_path / "page.html").read_text()
    assert "<b>title" not in text
    assert "alert(1)" not in re.sub(r'(?s)id="data">.*?</script>', "", text)
    assert data_of(tmp_path / "page.html") == data


def test_pages_fetch_nothing(tmp_path: Path) -> None:
    assert main([*PLAN, "--html", str(tmp_path / "plan.html")]) == 0
    text = (tmp_path / "plan.html").read_text()
    assert not re.search(r"(src|href)=|https?:|@import|url\(|fetch\(|XMLHttp", text)


def test_traces_of_different_jobs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one sentence, before the page is written; traces of earlier versions have no id and are drawn."""
    for name, job in (("a0", ["a"]), ("a1", ["a", "b"]), ("c2", ["c"]), ("old3", None)):
        trace = {"ph": "X", "name": "0F0", "pid": int(name[-1]), "ts": 1.0, "dur": 2.0}
        other = {"begin": 3.0} | ({} if job is None else {"jobs": job})
        (tmp_path / name).write_text(json.dumps({"traceEvents": [trace], "otherData": other}))
    page = tmp_path / "page.html"
    argv = ["timeline", "--html", str(page)]
    assert main([*argv, *(str(tmp_path / name) for name in ("a0", "a1", "c2", "old3"))]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"{tmp_path / 'a0'}, {tmp_path / 'a1'} and {tmp_path / 'c2'} are of different jobs" in err
    assert not page.exists()
    assert main([*argv, *(str(tmp_path / name) for name in ("a0", "a1", "old3"))]) == 0


BAD = [
    ([*PLAN, "--html", "plan.pdf"], ["--html", "'plan.pdf'", ".html"]),
    ([*PLAN, "--html", "/nowhere/plan.html"], ["--html", "/nowhere/plan.html", "no folder"]),
    (["simulate", "--stages", "2", "--microbatches", "2", "--html", "x.svg"], ["--html", ".html"]),
    (["timeline", "nothing.json"], ["--output", "--html"]),
]


@pytest.mark.parametrize(("argv", "parts"), BAD)
def test_bad_input_is_one_line(argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


def test_what_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = meshcast.plan(
        (64, 8), "int32", Layout.parse("2:S0R"), Layout.parse("4@2:S0R"), Topology.uniform(2, 10)
    )
    monkeypatch.setattr("meshcast.pages.page._MOST_HOPS", len(plan) - 1)
    with pytest.raises(LayoutError, match=f"{len(plan)} hops are too many to draw.*--chunk-bytes"):
        write_plan_page(plan, tmp_path / "plan.html")
    monkeypatch.setattr("meshcast.pages.page._MOST_BARS", 3)
    panel = panel_of(Timeline.simulated("1F1B", simulate("1F1B", 2, 2)))
    with pytest.raises(LayoutError, match="12 bars are too many to draw"):
        write_timeline_page([panel], "title", tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []
