"""The PEP 517 back end over setuptools, which torch brings; scikit-build-core was tried and saves no code.

It has to be installed for `--no-build-isolation`. The code that finds the torch which pip's build environment
hides, takes links out of the README, shares a build folder and its lock with make and uses ccache would stay.

torch is not among the requirements of a build: it must be the one that the user has. `build_tools` finds it
also from an environment that hides it. So metadata are read without torch, cmake and compiler.
"""

from __future__ import annotations

import shutil
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def _with_tools(required: list[str]) -> list[str]:
    return required + ([] if shutil.which("cmake") else ["cmake>=3.22"])


def _quiet(settings: dict[str, Any] | None) -> dict[str, Any]:
    """setuptools prints each file that it copies, twice: `pip install -v` shows what cmake prints instead."""
    return {"--global-option": ["--quiet"], **(settings or {})}


def build_wheel(directory: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    return build_meta.build_wheel(directory, _quiet(settings), metadata)


def build_editable(
    directory: str, settings: dict[str, Any] | None = None, metadata: str | None = None
) -> str:
    return build_meta.build_editable(directory, _quiet(settings), metadata)


def get_requires_for_build_wheel(settings: dict[str, Any] | None = None) -> list[str]:
    return _with_tools(build_meta.get_requires_for_build_wheel(settings))


def get_requires_for_build_editable(settings: dict[str, Any] | None = None) -> list[str]:
    return _with_tools(build_meta.get_requires_for_build_editable(settings))


def get_requires_for_build_sdist(settings: dict[str, Any] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_sdist(settings)
