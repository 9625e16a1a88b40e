"""Compares the torch that is imported with the torch that the extension module was built for.

c10d's classes change their layout between minor releases of torch, so a module that was built for another one
crashes instead of failing: `meshcast/__init__.py` calls `check_torch` before it loads `_C`.
"""

from __future__ import annotations

import importlib

BUILD_COMMAND = "`pip install --no-build-isolation .` in meshcast's source folder"


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


def check_torch(found: str) -> None:
    """Raise ImportError when `_C` has not been built, or not for the torch that runs.

    Args:
        found: version of the torch that runs (`torch.__version__`).
    """
    try:
        info = importlib.import_module("meshcast._build_info")
    except ModuleNotFoundError:
        raise ImportError(
            f"meshcast's extension module has not been built: run {BUILD_COMMAND}, or `make build` to work "
            "on meshcast itself."
        ) from None
    sentence = mismatch(info.torch_version, found)
    if sentence is not None:
        raise ImportError(sentence)
