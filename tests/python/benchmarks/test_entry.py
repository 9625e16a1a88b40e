"""The one entry of the benchmarks, and what all of them share: names, results, pages, imports."""

from __future__ import annotations

import ast
import gzip
import importlib
import json
import signal
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from benchmark_pages import check_tables

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as entry  # noqa: E402
from benchmarks import harness  # noqa: E402

BENCHMARKS = ROOT / "benchmarks"


def tree_of(module: str) -> ast.Module:
    path = BENCHMARKS.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(), str(file))


@pytest.mark.parametrize("name", entry.BENCHMARKS)
def test_every_name_has_a_program(name: str) -> None:
    module, _, function = entry.BENCHMARKS[name].program.partition(":")
    defined = [node.name for node in tree_of(module).body if isinstance(node, ast.FunctionDef)]
    assert (function or "main") in defined
    assert f"  {name} " in entry.listing()


def test_what_is_asked_for_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(importlib, "import_module", lambda name: Program(name, ran))
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def status(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
        return entry.main()

    assert status("windows", "--no-publish") == 0
    assert status("--cases", "odd") == 0, "options without a name are those of reshard"
    assert ran == [
        ["benchmarks.planner", "windows", "python -m benchmarks windows", "--no-publish"],
        ["benchmarks.reshard.session", "main", "python -m benchmarks reshard", "--cases", "odd"],
    ]
    assert status("no_such") == 2
    assert "unknown name 'no_such'; known are reshard, calls" in capsys.readouterr().err
    assert status() == status("--help") == 0
    assert len(ran) == 2


class Program:
    """A module whose functions note how they were called."""

    def __init__(self, name: str, ran: list[list[str]]) -> None:
        self._name, self._ran = name, ran

    def __getattr__(self, function: str) -> Any:
        return lambda: self._ran.append([self._name, function, *sys.argv])


def test_large_results_are_kept_compressed_and_read_all_the_same(tmp_path: Path) -> None:
    small, large = tmp_path / "small.json", tmp_path / "large.json"
    harness.save(small, {"a": 1})
    harness.save(large, list(range(20000)))
    for path in (small, large):
        harness.pack(path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["large.json.gz", "small.json"]
    assert harness.load(small) == {"a": 1}
    assert harness.load(large) == list(range(20000))
    assert harness.load(tmp_path / "none.json") is None
    packed = (tmp_path / "large.json.gz").read_bytes()
    harness.save(large, list(range(20000)))
    assert harness.load(large) == json.loads(gzip.decompress(packed))
    harness.pack(large)
    assert (tmp_path / "large.json.gz").read_bytes() == packed, "the same bytes each time"


def test_no_kept_result_is_large() -> None:
    assert [path.name for path in harness.RESULTS.iterdir() if path.stat().st_size > 64 << 10] == []


@pytest.mark.parametrize("module", entry._PAGES)
def test_pages_follow_from_the_results_that_are_kept(module: str, tmp_path: Path) -> None:
    for page in importlib.import_module(f"benchmarks.{module}").PAGES:
        text = page.text(page.results)
        check_tables(text)
        committed = (ROOT / page.path).read_bytes()
        copy = tmp_path / page.path
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(committed)
        harness.replace(copy, page.name, text)
        assert copy.read_bytes() == committed, f"{page.name}: python -m benchmarks publish"


def test_commands_are_shown_as_they_are_typed_now() -> None:
    for before, now in (
        ("python -m benchmarks.transports --repeats 5", "python -m benchmarks calls --repeats 5"),
        ("python -m benchmarks.e2e", "python -m benchmarks e2e"),
        ("python -m benchmarks --cases odd", "python -m benchmarks reshard --cases odd"),
        ("python -m benchmarks reshard --cases odd", "python -m benchmarks reshard --cases odd"),
    ):
        assert harness.command({"command": before}) == now


def test_imports_have_no_circle() -> None:
    """Also those inside functions count, except for the entry's, which all come after."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in BENCHMARKS.rglob("*.py")
    }
    graph = {}
    for name, path in modules.items():
        if path.name in ("__init__.py", "__main__.py"):
            continue
        package = name.split(".")[:-1]
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) + 1 - node.level] if node.level else []
                target = ".".join([*base, *((node.module or "").split(".") if node.module else [])])
                found |= {target, *(f"{target}.{each.name}" for each in node.names)} & set(modules)
        graph[name] = found
    assert graph["benchmarks.calls.rounds"] >= {"benchmarks.harness", "benchmarks.calls.cases"}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules
