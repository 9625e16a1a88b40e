"""What a build needs and where it is; no build tool finds the torch that pip's build environment hides.

setup.py and the build back end ask here for torch, cmake and a compiler. `make` runs this file before it
downloads anything. What is missing ends the build with one sentence that says what to do.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

OLDEST_TORCH = "2.11"
OLDEST_PYTHON = (3, 10)


def stop(sentence: str) -> NoReturn:
    """End the build; a traceback would bury the reason."""
    sys.exit(f"meshcast: {sentence}")


def torch_site() -> Path | None:
    """The folder that holds the torch of the interpreter that asked for the build, without importing it.

    pip, `build` and others run a build in an environment of its own, which hides what is installed beside the
    interpreter that the user called. Its files are there all the same.
    """
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parents[1]
    for folder in _site_folders():
        if (folder / "torch" / "version.py").exists():
            return folder
    return None


def _site_folders() -> Iterator[Path]:
    yield from (Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    # A build environment of `python -m build` or uv is a virtual environment of its own.
    library = Path("lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if prefix := os.environ.get(variable):
            yield Path(prefix) / library
    if caller := _calling_python():
        yield caller.parent.parent / library
    yield from (Path(folder) for folder in site.getsitepackages())
    yield Path(site.getusersitepackages())


def _calling_python() -> Path | None:
    """The program that started this process, as it was called: its path names a virtual environment."""
    process = Path("/proc") / str(os.getppid())
    try:
        name = (process / "cmdline").read_bytes().partition(b"\0")[0].decode()
        return (process / "cwd").readlink() / name if "/" in name else None
    except OSError:
        return None


def torch_version() -> str | None:
    """Of the torch at `torch_site()`, without importing it (that takes seconds)."""
    folder = torch_site()
    if folder is None:
        return None
    match = re.search(
        r"^__version__ = '([^']+)'", (folder / "torch" / "version.py").read_text(), re.MULTILINE
    )
    return match[1] if match else None


def require_python(headers: Path) -> None:
    """headers: where they are, or should be."""
    if sys.version_info < OLDEST_PYTHON:
        stop(
            f"{sys.executable} is Python {sys.version.split()[0]}, which is too old: build with Python "
            f"{'.'.join(map(str, OLDEST_PYTHON))} or newer."
        )
    if not (headers / "Python.h").exists():
        stop(
            f"Python.h is not in {headers}: install the development headers of Python "
            f"{sysconfig.get_python_version()} (on Debian: apt-get install python3-dev)."
        )


def require_torch() -> Path:
    """Its folder of packages."""
    folder = torch_site()
    if folder is None:
        stop(
            f"torch is not installed for {sys.executable}, and the extension must be built against the torch "
            "that it will run with: install torch first, then meshcast."
        )
    version = torch_version() or "0"
    if [int(part) for part in re.findall(r"\d+", version)[:2]] < [
        int(part) for part in OLDEST_TORCH.split(".")
    ]:
        stop(
            f"torch {version} at {folder / 'torch'} is too old: install torch {OLDEST_TORCH} or newer, then "
            "meshcast."
        )
    return folder


def require_tools() -> str:
    """The path of cmake, once it is sure that a compiler is there too."""
    cmake = shutil.which("cmake")
    if cmake is None:
        stop("cmake is not on PATH: install cmake 3.22 or newer (`pip install cmake`, or a system package).")
    # CMake looks for these names itself; its own complaint is a page long.
    asked = os.environ.get("CXX")
    names = [shlex.split(asked)[0]] if asked else ["c++", "g++", "clang++"]
    if not any(shutil.which(name) for name in names):
        stop(
            f"no C++ compiler found (looked for {', '.join(names)} on PATH): install GCC 11 or newer or "
            "Clang 14 or newer, or set CXX to a compiler."
        )
    return cmake


def require_writable(folder: Path) -> None:
    """Before the build, not after it."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(there, os.W_OK):
        stop(f"{there} cannot be written by this user: build in a copy of the sources, or as another user.")


def main() -> None:
    """Check for `make` what the interpreter that makes its environment, and the machine, have to have."""
    require_python(Path(sysconfig.get_path("include")))
    if any(importlib.util.find_spec(name) is None for name in ("ensurepip", "venv")):
        stop(
            f"{sys.executable} cannot make virtual environments: install its venv module (on Debian: apt-get "
            "install python3-venv)."
        )
    require_tools()


if __name__ == "__main__":
    main()
