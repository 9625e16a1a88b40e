"""The comparison at import between the torch that is there and the one the extension was built for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import meshcast
import pytest
import torch
from meshcast._build_check import mismatch

PACKAGE = Path(meshcast.__file__).parent


@pytest.mark.parametrize(
    ("built", "found"),
    [
        ("2.13.0+cpu", "2.13.0+cpu"),
        ("2.13.0+cpu", "2.13.1"),
        ("2.13.0", "2.13.0+cu130"),
        ("2.13.0a0", "2.13.0"),
    ],
)
def test_one_minor_release_shares_one_binary(built: str, found: str) -> None:
    assert mismatch(built, found) is None


@pytest.mark.parametrize("found", ["2.12.0", "2.14.0+cpu", "3.13.0", "2.1.3"])
def test_another_minor_release_is_refused_in_one_sentence(found: str) -> None:
    sentence = mismatch("2.13.0+cpu", found)
    assert sentence is not None
    assert sentence.startswith(f"meshcast was built for torch 2.13.0+cpu, but torch {found} is installed: ")
    assert "\n" not in sentence


def import_copy(tmp_path: Path, build_info: str | None) -> str:
    """The last line on stderr of importing a copy of the package with another (or no) _build_info.py."""
    ignore = shutil.ignore_patterns("__pycache__", "_build_info.py")
    shutil.copytree(PACKAGE, tmp_path / "meshcast", ignore=ignore)
    if build_info is not None:
        (tmp_path / "meshcast" / "_build_info.py").write_text(build_info)
    done = subprocess.run(
        [sys.executable, "-c", "import meshcast"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def test_import_reports_another_torch(tmp_path: Path) -> None:
    line = import_copy(tmp_path, "torch_version = '2.9.1+cpu'\n")
    assert line.startswith(
        f"ImportError: meshcast was built for torch 2.9.1+cpu, but torch {torch.__version__} "
    )


def test_import_reports_a_missing_build(tmp_path: Path) -> None:
    assert import_copy(tmp_path, None).startswith(
        "ImportError: meshcast's extension module has not been built"
    )
