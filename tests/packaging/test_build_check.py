"""The comparison at import between the torch that is there and the one the extension was built for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import meshcast
import pytest
import torch
from meshcast._build_check import flavour_mismatch, mismatch

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


@pytest.mark.parametrize(("built", "found"), [("", None), ("", "13.0"), ("13.0", "13.0"), ("13.0", "13.2")])
def test_flavours_that_fit(built: str, found: str | None) -> None:
    assert flavour_mismatch("2.11.0", built, "2.11.0", found) is None


@pytest.mark.parametrize(("found", "has"), [(None, "is a CPU build"), ("12.8", "is built with CUDA 12.8")])
def test_cuda_code_is_refused_under_another_flavour(found: str | None, has: str) -> None:
    sentence = flavour_mismatch("2.11.0+cu130", "13.0", "2.11.0", found)
    assert sentence is not None
    assert (
        f"(CUDA 13.0), but the torch that is installed, 2.11.0, {has}: install a torch with CUDA 13"
        in sentence
    )


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


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_import_reports_a_cpu_torch_under_cuda_code(tmp_path: Path) -> None:
    info = f"torch_version = {torch.__version__!r}\nwith_cuda = True\ntorch_cuda = '13.0'\n"
    line = import_copy(tmp_path, info)
    assert line.startswith("ImportError: meshcast was built with CUDA code for torch ")
    assert "is a CPU build" in line


def test_import_reports_a_missing_build(tmp_path: Path) -> None:
    assert import_copy(tmp_path, None).startswith(
        "ImportError: meshcast's extension module has not been built"
    )
