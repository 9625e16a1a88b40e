"""Compares the torch and the Python that run with those that the extension module was built for.

c10d's classes change their layout between minor releases of torch, so a module that was built for another one
crashes instead of failing: `meshcast/__init__.py` calls `check_torch` before it loads `_C`.
"""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Collection
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

BUILD_COMMAND = "`pip install .` in meshcast's source folder"


def mismatch(built: str, found: str) -> str | None:
    """One sentence where a module built for torch `built` must not run under torch `found`, else None.

    Patch releases and the local suffix (+cpu, +cu130) share one binary interface; major and minor must agree.
    """
    if built.split(".")[:2] == found.split(".")[:2]:
        return None
    return (
        f"meshcast was built for torch {built}, but torch {found} is installed: build meshcast again with "
        f"{BUILD_COMMAND}, or install torch {built}."
    )


def flavour_mismatch(built: str, built_cuda: str, found: str, found_cuda: str | None) -> str | None:
    """One sentence where a module with CUDA code cannot load with this torch, else None.

    Args:
        built: version of the torch that it was built for.
        built_cuda: CUDA of that torch ("13.0"); empty for a module without CUDA code, which fits any flavour.
        found: version of the torch that runs.
        found_cuda: CUDA of that torch, None for a CPU build. The major release must agree.
    """
    if not built_cuda or (found_cuda or "").split(".")[0] == built_cuda.split(".")[0]:
        return None
    has = f"is built with CUDA {found_cuda}" if found_cuda else "is a CPU build"
    return (
        f"meshcast was built with CUDA code for torch {built} (CUDA {built_cuda}), but the torch that is "
        f"installed, {found}, {has}: install a torch with CUDA {built_cuda.split('.')[0]}, or build meshcast "
        f"again with {BUILD_COMMAND}."
    )


def python_mismatch(modules: Collection[str], suffixes: Collection[str]) -> str | None:
    """One sentence where none of the files of `_C` that are there can be loaded by this Python, else None.

    Args:
        modules: their names, such as "_C.cpython-311-x86_64-linux-gnu.so".
        suffixes: those that this Python loads (`importlib.machinery.EXTENSION_SUFFIXES`).
    """
    if not modules or any(f"_C{suffix}" in modules for suffix in suffixes):
        return None
    return (
        f"meshcast was built for another Python ({', '.join(sorted(modules))}), but this is "
        f"{platform.python_implementation()} {platform.python_version()} ({sys.executable}): build meshcast "
        f"again with {BUILD_COMMAND}, or run the Python that it was built for."
    )


def check_torch(found: str, found_cuda: str | None) -> None:
    """Raise ImportError when `_C` has not been built, or not for the torch and the Python that run.

    Args:
        found: version of the torch that runs (`torch.__version__`).
        found_cuda: its CUDA (`torch.version.cuda`), None for a CPU build.
    """
    modules = [path.name for path in Path(__file__).parent.glob("_C.*so")]
    try:
        info = importlib.import_module("meshcast._build_info")
        if not modules:
            raise ModuleNotFoundError("_C")
    except ModuleNotFoundError:
        raise ImportError(
            f"meshcast's extension module has not been built: run {BUILD_COMMAND}, or `make build` to work "
            "on meshcast itself."
        ) from None
    sentence = mismatch(info.torch_version, found)
    if sentence is None:
        sentence = python_mismatch(modules, EXTENSION_SUFFIXES)
    if sentence is None and getattr(info, "with_cuda", False):
        sentence = flavour_mismatch(info.torch_version, info.torch_cuda, found, found_cuda)
    if sentence is not None:
        raise ImportError(sentence)
