"""Whatever the build lacks, it stops with one sentence that says what to do, and never with a traceback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

DIST_INFO = ("setup.py", "dist_info")  # the first step of every pip install


def last_line(text: str) -> str:
    assert "Traceback" not in text
    return text.strip().splitlines()[-1]


def test_missing_torch_is_named_before_anything_is_fetched(interpreter: Callable, source_tree: Path) -> None:
    done = interpreter(with_torch=False).run(*DIST_INFO, cwd=source_tree)
    assert done.returncode == 1
    assert "torch is not installed" in last_line(done.stderr)
    assert "pip install --no-build-isolation ." in last_line(done.stderr)


def test_missing_cmake(interpreter: Callable, source_tree: Path, tmp_path: Path) -> None:
    done = interpreter(with_torch=True).run(*DIST_INFO, cwd=source_tree, env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert last_line(done.stderr).startswith("meshcast: cmake is not on PATH: install cmake")


def test_missing_compiler(interpreter: Callable, source_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "cmake").symlink_to(str(shutil.which("cmake")))
    done = interpreter(with_torch=True).run(*DIST_INFO, cwd=source_tree, env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert last_line(done.stderr).startswith("meshcast: no C++ compiler found")


def test_a_named_compiler_that_is_absent(interpreter: Callable, source_tree: Path) -> None:
    done = interpreter(with_torch=True).run(*DIST_INFO, cwd=source_tree, env={"CXX": "no-such-compiler -O2"})
    assert done.returncode == 1
    assert "looked for no-such-compiler on PATH" in last_line(done.stderr)


def configure(source_tree: Path, build: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            "cmake",
            "-S",
            str(source_tree),
            "-B",
            str(build),
            f"-DPython_EXECUTABLE={sys.executable}",
            *options,
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **env},
    )


def one_line(text: str) -> str:
    """CMake wraps its messages."""
    return " ".join(text.split())


@pytest.fixture
def other_torch(tmp_path: Path) -> Callable[..., str]:
    """other_torch(version, pybind11=...): a PYTHONPATH whose first package looks like that torch."""

    def make(version: str, *, pybind11: bool = True) -> str:
        package = tmp_path / "other" / "torch"
        (package / "include" / "pybind11").mkdir(parents=True)
        if pybind11:
            (package / "include" / "pybind11" / "pybind11.h").touch()
        (package / "version.py").write_text(f"__version__ = '{version}'\ncuda = None\n")
        (package / "distributed.py").write_text("def is_available(): return True\n")
        (package / "_C.py").write_text("_GLIBCXX_USE_CXX11_ABI = True\n")
        (package / "__init__.py").write_text(
            "from . import _C, distributed, version\nfrom .version import __version__\n"
        )
        return str(package.parent)

    return make


def test_too_old_torch(other_torch: Callable, source_tree: Path, tmp_path: Path) -> None:
    done = configure(source_tree, tmp_path / "build", PYTHONPATH=other_torch("2.3.1"))
    assert done.returncode != 0
    assert "torch 2.3.1" in one_line(done.stderr)
    assert "is too old: install torch 2.11 or newer" in one_line(done.stderr)


def test_torch_without_pybind11_headers(other_torch: Callable, source_tree: Path, tmp_path: Path) -> None:
    done = configure(source_tree, tmp_path / "build", PYTHONPATH=other_torch("2.13.0", pybind11=False))
    assert done.returncode != 0
    assert "has no pybind11 headers" in one_line(done.stderr)


def test_torch_that_cannot_be_imported(source_tree: Path, tmp_path: Path) -> None:
    broken = tmp_path / "other" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: cannot open')\n")
    done = configure(source_tree, tmp_path / "build", PYTHONPATH=str(broken.parent))
    assert done.returncode != 0
    assert "torch cannot be imported" in one_line(done.stderr)
    assert "libtorch_cpu.so: cannot open" in one_line(done.stderr)


def test_cuda_option_is_checked_against_torch(source_tree: Path, tmp_path: Path) -> None:
    done = configure(source_tree, tmp_path / "build", "-DMESHCAST_CUDA=ON")
    if torch.version.cuda is None:
        assert done.returncode != 0
        assert "MESHCAST_CUDA=ON, but torch" in one_line(done.stderr)
        assert "has no CUDA: install a CUDA build of torch" in one_line(done.stderr)
    else:
        assert done.returncode == 0, done.stderr
        assert f"CUDA of torch: {torch.version.cuda}" in done.stdout


def test_unknown_cuda_option(source_tree: Path, tmp_path: Path) -> None:
    done = configure(source_tree, tmp_path / "build", "-DMESHCAST_CUDA=maybe")
    assert done.returncode != 0
    assert 'MESHCAST_CUDA is "maybe": set it to AUTO, ON or OFF.' in one_line(done.stderr)


def test_configure_says_what_it_found_and_builds(source_tree: Path, tmp_path: Path) -> None:
    done = configure(source_tree, tmp_path / "build")
    assert done.returncode == 0, done.stderr
    assert f"for torch {torch.__version__}" in done.stdout
    assert "CUDA: MESHCAST_CUDA=AUTO" in done.stdout
    assert "CUDA: built is CPU only" in done.stdout
