"""noxfile.py: a package that cannot be installed counts and is named; a row of the matrix is published."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytest.importorskip("nox", reason="needs requirements-dev.txt")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def noxfile() -> ModuleType:
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def session(tree: Path, *words: str, **env: str) -> tuple[int, str]:
    """The exit status and the output of a session of a tree with this noxfile.py."""
    shutil.copy2(ROOT / "noxfile.py", tree)
    (tree / "requirements-build.txt").touch()
    (tree / "docs").mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "nox", "-s", *words],
        cwd=tree,
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", **env},
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    return done.returncode, done.stdout + done.stderr


def client(tree: Path, name: str, needs_torch: str = "") -> None:
    folder = tree / "tests" / "clients" / name
    folder.mkdir(parents=True)
    (folder / "requirements.txt").write_text("no-such-package==1\n")
    if needs_torch:
        (folder / "needs_torch.txt").write_text(f"{needs_torch}\n")


def test_a_client_that_cannot_be_installed_counts(tmp_path: Path) -> None:
    client(tmp_path, "none")
    status, said = session(tmp_path, "clients", TORCH_SPEC="no-such-package==1")
    assert status == 1
    assert "NOT RUN: pip: ERROR: No matching distribution found for no-such-package==1" in said


def test_a_client_for_a_newer_torch_counts_only_where_it_is_named(tmp_path: Path) -> None:
    client(tmp_path, "new", "2.15")
    words = ("clients", "--force-venv-backend", "none")  # refused before anything is installed
    for named, expected in (("", 0), ("new", 1)):
        status, said = session(tmp_path, *words, TORCH_SPEC="torch==2.13.0", CLIENTS=named)
        assert status == expected, said
        assert "NOT RUN: it needs torch 2.15 or newer, this is torch==2.13.0" in said
    status, said = session(tmp_path, *words, CLIENTS="old")
    assert status == 1
    assert "no client old: there are new" in said


def test_releases_of_torch_are_compared(
    noxfile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client(tmp_path, "new", "2.15")
    monkeypatch.setattr(noxfile, "FOLDER", tmp_path / "tests" / "clients")
    for torch, why in (("torch==2.9.1", True), ("torch==2.15.0", False), ("torch==3.0.0+cpu", False)):
        assert ("needs torch 2.15" in noxfile.too_old("new", torch)) == why


def test_no_room_is_reported_before_an_environment_has_torch(noxfile: ModuleType, tmp_path: Path) -> None:
    session = SimpleNamespace(virtualenv=SimpleNamespace(location=str(tmp_path)))
    assert "GiB of disk are free, it needs" in noxfile.no_room(session, 1 << 30, "it")
    assert noxfile.no_room(session, 0, "it") == ""
    (tmp_path / "lib" / "python3.11" / "site-packages" / "torch").mkdir(parents=True)
    assert noxfile.no_room(session, 1 << 30, "it") == ""


@pytest.mark.parametrize(
    ("log", "status", "expected"),
    [
        ("C++ tests: All tests passed (9 assertions in 2 test cases)\n== 3 passed, 1 skipped in 4s ==\n", 0,
         ("5", "0")),
        ("C++ tests: test cases: 4 | 3 passed | 1 failed\n== 3 passed in 4s ==\n", 1, ("6", "C++ tests")),
        ("C++ tests: FAILED\n== 1 failed, 3 passed, 1 error in 4s ==\n", 1, ("3", "2")),
        ("make: *** [Makefile:1: build] Error 1\n", 1, ("0", "did not come to its tests")),
    ],
)  # fmt: skip
def test_counts_of_a_log(noxfile: ModuleType, log: str, status: int, expected: tuple[str, str]) -> None:
    assert noxfile.counts(log, status) == expected


def test_a_row_replaces_that_of_its_pair(noxfile: ModuleType) -> None:
    page = noxfile.PAGE.read_text()
    new = ["2.13.0", "3.11.99", "2030-01-01", "abc", "7", "0"]
    text = noxfile.published(page, new)
    assert "| 2.13.0 | 3.11.99 | 2030-01-01 | abc | 7 | 0 |" in text
    assert text.count("| 2.13.0 | 3.11.") == 1
    assert len(text.splitlines()) == len(page.splitlines())
    more = noxfile.published(page, ["2.16.0", "3.14.0", "2030-01-01", "abc", "7", "0"])
    assert len(more.splitlines()) == len(page.splitlines()) + 1
    assert more.index("| 2.15.0 |") < more.index("| 2.16.0 |")


def test_a_version_is_looked_for_in_pyenv(
    noxfile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    python = tmp_path / ".pyenv" / "versions" / "3.13.0" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert noxfile.interpreter("3.13") == str(python)
    assert noxfile.interpreter("3.12") == "3.12"
    assert noxfile.interpreter("/usr/bin/python3") == "/usr/bin/python3"
