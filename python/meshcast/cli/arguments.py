"""Types of arguments: each reads the text of an option, or raises what is wrong with it."""

from __future__ import annotations

import functools
import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ..base import checks
from ..errors import LayoutError, MeshcastError

__all__ = ["PICTURES", "choice", "integer", "named", "number", "output", "reads", "times", "writes"]

PICTURES, _PAGES = (".png", ".svg", ".pdf"), (".html", ".htm")

T = TypeVar("T")


def reads(read: Callable[[str], T]) -> Callable[[str], T]:
    """Makes a type for argparse, which puts the option's name in front of the error."""

    @functools.wraps(read)
    def kind(text: str) -> T:
        try:
            return read(text)
        except (MeshcastError, OSError) as error:
            raise ArgumentTypeError(_text(error)) from None

    return kind


@contextmanager
def named(option: str) -> Iterator[None]:
    """Puts the option's name in front of what is wrong with its value, where that shows later."""
    try:
        yield
    except (MeshcastError, OSError) as error:
        text = _text(error)  # of a file, which may be the value itself
        raise LayoutError(text if text.startswith(f"{option}: ") else f"{option}: {text}") from None


@contextmanager
def writes(option: str, path: Path) -> Iterator[None]:
    """Around the writing of an option's file, which fails where the disk is full, for one. Raises what is
    wrong with the content as LayoutError, and what is wrong with the file as MeshcastError."""
    try:
        yield
    except LayoutError as error:
        raise LayoutError(f"{option}: {error}") from None
    except MeshcastError as error:
        raise MeshcastError(f"{option}: {error}") from None
    except OSError as error:
        raise MeshcastError(f"{option}: cannot write {path}: {error.strerror or error}") from None


def _text(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror}"


def output(suffixes: Sequence[str] = _PAGES) -> Callable[[str], Path]:
    """Returns the type of a file that can be written, so that no work is done for one that cannot."""

    def read(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() not in suffixes:
            raise LayoutError(f"{checks.shown(text)}: allowed suffixes are {', '.join(suffixes)}")
        if path.is_dir():
            raise LayoutError(f"{path} is a folder")
        there = path if path.parent.is_dir() and path.exists() else path.parent
        if there is not path and not there.is_dir():
            raise LayoutError(f"cannot write {path}: there is no folder {path.parent}")
        if not os.access(there, os.W_OK):
            raise LayoutError(f"cannot write {path}: permission denied")
        return path

    return reads(read)


def choice(allowed: Sequence[str]) -> Callable[[str], str]:
    return reads(lambda text: checks.choice("value", text, allowed))


def number(text: str, kind: Callable[[str], T]) -> T:
    """Returns the text as a number. kind: int or float."""
    try:
        if len(text) > 30:
            raise ValueError
        return kind(text)
    except ValueError:
        what = "an integer" if kind is int else "a number"
        raise LayoutError(f"{checks.shown(text)}: expected {what}") from None


def integer(least: int, most: int) -> Callable[[str], int]:
    """Returns the type of a whole number in least..most."""

    def read(text: str) -> int:
        digits = text.strip().removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 25 and least <= int(text) <= most):
            raise LayoutError(f"{checks.shown(text)}: expected an integer in {least}..{most}")
        return int(text)

    return reads(read)


@reads
def times(text: str) -> float | list[float]:
    """Reads one time, or several with commas between them."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value < 1e12 for value in values):
        raise LayoutError(
            f"{checks.shown(text)}: expected a time >= 0, or one for each stage with commas between them"
        )
    return values[0] if len(values) == 1 else values
