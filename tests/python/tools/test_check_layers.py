"""tools/check_layers.py finds what it is there for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import check_layers


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({"base.checks": {"groups.board"}, "groups.board": set()}, ["python: base.checks > groups.board"]),
        ({"backend.x": {"pipelining.y"}, "pipelining.y": set()}, ["python: backend.x > pipelining.y"]),
        ({"resharding.x": {"_C"}, "_C": set()}, ["python: resharding.x > _C"]),
        ({"base.a": {"base.b"}, "base.b": {"base.a"}}, ["python: circle of base.a base.b"]),
        ({"groups.board": {"base.checks"}, "base.checks": {"errors"}, "errors": set()}, []),
    ],
)
def test_python(monkeypatch: pytest.MonkeyPatch, graph: check_layers.Graph, expected: list[str]) -> None:
    monkeypatch.setattr(check_layers, "python_graph", lambda: graph)
    assert check_layers.python_violations() == expected


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({"run/a.h": {"rounds/b.h"}, "rounds/b.h": set()}, ["csrc: run/a.h > rounds/b.h"]),
        ({"plan/a.h": {"ATen/core/Tensor.h"}}, ["csrc: plan/a.h > ATen/core/Tensor.h"]),
        ({"plan/bound/a.h": {"plan/strategies/b.h"}, "plan/strategies/b.h": set()},
         ["csrc: plan/bound/a.h > plan/strategies/b.h"]),
        ({"c10d/a.h": {"torch/x.h", "run/b.h"}, "run/b.h": {"vector"}}, []),
    ],
)  # fmt: skip
def test_cpp(monkeypatch: pytest.MonkeyPatch, graph: check_layers.Graph, expected: list[str]) -> None:
    monkeypatch.setattr(check_layers, "cpp_graph", lambda: graph)
    assert check_layers.cpp_violations() == expected


def test_the_longest_chain_counts_a_circle_once() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert check_layers.longest_chain(graph, graph) == ["a", "b", "d"]


def test_class_names_and_private_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("base", "groups"):
        (tmp_path / folder).mkdir()
    (tmp_path / "base" / "a.py").write_text("from .b import _inner\nfrom os import _exit\nclass One: ...\n")
    (tmp_path / "groups" / "c.py").write_text(
        "from .. import _C\nfrom ..base.a import _hidden\nfrom meshcast.base.b import _other\n"
        "class One: ...\n"
    )
    monkeypatch.setattr(check_layers, "PACKAGE", tmp_path)
    assert check_layers.class_violations() == [
        "python: groups/c.py > _hidden, a private name",
        "python: groups/c.py > _other, a private name",
        "python: class One in base/a.py and groups/c.py",
    ]


def test_nothing_becomes_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    (tmp_path / "b.py").write_text("")
    monkeypatch.setattr(check_layers, "PACKAGE", tmp_path)
    monkeypatch.setattr(check_layers, "MOST_FILES", 1)
    monkeypatch.setattr(check_layers, "LONGEST_CHAINS", {"base": 1})
    graph = {"base.a": {"base.b"}, "base.b": set(), "groups.c": {"base.a"}}
    monkeypatch.setattr(check_layers, "python_graph", lambda: graph)
    assert check_layers.ratchet_violations() == [
        "python: 2 files, there were 1: a file is a concept",
        "python: a chain of 2 imports, there were 1: base.a > base.b",
    ]
