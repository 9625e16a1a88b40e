"""`python -m meshcast simulate` and `timeline`: figures, pictures, and one line for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from meshcast.cli import main
from meshcast.pipelining import Action
from meshcast.pipelining.trace import Trace

PNG = b"\x89PNG"


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_simulate_prints_figures_and_a_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--schedule 1f1b --stages 2 --microbatches 3 --transfer 1"
    assert main(["simulate", *options.split()]) == 0
    out = lines_of(capsys)
    assert out[0] == "makespan            16 (in the unit of the given times)"
    assert out[3].startswith("peak activations    2 1")
    assert out[-1] == "rank 1  .  .  F0 B0--- F1 B1--- .  .  F2 B2---"


def test_options_reach_the_simulator(capsys: pytest.CaptureFixture[str]) -> None:
    command = "simulate --stages 4 --microbatches 16 --transfer 0.5"
    found = {}
    tried = (
        "",
        "--delay-weight-grad",
        "--warmup 1f1b",
        "--warmup 5,4,2,1",
        "--buffers 0",
        "--warmup auto --memory-budget 4",
        "--weight 0.5 --delay-weight-grad",
        "--forward 1,1,1,2",
        "--schedule zbv",
        "--shared-links --send-model rendezvous",
    )
    for options in tried:
        assert main([*command.split(), *options.split()]) == 0
        found[options] = float(lines_of(capsys)[0].split()[1])
    assert found[""] == 60.0
    assert found["--delay-weight-grad"] == 57.0
    assert found["--weight 0.5 --delay-weight-grad"] == 58.5
    assert found["--warmup 1f1b"] == 71.0
    assert found["--warmup auto --memory-budget 4"] == 71.0
    assert 60.0 < found["--warmup 5,4,2,1"] <= 71.0
    assert found["--buffers 0"] > 60.0
    assert found["--forward 1,1,1,2"] > 60.0


def test_compare_shows_and_draws_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "all.png"
    command = "simulate --stages 4 --microbatches 16 --transfer 1 --compare --draw"
    assert main([*command.split(), str(picture)]) == 0
    lines = lines_of(capsys)
    rows = {line[:26].strip(): line[26:].split() for line in lines[1:-5]}
    assert rows["1F1B"][1] == "1.491"
    assert rows["Eager1F1B"][1] == "1.105"
    assert rows["Eager1F1B, delayed"][1] == "1.053"
    assert float(rows["1F1B, no overlap"][0]) >= float(rows["1F1B"][0])
    assert len(rows) == 10
    explained = [name.strip() for line in lines[-4:] for name in line[:18].split(",")]
    assert [name for name in explained if name not in lines[0]] == [], "each column is explained"
    assert picture.read_bytes()[:4] == PNG


def write_traces(folder: Path) -> list[str]:
    paths = []
    for rank in range(2):
        trace = Trace(began=(100.0 * rank, 1000.0 + 0.5 * rank))
        begin = trace.began[0]
        trace.add(Action.parse(f"{rank}RECV_F0"), begin, begin + 0.1)
        trace.add(Action.parse(f"{rank}F0"), begin + 0.1, begin + 0.4)
        trace.add(Action.parse(f"{rank}I0"), begin + 0.4, begin + 0.5)
        trace.add(Action.parse(f"{rank}W0"), begin + 0.5, begin + 0.6)
        if rank == 0:
            trace.add(Action.parse("0SEND_F0>1"), begin + 0.55, begin + 0.65)
        paths.append(str(folder / f"rank{rank}.json"))
        trace.write(paths[-1], rank)
    return paths


def test_timeline_puts_ranks_on_one_scale(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Rank 1 began half a second later, by the clocks of the hosts: the step takes 1.1 s. It waits 0.1 s for
    a value that left halfway through that."""
    picture = tmp_path / "step.png"
    assert main(["timeline", *write_traces(tmp_path), "-o", str(picture)]) == 0
    assert picture.read_bytes()[:4] == PNG
    out = lines_of(capsys)
    assert out[1] == ("rank 1: computes 45.5%, waits for values 9.1%, for values in flight 4.5% of 1100 ms")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--stages 0 --microbatches 4", "--stages: '0': expected an integer in 1..4096"),
        ("--stages x --microbatches 4", "--stages: 'x'"),
        ("--stages 2 --microbatches 4 --forward 1,2,3", "one for each of the 2 stages"),
        ("--stages 2 --microbatches 4 --forward -1", "--forward"),
        ("--stages 2 --microbatches 4 --forward=nan", "--forward: 'nan'"),
        ("--stages 2 --microbatches 4 --schedule ZigZag", "there is no schedule 'ZigZag'"),
        ("--stages 3 --microbatches 4 --schedule ZBV", "an even number of stages"),
        ("--stages 2 --microbatches 4 --warmup soon", "--warmup: 'soon'"),
        ("--stages 4 --microbatches 4 --memory-budget 2", "memory budget is 2"),
        ("--stages 2 --microbatches 4 --send-model pigeon", "--send-model"),
        ("--stages 2 --microbatches 4 --draw /tmp/x.txt", "--draw"),
        ("--stages 2 --microbatches 4 --draw /nowhere/x.png", "--draw"),
    ],
)
def test_bad_input_is_one_line(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["simulate", *options.split()])
    except SystemExit as exit_:
        status = exit_.code
    error = capsys.readouterr().err
    assert status == 2
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"traceEvents": [{"ph": "X", "name": "0F0"}]}',
                json.dumps({"traceEvents": [{"ph": "X", "name": "fun", "pid": 0, "ts": 0, "dur": 1}]})]
)  # fmt: skip
def test_files_that_are_no_traces(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    assert main(["timeline", str(path), "-o", str(tmp_path / "t.png")]) == 2
    assert "bad.json" in capsys.readouterr().err
    for name in ("none.json", ""):  # no file, and the folder
        assert main(["timeline", str(tmp_path / name), "-o", str(tmp_path / "t.png")]) == 2
        error = capsys.readouterr().err
        assert error.count(str(tmp_path / name)) == 1, error
