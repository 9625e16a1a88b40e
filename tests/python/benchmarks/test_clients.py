"""The table of plug-ins beside the packages' own transports, and what is said without their environments."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benchmark_pages import check_tables

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.harness import ROOT
from benchmarks.weights import clients


def test_the_page_has_the_figures_that_are_kept() -> None:
    kept = clients.PAGE.results
    text = clients.text(kept)
    check_tables(text)
    assert f"\n\n{text}\n\n" in (ROOT / clients.PAGE.path).read_text()
    assert list(kept["jobs"]) == list(clients._JOBS)
    for found in kept["jobs"].values():
        assert all(way["wrong_bytes"] == 0 for way in found["ways"].values())
        # No way beats the bound; the rate is that of the emulated link, which lets a hundredth more through.
        assert all(min(way["seconds"]) > 0.99 * found["bound"] for way in found["ways"].values())


def test_a_package_without_its_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Nothing:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Nothing:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(clients, "python_of", lambda client: ROOT / "nowhere" / client)
    monkeypatch.setattr(clients, "Cluster", Nothing)  # no namespaces: nothing is to run in them
    monkeypatch.setattr(sys, "argv", ["clients"])
    assert clients.main() == 1
    said = capsys.readouterr().err
    for client in ("torchft", "megatron"):
        assert f"{client}: NOT RUN: make test-clients CLIENTS={client}" in said
