"""What is made of raw results: tables, verdicts, comparison with committed ones, the page that is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from meshcast import Layout
from meshcast.bench import report
from meshcast.bench.cases import CaseSetting, find
from meshcast.bench.measure import Links

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks import check, harness, planner  # noqa: E402
from benchmarks.peers.programs import problem  # noqa: E402
from benchmarks.reshard import page as pages  # noqa: E402
from benchmarks.reshard import session  # noqa: E402

GOOD = {
    "hosts": 4,
    "efficiency": 0.95,
    "slowest_all_at_once": 0.99,
    "local_copy_gbytes": 3.0,
    "topology": "{}",
}


def case(name: str = "n-to-m 1", **seconds: list[float]) -> dict[str, Any]:
    return {
        "name": name, "layouts": "a to b", "nbytes": 1 << 20, "tensors": 1, "lower_bound": 0.1,
        "strategy": "multicast", "predicted": 0.101, "seconds": seconds,
        "busy": {method: [0.5] * len(taken) for method, taken in seconds.items()},
        "wrong_bytes": dict.fromkeys(seconds, 0), "not_run": {}, "failed": {},
    }  # fmt: skip


def results(*cases: dict[str, Any], **calibration: float) -> dict[str, Any]:
    head = {"command": "python -m benchmarks", "links": "emulated", "cores": 2, "link_mbit": 250.0}
    return {"header": head, "calibrations": [GOOD | calibration], "cases": list(cases), "left_out": {}}


def test_ratios_and_spread() -> None:
    one = case(auto=[0.11, 0.10, 0.12], other=[0.3], none=[])
    assert report.ratio(one, "auto") == pytest.approx(1.1)
    assert report.spread(one, "auto") == pytest.approx(0.02 / 0.11)
    assert report.spread(one, "other") is None
    assert report.ratio(one, "none") is report.ratio(one, "absent") is None
    assert report.ratio(one | {"lower_bound": 0.0}, "auto") is None
    assert report.quantile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert report.quantile([float(n) for n in range(1, 201)], 0.99) == 199.0
    assert report.quantile([5.0], 0.99) == 5.0


def test_cells_tell_load_and_failure() -> None:
    one = case(auto=[0.1, 0.1], other=[0.2])
    one["busy"]["auto"] = [0.99, 0.99]
    one["failed"] = {"broken": "it crashed"}
    assert report.cell(one, "auto") == "1.00\\*"
    assert report.cell(one, "other") == "2.00"
    assert report.cell(one, "broken") == "failed"
    assert report.cell(one, "absent") == "-"


def test_details_name_every_method() -> None:
    one = case(auto=[0.10, 0.11, 0.12], other=[0.22])
    one["wrong_bytes"]["other"] = 8
    one["not_run"] = {"MPICH bcast": "not installed: apt-get install mpich"}
    one["failed"] = {"broken": "it crashed"}
    lines = report.details(one).splitlines()
    columns = {line.split()[0]: line.split() for line in lines if line.startswith(("auto", "other"))}
    assert columns["auto"][1:8] == ["3", "100.00", "110.00", "120.00", "9.5", "1.100", "1.00"]
    assert columns["other"][1:9] == ["1", "220.00", "220.00", "220.00", "4.8", "2.200", "2.00", "-"]
    assert columns["other"][-1] == "8"
    assert any("MPICH bcast" in line and "apt-get install mpich" in line for line in lines)
    assert any("broken" in line and "FAILED: it crashed" in line for line in lines)


def test_what_must_not_be_reported() -> None:
    assert report.problems(results(case(auto=[0.1]))) == []
    wrong = case(auto=[0.1])
    wrong["wrong_bytes"]["auto"] = 4
    assert "4 wrong bytes" in report.problems(results(wrong))[0]
    assert "cores are the limit" in report.problems(results(case(auto=[0.1]), slowest_all_at_once=0.8))[0]
    assert "does not carry" in report.problems(results(case(auto=[0.1]), efficiency=0.7))[0]
    loopback = results(case(auto=[0.1]))
    loopback["header"]["links"] = "loopback"
    assert "loopback" in report.problems(loopback)[0]


def test_unsteady_repeats_and_failures_are_remarked() -> None:
    steady, unsteady = case("steady", auto=[1.0, 1.01]), case("unsteady", auto=[1.0, 1.2])
    steady["failed"] = {"broken": "it crashed"}
    unsteady["busy"]["auto"] = [0.9, 0.99]
    load, first, second = report.remarks(results(steady, unsteady))
    assert load == "the cores were busy beyond 85% while auto ran in 1 cases"
    assert first == "steady: broken failed: it crashed"
    assert second.startswith("unsteady: repeats of auto differ by 18.2%")


def test_check_compares_ratios() -> None:
    before = {"a": case("a", auto=[0.10], multicast=[0.10]), "b": case("b", auto=[0.2])}
    same = {"a": case("a", auto=[0.109], multicast=[0.05]), "b": case("b", auto=[0.2])}
    assert check.worse(before, same, ["auto", "multicast", "broadcast"]) == {}
    slower = {"a": case("a", auto=[0.111], multicast=[0.1])}
    assert check.worse(before, slower, ["auto", "multicast", "broadcast"]) == {
        "a": ["a, auto: 1.110, committed 1.000"],
        "b": ["b, auto: not measured, committed 2.000"],
    }


def test_check_measures_again_what_is_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once disturbed is no regression; three times above is, and so are wrong bytes in any of the runs, and
    messages that became slower."""
    committed = tmp_path / "committed.json"
    cases = [case("steady", auto=[0.10]), case("shaky", auto=[0.10])]
    committed.write_text(json.dumps({"header": {"link_mbit": 250.0, "bound_seconds": 0.3}, "cases": cases}))
    monkeypatch.setattr(sys, "argv", ["check", "--committed", str(committed)])

    def check_with(
        shaky: list[float], status: int = 0, messages: tuple[str, ...] = ()
    ) -> tuple[int, list[list[str]]]:
        asked: list[list[str]] = []

        def measure(names: list[str], *_: float) -> tuple[dict[str, Any], int]:
            asked.append(names)
            seconds = {"steady": 0.10, "shaky": shaky[len(asked) - 1]}
            return {name: case(name, auto=[seconds[name]]) for name in names}, status

        monkeypatch.setattr(check, "measure", measure)
        monkeypatch.setattr(check, "check_messages", lambda _: list(messages))
        return check.main(), asked

    assert check_with([0.10]) == (0, [["steady", "shaky"]])
    assert check_with([0.20, 0.12, 0.10]) == (0, [["steady", "shaky"], ["shaky"], ["shaky"]])
    assert check_with([0.20, 0.12, 0.12]) == (1, [["steady", "shaky"], ["shaky"], ["shaky"]])
    assert check_with([0.10], messages=("slower",)) == (1, [["steady", "shaky"]])
    assert check_with([0.20], status=1) == (1, [["steady", "shaky"]])


