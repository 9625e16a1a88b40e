"""`python -m meshcast`: what it prints, and one line with exit status 2 for bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import meshcast
import pytest
from meshcast import Layout, Plan, Topology
from meshcast.cli import COMMANDS, main

GOOD = {"--shape": "1024,1024,512", "--dtype": "int32", "--src": "2x4:S0RR", "--dst": "3x4@8:S0RR"}


def _argv(**options: str | None) -> list[str]:
    merged = {**GOOD, **{f"--{name.replace('_', '-')}": value for name, value in options.items()}}
    return ["plan", *(word for pair in merged.items() if pair[1] is not None for word in pair)]


def _plan(topology: Topology, **options: object) -> Plan:
    src, dst = Layout.parse(GOOD["--src"]), Layout.parse(GOOD["--dst"])
    return meshcast.plan((1024, 1024, 512), "int32", src, dst, topology, **options)  # type: ignore[arg-type]


def test_prints_the_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_argv(nic_gbps="10", ranks_per_host="4")) == 0
    assert capsys.readouterr() == (_plan(Topology.uniform(4, 10)).describe() + "\n", "")


def test_every_option_reaches_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    argv = _argv(
        nic_gbps="25", ranks_per_host="2", nics_per_host="2", local_gbps="100", latency_us="5.5",
        strategy="broadcast", balance="size", chunk_bytes="4000000", seed="3",
    )  # fmt: skip
    assert main([*argv, "--json"]) == 0
    topology = Topology.uniform(2, 25, 2, 100, 5.5)
    expected = _plan(topology, strategy="broadcast", balance="size", chunk_bytes=4_000_000, seed=3)
    printed = capsys.readouterr().out
    assert json.loads(printed) == json.loads(expected.to_json())
    assert Plan.from_json(printed) == expected


def test_topology_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topology = Topology.from_hosts({rank: str(rank // 5) for rank in range(20)}, nic_gbps=40)
    (tmp_path / "t.json").write_text(topology.to_json())
    assert main(_argv(topology=str(tmp_path / "t.json"))) == 0
    assert capsys.readouterr().out == _plan(topology).describe() + "\n"


def test_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_argv(draw=str(tmp_path / "plan.svg"))) == 0
    assert "lower bound" in (tmp_path / "plan.svg").read_text()
    assert "lower bound" in capsys.readouterr().out


def test_compare_lists_strategies_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_argv(ranks_per_host="4"), "--compare"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert {"multicast", "broadcast", "send_recv"} <= set(names)
    assert names.index("send_recv") > names.index("broadcast")


def test_comparisons_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_argv(ranks_per_host="4"), "--compare", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    times = [each["makespan"] for each in found["strategies"]]
    assert times == sorted(times) and times[0] >= found["strategies"][0]["lower_bound"] > 0
    assert {each["strategy"] for each in found["strategies"]} | set(found["refused"]) >= {
        "send_recv",
        "multicast",
    }
    argv = ["simulate", "--stages", "4", "--microbatches", "8", "--json"]
    assert main(argv) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["makespan"] == 33 and len(figures["peak_activations"]) == 4
    assert main([*argv, "--compare"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert figures in [{name: row.get(name) for name in figures} for row in rows]


def test_torchs_words_and_short_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_argv(dtype="bf16", src="2x4:Shard(0),Replicate()", dst="3x4@8:Shard(0),Replicate()")) == 0
    words = capsys.readouterr().out
    assert main(_argv(dtype="bfloat16")) == 0
    assert words == capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "2x4:[Shard(dim=0), Replicate()]",
        "2x4:(Shard(dim=0), Replicate())",
        "2x4:Shard(0),Replicate",
        "2x4:S0RR",
    ],
)
def test_layouts_as_python_prints_them(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for source in (text, "2x4:Shard(0),Replicate()"):
        assert main(_argv(src=source)) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]


def test_results_follow_files_and_a_full_disk_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is printed before the files are written: stdout has the whole result, or none of it."""
    simulated = ["simulate", "--stages", "2", "--microbatches", "2"]
    for argv in (_argv(), simulated, [*simulated, "--compare", "--json"]):
        for option, suffix in (("--html", "html"), ("--draw", "svg")):
            full = tmp_path / f"full.{suffix}"
            full.unlink(missing_ok=True)
            full.symlink_to("/dev/full")
            assert main([*argv, option, str(full)]) == 1
            out, err = capsys.readouterr()
            assert out == ""
            assert err.endswith(f"error: {option}: cannot write {full}: No space left on device\n")


