"""The comparison at import between the torch that is there and the one the extension was built for."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import meshcast
import pytest
import torch
from meshcast import _C
from meshcast._build_check import flavour_mismatch, mismatch, python_mismatch

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


MODULE = Path(_C.__file__).name
THIS_PYTHON = f"but this is CPython {platform.python_version()} ("


def test_a_module_of_this_python_is_enough() -> None:
    assert python_mismatch([MODULE, "_C.cpython-39-x86_64-linux-gnu.so"], EXTENSION_SUFFIXES) is None


@pytest.mark.parametrize("suffix", [".cpython-314-x86_64-linux-gnu.so", ".cpython-313t-x86_64-linux-gnu.so"])
def test_another_python_is_refused_in_one_sentence(suffix: str) -> None:
    sentence = python_mismatch([f"_C{suffix}"], EXTENSION_SUFFIXES)
    assert sentence is not None
    assert sentence.startswith(f"meshcast was built for another Python (_C{suffix}), {THIS_PYTHON}")
    assert "\n" not in sentence


def import_copy(tmp_path: Path, build_info: str | None, module: str = MODULE) -> str:
    """The last line on stderr of importing a copy of the package with another (or no) _build_info.py, and the
    extension module under this name, or none."""
    ignore = shutil.ignore_patterns("__pycache__", "_build_info.py", "_C.*so")
    shutil.copytree(PACKAGE, tmp_path / "meshcast", ignore=ignore)
    if module:
        (tmp_path / "meshcast" / module).symlink_to(_C.__file__)
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


def test_import_reports_another_python(tmp_path: Path) -> None:
    info = f"torch_version = {torch.__version__!r}\n"
    line = import_copy(tmp_path, info, "_C.cpython-39-x86_64-linux-gnu.so")
    assert line.startswith("ImportError: meshcast was built for another Python (_C.cpython-39-")
    assert THIS_PYTHON in line


def test_import_reports_a_module_that_is_missing(tmp_path: Path) -> None:
    line = import_copy(tmp_path, f"torch_version = {torch.__version__!r}\n", "")
    assert line.startswith("ImportError: meshcast's extension module has not been built")


def test_import_reports_a_missing_build(tmp_path: Path) -> None:
    assert import_copy(tmp_path, None).startswith(
        "ImportError: meshcast's extension module has not been built"
    )