def test_publish_writes_between_the_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, readme, folder = tmp_path / "page.md", tmp_path / "README.md", tmp_path / "results"
    folder.mkdir()
    marks = "\n\nOUTDATED\n\n".join(
        f"<!-- {word} of what python -m benchmarks reshard writes -->" for word in ("Begin", "End")
    )
    for file in (page, readme):
        file.write_text(f"before\n{marks}\nafter\n")
    monkeypatch.setattr(pages, "_PAGE", page)
    monkeypatch.setattr(pages, "_README", readme)
    monkeypatch.setattr(pages, "_PICTURE", tmp_path / "images" / "chart.svg")
    assert pages.publish(folder) == 1, "nothing is measured yet"

    one = case(**{"auto": [0.1, 0.1], "gloo unicasts": [0.4], "Open MPI pipeline": [0.12]})
    one["not_run"] = {"MPICH bcast": "not installed: apt-get install mpich"}
    (folder / "paper_cases.json").write_text(json.dumps(results(one)))
    (folder / "scaling.json").write_text(json.dumps(results(case(auto=[0.1]), efficiency=0.1)))
    rows = [planner.measure(16, *next((k, *v) for k, v in planner.kinds(16).items()))]
    kind, problems = next(iter(planner.llama(layers=1).items()))
    weights = [planner.measure_fast_nics(kind, problems)]
    one, (ranks, problem) = next(iter(planner.multicasts().items()))
    multicasts = [planner.measure_fast_nics(one, [problem], ranks)]
    fleet = planner.Fleet(16, 16, experts=8)
    mixture = planner.measure_fast_nics("16 to 16", planner.mixture(fleet, layers=2), 32)
    simulated = {"header": {"cores": 2}, "rows": rows, "weights": weights, "multicasts": multicasts}
    simulated["mixtures"] = [mixture]
    (folder / "planner.json").write_text(json.dumps(simulated))
    assert pages.publish(folder) == 1, "one of the results must not be reported"
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "OUTDATED" not in text
    assert "| n-to-m 1 | a to b | 1 | 0.100 | 1.00 | 0.0% | 0 |" in text
    assert "| n-to-m 1 | a to b | 1 | 0.100 | 1.00 | 4.00 | 1.20 | 0.0% | 0 |" in text
    assert "MPICH bcast: not installed: apt-get install mpich" in text
    assert "Not reported: this machine does not carry the rate" in text
    assert "predictions of the cost model" in text
    assert "| 1024 | 8192 x 8192 to Shard(0) |" in text
    assert "| 65 | 65536 x 65536, one rank to 64 replicas |" in text
    assert "| 32 | 16 to 16 |" in text
    assert "| 1.3 |" in text
    assert "| one message per receiver, gloo | 4.00 | 4.00 to 4.00 | 1 |" in readme.read_text()
    assert (tmp_path / "images" / "chart.svg").read_text().lstrip().startswith("<?xml")

    (folder / "scaling.json").unlink()
    written = page.read_text()
    assert pages.publish(folder) == 0
    assert pages.publish(folder) == 0
    assert "Not reported" in written
    assert "Not reported" not in page.read_text()