def test_cases_of_bench_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    *rows, legend = capsys.readouterr().out.splitlines()
    assert "2x4:Replicate(),Shard(0)" in legend
    assert main(["bench", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found] == [row[:36].strip() for row in rows]


def test_scalar_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_argv(shape="", src="2:", dst="2@2:")) == 0
    assert "scalar int32" in capsys.readouterr().out
    for argv in (["--help"], ["plan", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 0
    assert meshcast.__version__ in capsys.readouterr().out


BAD = [
    (["--help-me"], ["plan", "doctor"]),
    (["shard"], ["'shard'", "plan", "doctor"]),
    (["plan"], ["--shape", "--dtype", "--src", "--dst"]),
    (_argv(shape="8,x"), ["--shape", "'8,x'", "1024,1024,512"]),
    (_argv(shape="8,-1,2"), ["--shape"]),
    (_argv(shape="9" * 24 + ",1,1"), ["--shape", "9223372036854775807"]),
    (_argv(shape="4000000000,4000000000,4"), ["--src", "overflow"]),
    (_argv(shape="8,8"), ["--src", "3 dimensions"]),
    (_argv(dtype="int33"), ["--dtype", "'int33'", "float32"]),
    (_argv(src="2x4"), ["--src", "'2x4'", "2x4:Shard(0),Replicate()"]),
    (_argv(dst="2x4@:S0RR"), ["--dst", "2x4:Shard(0),Replicate()"]),
    (_argv(dst="2x4:S5RR"), ["--dst", "mesh axis 5", "0 to 1"]),
    (_argv(nic_gbps="0"), ["--nic-gbps", "above 0"]),
    (_argv(nic_gbps="fast"), ["--nic-gbps", "'fast'", "number"]),
    (_argv(nic_gbps="nan"), ["--nic-gbps", "nan"]),
    (_argv(ranks_per_host="4.5"), ["--ranks-per-host", "'4.5'", "integer"]),
    (_argv(ranks_per_host="0"), ["--ranks-per-host", "1 to"]),
    (_argv(nics_per_host="5000"), ["--nics-per-host", "1 to 1024"]),
    (_argv(latency_us="-1"), ["--latency-us", "0 to"]),
    (_argv(topology="nowhere.json"), ["--topology", "nowhere.json", "No such file"]),
    (_argv(topology="t.json", nic_gbps="10"), ["--nic-gbps", "--topology"]),
    (_argv(strategy="fast"), ["--strategy", "'fast'", "send_recv"]),
    (_argv(balance="best"), ["--balance", "'best'", "greedy"]),
    (_argv(chunk_bytes="0"), ["--chunk-bytes", "1 to"]),
    (_argv(chunk_bytes="1e6"), ["--chunk-bytes", "'1e6'"]),
    (_argv(seed="-1"), ["--seed", "0 to"]),
    (_argv(draw="plan.gif"), ["--draw", ".png, .svg, .pdf"]),
    (_argv(draw="/nowhere/plan.png"), ["--draw", "/nowhere/plan.png", "there is no folder /nowhere"]),
    (_argv(html="/nowhere/plan.html"), ["--html", "/nowhere/plan.html", "there is no folder /nowhere"]),
    (_argv(html="plan.htmx"), ["--html", "'plan.htmx'", ".html"]),
    ([*_argv(strategy="broadcast"), "--compare"], ["--strategy", "--compare"]),
    ([*_argv(draw="plan.png"), "--compare"], ["--draw", "--compare"]),
    ([*_argv(html="plan.html"), "--compare"], ["--html", "--compare"]),
    (_argv(src="2x4:Shard(0)"), ["--src", "1 placements", "2 dimensions"]),
    (_argv(src="2x4:Shard(0),Replica()"), ["--src", "Replica()", "2x4:Shard(0),Replicate()"]),
    (_argv(src="2x4:shard(0),replicate()"), ["--src", "'shard(0),replicate()'", "2x4:Shard(0),Replicate()"]),
    (_argv(src="2x4:S(0),R"), ["--src", "'S(0),R'", "Shard(dim)"]),
    (_argv(src="2x4:S9x"), ["--src", "2x4:S1R shards tensor dimension 0 over mesh dimension 1"]),
    (_argv(src="2x4:S1R"), ["--src", "2 dimensions", "a letter for each of them"]),
    (_argv(html=f"{__file__}/plan.html"), ["--html", "there is no folder"]),
    (
        ["simulate", "--stages", "2", "--microbatches", "2", "--compare", "--warmup", "1"],
        ["--warmup", "--compare"],
    ),
    (
        ["simulate", "--stages", "2", "--microbatches", "2", "--compare", "--schedule", "GPipe"],
        ["--schedule", "--compare"],
    ),
    (["bench", "n-to-m", "--seconds", "nan"], ["--seconds"]),
    (
        ["simulate", "--stages", "2", "--microbatches", "2", "--html", "/nowhere/s.html"],
        ["--html", "no folder"],
    ),
    (["timeline", "t.json", "-o", "/nowhere/t.png"], ["--output", "no folder"]),
    (["explain", ".", "--html", "/nowhere/e.html"], ["--html", "no folder"]),
    ([*_argv(), "--colour", "red"], ["--colour"]),
    ([*_argv(), "--stra", "auto"], ["--stra"]),
    (["plann"], ["there is no command 'plann'", "is plan meant?"]),
    (["colour"], ["there is no command 'colour'", "choose one of plan, bench"]),
    (["--colour"], ["plan|bench"]),
    (["bench", "nonsense"], ["'nonsense'", "in-host", "python -m meshcast bench lists"]),
    (["bench", "in-host"], ["need 4 ranks, and none was started", "torchrun --nproc-per-node 4"]),
    (["dump", "--rank", "x"], ["'x'", "expected a rank"]),
]


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert all(f"\n  {name} " in said.out for name in COMMANDS)


@pytest.mark.parametrize(("argv", "parts"), BAD)
def test_bad_input_is_one_line_and_status_2(
    argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(argv)
    except SystemExit as exit_:
        status = exit_.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("python -m meshcast")
    for part in parts:
        assert part in err
    assert len(err) < 500


def _process(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(meshcast.__file__).parent.parent)}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)


def test_as_a_process() -> None:
    command = [sys.executable, "-m", "meshcast"]
    done = _process([*command, *_argv(shape="x,1,1")])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    done = _process([*command, *_argv()])
    assert (done.returncode, done.stderr) == (0, "")
    assert "makespan" in done.stdout


def test_a_full_disk_is_one_line() -> None:
    done = _process(["bash", "-c", f"{sys.executable} -m meshcast {' '.join(_argv())} >/dev/full"])
    assert done.returncode == 1
    assert done.stderr == "python -m meshcast plan: error: cannot write the output: No space left on device\n"


def test_a_reader_that_stops_early_is_no_error() -> None:
    words = f"{sys.executable} -m meshcast {' '.join(_argv(chunk_bytes='1000000'))} --json | head -c 10"
    done = _process(["bash", "-c", words])
    assert (done.stdout, done.stderr) == ('{"format":', "")
