"""Reads values of the command line; what is wrong is said with the option's name in front."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..base import checks
from ..errors import LayoutError, MeshcastError

__all__ = ["PICTURES", "integer", "named", "output_file", "times"]

PICTURES, _PAGES = (".png", ".svg", ".pdf"), (".html", ".htm")


@contextmanager
def named(option: str) -> Iterator[None]:
    """Puts the option's name in front of what is wrong with its value."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise LayoutError(f"{option}: {where}{error.strerror}") from None
    except MeshcastError as error:
        raise LayoutError(f"{option}: {error}") from None


def output_file(option: str, path: Path | None, suffixes: tuple[str, ...] = _PAGES) -> None:
    """Raises LayoutError where the file cannot be written, so that no work is done for it. None: no file."""
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        raise LayoutError(f"{option}: {checks.shown(str(path))}: allowed suffixes are {', '.join(suffixes)}")
    if path.is_dir():
        raise LayoutError(f"{option}: {path} is a folder")
    there = path if path.exists() else path.parent
    if not there.exists():
        raise LayoutError(f"{option}: cannot write {path}: there is no folder {path.parent}")
    if not os.access(there, os.W_OK):
        raise LayoutError(f"{option}: cannot write {path}: permission denied")


def integer(option: str, text: str, least: int, most: int) -> int:
    """A whole number in least..most."""
    digits = text.strip().removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20 and least <= int(text) <= most):
        raise LayoutError(f"{option}: {checks.shown(text)}: expected an integer in {least}..{most}")
    return int(text)


def times(option: str, text: str) -> float | list[float]:
    """One time, or several with commas between them."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value < 1e12 for value in values):
        raise LayoutError(
            f"{option}: {checks.shown(text)}: expected a time >= 0, or one for each stage with commas "
            "between them"
        )
    return values[0] if len(values) == 1 else values