def test_publish_wants_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="marks"):
        harness.replace(page, "a table", "text")
    assert page.read_text() == "no marks"


def test_results_are_kept_case_by_case(tmp_path: Path) -> None:
    out = tmp_path / "new" / "results.json"
    book = session.Book({"cores": 2, "links": "emulated"}, out)
    book.calibrated(GOOD)
    book.found(case(auto=[0.1, 0.1]))
    assert [one["name"] for one in json.loads(out.read_text())["cases"]] == ["n-to-m 1"]
    book.left_out(["n-to-m 2"], "it broke")
    assert json.loads(out.read_text())["left_out"] == {"n-to-m 2": "it broke"}
    assert book.close(["auto", "absent"]) == []
    assert "median time over the lower bound" in out.with_suffix(".txt").read_text()
    assert not list(out.parent.glob("*.part"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cases", "nonsense"], "unknown case 'nonsense'; known are n-to-m"),
        (["--methods", "nonsense"], "unknown method 'nonsense'; known are auto"),
        (["--mbit", "-3"], "must be positive"),
        (["--repeats", "0"], "must be positive"),
        (["--seconds", "0"], "must be positive"),
    ],
)
def test_bad_options_are_refused(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as end:
        session.parse()
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_names_with_commas_are_separated_by_semicolons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["benchmarks", "--cases", "shards, 4 NICs;n-to-m 1,odd", "--methods", "all"]
    )
    args = session.parse()
    assert args.cases == ["shards, 4 NICs", "n-to-m 1", "odd"]
    assert "gloo broadcasts" in args.methods
    assert "ScaLAPACK gemr2d" in args.methods


def test_settings_give_each_host_its_rate() -> None:
    assert CaseSetting().mbit(250, 3) == [250, 250, 250]
    assert CaseSetting(rates=(1.0, 0.5)).mbit(200, 4) == [200, 100, 200, 200]
    assert CaseSetting(rates=(0.5,) * 5).mbit(200, 2) == [100, 100]


def test_no_link_is_taken_for_faster_than_it_is() -> None:
    slower = Links((100.0, 200.0), (95.0, 95.0), (95.0, 95.0), 1.0)
    assert slower.efficiency == pytest.approx(0.95)
    rates = [host.nics[0].out_rate for host in slower.topology(4, 2).hosts]
    assert rates == [int(95e6 / 8), int(190e6 / 8)]
    loopback = Links((100.0, 100.0), (4000.0, 4000.0), (3000.0, 3000.0), 1.0)
    assert {host.nics[0].out_rate for host in loopback.topology(4, 1).hosts} == {int(100e6 / 8)}


def scalapack(shape: tuple[int, ...], source: str, target: str) -> str:
    (base,) = find(["n-to-m 1"])
    return problem(type(base)("", "", shape, Layout.parse(source), Layout.parse(target), ""))


def test_scalapack_gets_matrices_in_blocks() -> None:
    # rows and columns; grid, block and ranks of either side
    assert scalapack((10, 7), "3:S0R", "2@3:RS0").split("\n")[:-1] == [
        "10 7", "3 1 4 7", "0 1 2", "1 2 10 4", "3 4",
    ]  # fmt: skip
    # rows of the middle dimension are columns of the matrix, five elements each
    assert scalapack((8, 6, 5), "2x2:S0S1R", "3@4:RS0R").split("\n")[:-1] == [
        "8 30", "2 2 4 15", "0 1 2 3", "1 3 8 10", "4 5 6",
    ]  # fmt: skip
    assert scalapack((12,), "3:S0", "2@3:S0").split("\n")[:-1] == [
        "1 12",
        "1 3 1 4",
        "0 1 2",
        "1 2 1 6",
        "3 4",
    ]


@pytest.mark.parametrize(
    ("shape", "source", "target"),
    [
        ((8, 6), "2x2:S0R", "4@4:S0R"),  # replicas
        ((8, 6), "4:S0R", "2@4:RR"),  # replicas
        ((8, 6, 5), "2:RS0R", "2@2:RRS0"),  # three groups of dimensions
        ((2, 6), "3:S0R", "2@3:S0R"),  # an empty shard
    ],
)
def test_scalapack_cannot_do_the_rest(shape: tuple[int, ...], source: str, target: str) -> None:
    assert scalapack(shape, source, target) == ""
