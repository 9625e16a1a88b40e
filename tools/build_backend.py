"""The build back end (PEP 517): that of setuptools, and a cmake where the machine has none.

torch is not among the requirements of a build: it must be the one that the user has. `build_tools` finds it
also from an environment that hides it. So metadata are read without torch, cmake and compiler.
"""

from __future__ import annotations

import shutil
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
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


def get_requires_for_build_wheel(settings: dict[str, Any] | None = None) -> list[str]:
    return _with_tools(build_meta.get_requires_for_build_wheel(settings))


def get_requires_for_build_editable(settings: dict[str, Any] | None = None) -> list[str]:
    return _with_tools(build_meta.get_requires_for_build_editable(settings))


def get_requires_for_build_sdist(settings: dict[str, Any] | None = None) -> list[str]:
    return build_meta.get_requires_for_build_sdist(settings)
