"""tools/clients.py: a client that cannot be installed is told of, and counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import clients


def test_what_cannot_be_installed_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests" / "none").mkdir(parents=True)
    (tmp_path / "tests" / "none" / "requirements.txt").write_text("no-such-package==1\n")
    monkeypatch.setattr(clients, "TESTS", tmp_path / "tests")
    monkeypatch.setattr(clients, "BUILD", tmp_path / "build")
    monkeypatch.setattr(sys, "argv", ["clients.py"])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("TORCH_SPEC", "no-such-package==1")
    assert clients.main() == 1
    said = capsys.readouterr().out
    assert "none: NOT RUN: pip: ERROR: No matching distribution found for no-such-package==1" in said
    assert "clients: 0 passed, 1 failed or not run" in said
    assert not (tmp_path / "build" / "none" / "requirements.done").exists()


def test_no_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "requirements.txt").write_text("")
    monkeypatch.setattr(clients, "TESTS", tmp_path)
    monkeypatch.setattr(clients, "BUILD", tmp_path)
    monkeypatch.setattr(clients, "NEEDS_GIB", 1 << 30)
    assert "GiB of disk are free" in clients.installed("none", "torch")


def test_a_client_for_a_newer_torch_counts_only_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "requirements.txt").write_text("")
    (tmp_path / "new" / "needs_torch.txt").write_text("2.15\n")
    monkeypatch.setattr(clients, "TESTS", tmp_path)
    for torch, why in (("torch==2.9.1", True), ("torch==2.15.0", False), ("torch==3.0.0+cpu", False)):
        assert ("needs torch 2.15" in clients.too_old("new", torch)) == why
    monkeypatch.setenv("TORCH_SPEC", "torch==2.13.0")
    for named, status in ((["--clients", "new"], 1), ([], 0)):
        monkeypatch.setattr(sys, "argv", ["clients.py", *named])
        assert clients.main() == status
        assert "new: NOT RUN: it needs torch 2.15 or newer, this is torch==2.13.0" in capsys.readouterr().out
