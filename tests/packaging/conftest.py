"""A copy of the source tree per session, so that no test builds in the tree it is run from."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import setuptools
import torch

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = (".ci", "cmake", "csrc", "python", "tests", "examples", "benchmarks", "docs", "tools")


@pytest.fixture(scope="session")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources as a checkout has them: no build folder and nothing that a build writes."""
    tree = tmp_path_factory.mktemp("checkout") / "meshcast"
    tree.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "_build_info.py", "out")
    for path in ROOT.iterdir():
        if path.name in TOP_LEVEL:
            shutil.copytree(path, tree / path.name, ignore=ignore)
        elif path.is_file() and not path.name.startswith(".git"):
            shutil.copy2(path, tree / path.name)
    return tree


@dataclass
class Interpreter:
    """A virtual environment that sees chosen packages of the running one and nothing else of it."""

    python: Path
    site: Path

    def run(
        self, *args: str, cwd: Path, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        # pip needs names of hosts, for which tests/conftest.py lets nobody wait.
        left = ("PYTHONPATH", "PYTHONHOME", "RES_OPTIONS")
        clean = {key: value for key, value in os.environ.items() if key not in left}
        return subprocess.run(
            [str(self.python), *args],
            cwd=cwd,
            env={**clean, **(env or {})},
            check=False,
            capture_output=True,
            text=True,
            timeout=1500,
        )


@pytest.fixture
def interpreter(tmp_path: Path) -> Callable[..., Interpreter]:
    """interpreter(with_torch=...): setuptools is always there, pip and torch only with torch. Each
    call makes an environment of its own."""
    number = itertools.count()

    def make(*, with_torch: bool) -> Interpreter:
        home = tmp_path / f"venv-{next(number)}"
        venv.create(home, with_pip=False, symlinks=True)
        site = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        if with_torch:
            (site / "torch_site.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
        else:
            origin = Path(setuptools.__file__).parents[1]
            version = f"setuptools-{setuptools.__version__}.dist-info"
            for name in ("setuptools", "_distutils_hack", version):
                (site / name).symlink_to(origin / name)
        return Interpreter(home / "bin" / "python", site)

    return make
