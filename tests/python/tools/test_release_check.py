"""tools/release_check.py: a release in which all agrees passes, and each thing that does not is named."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "release_check.py"


def git(tree: Path, *command: str) -> None:
    subprocess.run(["git", "-C", tree, *command], check=True, capture_output=True)


def wheel(tree: Path, named: str, inside: str) -> None:
    folder = tree / "dist" / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"meshcast-{named}-cp311-cp311-manylinux_2_28_x86_64.whl", "w") as archive:
        archive.writestr(f"meshcast-{named}.dist-info/METADATA", f"Name: meshcast\nVersion: {inside}\n")


def commit(tree: Path, tag: str | None = None) -> None:
    git(tree, "add", "-A")
    git(tree, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "-m", "all", "--allow-empty")
    if tag:
        git(tree, "tag", "-f", tag)


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A tree in which all agrees."""
    (tmp_path / "python" / "meshcast").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "python" / "meshcast" / "_version.py").write_text('__version__ = "0.3.0"\n')
    (tmp_path / "docs" / "limitations.md").write_text("What it does not do. Version 0.3.0.\n")
    (tmp_path / "README.md").write_text("Status: 0.3, the interfaces may change.\n")
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\n## 0.3.0 - 2026-01-02\n\n- One thing.\n\n"
        "## 0.2.0 - 2025-01-02\n\n- Another.\n"
    )
    (tmp_path / ".gitignore").write_text("dist/\n")
    git(tmp_path, "init", "-q")
    wheel(tmp_path, "0.3.0+torch2.13.cpu", "0.3.0+torch2.13.cpu")
    commit(tmp_path, "v0.3.0")
    return tmp_path


def check(tree: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, TOOL, "--tree", tree], check=False, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def test_a_release_that_agrees(release: Path) -> None:
    status, said = check(release)
    assert (status, said.count("WRONG")) == (0, 0), said


def rewrite(name: str, old: str, new: str) -> Callable[[Path], None]:
    """A change of a file, committed and tagged anew, so that nothing else is wrong."""

    def change(tree: Path) -> None:
        text = (tree / name).read_text()
        assert old in text
        (tree / name).write_text(text.replace(old, new))
        commit(tree, "v0.3.0")

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (rewrite("CHANGELOG.md", "## Unreleased\n", "## Unreleased\n\n- More.\n"), "under Unreleased"),
        (rewrite("CHANGELOG.md", "## 0.3.0 - 2026-01-02\n\n- One thing.\n", ""), "begins with '0.2.0'"),
        (rewrite("CHANGELOG.md", "0.3.0 - 2026-01-02", "0.3.0"), "has no date"),
        (rewrite("CHANGELOG.md", "0.3.0 - 2026-01-02", "0.3.0 - 9026-01-02"), "is to come"),
        (rewrite("CHANGELOG.md", "- One thing.\n", ""), "says nothing"),
        (rewrite("docs/limitations.md", "0.3.0", "0.2.0"), "docs/limitations.md names 0.2.0"),
        (rewrite("README.md", "0.3", "0.2"), "README.md has status 0.2, expected 0.3"),
        (lambda tree: git(tree, "tag", "-d", "v0.3.0"), "no tag v0.3.0"),
        (commit, "tag v0.3.0 is at"),
        (lambda tree: (tree / ".gitignore").write_text("dist/\nbuild/\n"), "1 files differ"),
        (lambda tree: wheel(tree, "0.2.0+torch2.13.cpu", "0.2.0+torch2.13.cpu"), "is of 0.2.0+torch2.13.cpu"),
        (lambda tree: wheel(tree, "0.3.0+torch2.14.cpu", "0.2.0"), "is of 0.2.0 and 0.3.0"),
        (lambda tree: [each.unlink() for each in (tree / "dist" / "wheels").iterdir()], "no wheels"),
    ],
)  # fmt: skip
def test_what_does_not_agree_is_named(release: Path, change: Callable[[Path], object], named: str) -> None:
    change(release)
    status, said = check(release)
    assert status == 1, said
    assert named in said, said
    assert said.count("WRONG") == 1, said


def test_a_version_that_is_none(release: Path) -> None:
    (release / "python" / "meshcast" / "_version.py").write_text('__version__ = "0.3"\n')
    status, said = check(release)
    assert status == 1
    assert "'0.3'" in said
