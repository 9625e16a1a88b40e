"""Reading JSON that nobody vouches for: every field is checked, unknown fields are refused, sizes are bounded
first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import LayoutError
from . import checks

MAX_BYTES = 1 << 30  # of a file; parsed JSON takes several times that


def read_json(source: str | Path, what: str) -> Any:
    """Parsed JSON of a path, or of text that starts with { ."""
    if isinstance(source, str) and source.lstrip().startswith("{"):
        text = source
        name = f"{what} text"
        size = len(text)
    elif isinstance(source, str | Path):
        path = Path(source)
        name = f"{what} file {path}"
        try:
            size = path.stat().st_size
            text = path.read_text(encoding="utf-8") if size <= MAX_BYTES else ""
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text or not a path"
            raise LayoutError(f"{what} file {checks.shown(str(path), 250)}: {reason}") from None
    else:
        raise LayoutError(f"{what} {checks.shown(source)}: expected a path or JSON text")
    if size > MAX_BYTES:
        raise LayoutError(f"{name}: {size} bytes; allowed are {MAX_BYTES}")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise LayoutError(f"{name} is not JSON: {reason}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


class Reader:
    """One JSON object; `where` is its path from the root, for messages."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise LayoutError(f"{where}: expected an object, found {checks.shown(value)}")
        self._fields = value
        self.where = where
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        """True if the field is there."""
        return name in self._fields

    def value(self, name: str) -> Any:
        """The field, whatever it is."""
        if name not in self._fields:
            raise LayoutError(f"{self.where}: field {name!r} is missing")
        self._used.add(name)
        return self._fields[name]

    def integer(self, name: str, low: int, high: int) -> int:
        """The field as an integer within [low, high]."""
        return checks.integer(f"{self.where}.{name}", self.value(name), low, high)

    def integers(self, name: str, low: int, high: int) -> list[int]:
        """The field as a list of integers within [low, high]."""
        return [
            checks.integer(f"{self.where}.{name}[{i}]", v, low, high) for i, v in enumerate(self.items(name))
        ]

    def items(self, name: str) -> list[Any]:
        """The field as a list."""
        value = self.value(name)
        if not isinstance(value, list):
            raise LayoutError(f"{self.where}.{name}: expected a list, found {checks.shown(value)}")
        return value

    def text(self, name: str) -> str:
        """The field as text."""
        value = self.value(name)
        if not isinstance(value, str):
            raise LayoutError(f"{self.where}.{name}: expected text, found {checks.shown(value)}")
        return value

    def child(self, name: str) -> Reader:
        """The field as an object."""
        return Reader(self.value(name), f"{self.where}.{name}")

    def children(self, name: str) -> list[Reader]:
        """The field as a list of objects."""
        return [Reader(value, f"{self.where}.{name}[{i}]") for i, value in enumerate(self.items(name))]

    def expect_format(self, name: str) -> None:
        """Checks the field "format", so that a file of another kind or version is named as such."""
        found = self.value("format")
        if found != name:
            raise LayoutError(f"{self.where}.format is {checks.shown(found)}; this version reads {name!r}")

    def finish(self) -> None:
        """Refuses fields that nobody read: most are typing errors."""
        unknown = [name for name in self._fields if name not in self._used]
        if unknown:
            raise LayoutError(
                f"{self.where}: unknown field {checks.shown(unknown[0])}; "
                f"allowed are {', '.join(sorted(self._used))}"
            )
