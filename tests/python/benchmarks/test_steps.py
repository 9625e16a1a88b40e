"""How far a benchmark is: its ranks write it down, and who started them shows it."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from meshcast.base import progress
from meshcast.base.progress import Progress

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.cluster import VARIABLE, Loopback, follow, run_ranks  # noqa: E402
from benchmarks.ranks import steps  # noqa: E402


def test_rank_0_writes_it_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(progress, "_AFTER", 0.0)
    file = tmp_path / "steps"
    monkeypatch.setenv(VARIABLE, str(file))
    monkeypatch.setenv("RANK", "1")
    assert list(steps([5, 6], "rounds")) == [5, 6]
    assert not file.exists()
    monkeypatch.setenv("RANK", "0")
    taken = []
    for each in steps([5, 6], "slow rounds"):
        taken.append((each, file.read_text()))
    assert taken == [(5, "0 2 slow rounds\n"), (6, "1 2 slow rounds\n")]
    assert capsys.readouterr().err == ""
    stream = io.StringIO()
    with Progress("the ranks", stream=stream, ticks=False) as shown:
        follow(shown, file)
        assert shown.text().startswith("2 of 2, ")
    assert stream.getvalue().startswith("slow rounds: 2 of 2, ")
    monkeypatch.delenv(VARIABLE)  # started by hand: it shows that itself
    list(steps([5, 6], "rounds"))
    assert capsys.readouterr().err.startswith("rounds: 1 of 2, ")


def test_who_started_the_ranks_shows_it(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(progress, "_AFTER", 0.0)
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    monkeypatch.delenv("RANK", raising=False)
    program = f'[ $RANK = 0 ] && echo "1 4 rounds" > "${VARIABLE}"; echo "rank $RANK"; sleep 0.6'
    with Loopback(2, 100.0, 1) as network:
        assert run_ranks(network, 1, ["sh", "-c", program], limit=30) == "rank 0\n"
    said = capsys.readouterr()
    assert "rounds: 1 of 4, " in said.err
    assert said.out == ""
