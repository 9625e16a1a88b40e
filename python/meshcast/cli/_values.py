"""Reads numbers from the command line; what is wrong is said with the option's name in front."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..base import checks
from ..errors import LayoutError, MeshcastError

__all__ = ["integer", "named", "times"]


@contextmanager
def named(option: str) -> Iterator[None]:
    """Puts the option's name in front of what is wrong with its value."""
    try:
        yield
    except OSError as error:
        raise LayoutError(f"{option}: {error.filename}: {error.strerror}") from None
    except MeshcastError as error:
        raise LayoutError(f"{option}: {error}") from None


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
