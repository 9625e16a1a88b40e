"""Checks of what users and files hand in. Each names the offending item and what is allowed. In JSON every
field is checked, unknown ones are refused, and sizes are bounded first."""

from __future__ import annotations

import functools
import inspect
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from ..errors import LayoutError, MeshcastError

MAX_DIMS = 8  # tensor dimensions that the C++ boxes hold
MAX_INT64 = (1 << 63) - 1


_VALUES = re.compile(r"\b(tensor|array)\(.*")  # of tensors and arrays, as they begin in a repr


def shown(item: Any, limit: int = 60) -> str:
    """`repr` short enough for a one-line message, whatever was handed in. Values of tensors are left out:
    messages go to logs."""
    try:
        if isinstance(item, torch.Tensor):
            text = f"a {type(item).__name__} of {item.dtype} and shape {tuple(item.shape)}"
        else:
            text = _VALUES.sub(r"\1(...)", repr(item).replace("\n", " "))
    except Exception:  # a repr that raises, as of a tensor that cannot be read
        text = f"a {type(item).__name__}"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


_SHOWN = 8  # runs of ranks before a text is cut short


def runs_text(ranks: Sequence[int]) -> str:
    """Returns ascending ranks as text with runs joined: 0-3,8."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:_SHOWN])
    return text if len(runs) <= _SHOWN else f"{text},... ({len(ranks)} ranks)"


def table(rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> str:
    """Returns rows as text in columns, two spaces apart. right: those that are aligned at their right."""
    listed = list(rows)
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    ends = set(right)

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(text.rjust(n) if at in ends else text.ljust(n) for at, (text, n) in cells).rstrip()

    return "\n".join(map(line, listed))


def integer(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int within [low, high]; floats, bools and text are not integers here."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise LayoutError(f"{name} {shown(value)}: expected an integer from {low} to {high}") from None
    if not low <= number <= high:
        raise LayoutError(f"{name} {number}: allowed are {low} to {high}")
    return number


def positive(name: str, value: Any, high: float = 1e9) -> float:
    """`value` as a finite float within (0, high]."""
    return _number(name, value, value_ok=lambda x: 0 < x <= high, allowed=f"above 0, at most {high:g}")


def not_negative(name: str, value: Any, high: float = 1e9) -> float:
    """`value` as a finite float within [0, high]."""
    return _number(name, value, value_ok=lambda x: 0 <= x <= high, allowed=f"0 to {high:g}")


def _number(name: str, value: Any, value_ok: Any, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LayoutError(f"{name} {shown(value)}: expected a number, {allowed}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not value_ok(number):
        raise LayoutError(f"{name} {shown(value)}: allowed is {allowed}")
    return number


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """`value` if it is one of `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise LayoutError(f"{name} {shown(value)}: allowed are {', '.join(allowed)}")
    return value


def listed(name: str, value: Any) -> tuple[Any, ...]:
    """`value` as a tuple; text is no sequence here."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise LayoutError(f"{name} {shown(value)}: expected a sequence")
    return tuple(value)


def shape(value: Any) -> tuple[int, ...]:
    """A tensor shape: up to 8 sizes from 0 to 2^63 - 1. Their product is checked against the bytes of the
    tensor in C++."""
    sizes = listed("shape", value)
    if len(sizes) > MAX_DIMS:
        raise LayoutError(f"shape of {len(sizes)} dimensions: allowed are 0 to {MAX_DIMS}")
    return tuple(integer(f"size of dimension {d}", size, 0, MAX_INT64) for d, size in enumerate(sizes))


_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def dtype(value: Any) -> torch.dtype:
    """A torch dtype, given as such or by its name ("int32", "torch.int32" or "bf16")."""
    found: Any = value
    if isinstance(value, str):
        name = value.removeprefix("torch.")
        found = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise LayoutError(
            f"dtype {shown(value)}: expected a torch dtype or its name, for example float32, bfloat16, int64"
        )
    return found


def dtype_name(value: torch.dtype) -> str:
    """ "int32" for torch.int32."""
    return str(value).removeprefix("torch.")


def total_bytes(sizes: Sequence[int], of: torch.dtype) -> int:
    """Bytes of a tensor."""
    return math.prod(sizes) * of.itemsize


P = ParamSpec("P")
T = TypeVar("T")


def typed_arguments(kind: type[MeshcastError] = LayoutError) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Errors of Python and torch that come out of the function become a `kind` that shows the arguments. Not
    those of the operating system, and TypeError where arguments are missing or have other names."""

    def net(function: Callable[P, T]) -> Callable[P, T]:
        name = function.__qualname__.removesuffix(".__init__").removesuffix(".__post_init__")

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except (MeshcastError, OSError, torch.OutOfMemoryError):
                raise
            except Exception as cause:
                try:
                    given = inspect.signature(function).bind(*args, **kwargs).arguments
                except TypeError:
                    raise cause from None
                text = ", ".join(f"{key}={shown(value)}" for key, value in given.items() if key != "self")
                what = f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
                raise kind(f"{name} cannot work with its arguments ({what}); given were {text}") from cause

        return call

    return net


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
            raise LayoutError(f"{what} file {shown(str(path), 250)}: {reason}") from None
    else:
        raise LayoutError(f"{what} {shown(source)}: expected a path or JSON text")
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
            raise LayoutError(f"{where}: expected an object, found {shown(value)}")
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
        return integer(f"{self.where}.{name}", self.value(name), low, high)

    def integers(self, name: str, low: int, high: int) -> list[int]:
        """The field as a list of integers within [low, high]."""
        return [integer(f"{self.where}.{name}[{i}]", v, low, high) for i, v in enumerate(self.items(name))]

    def items(self, name: str) -> list[Any]:
        """The field as a list."""
        value = self.value(name)
        if not isinstance(value, list):
            raise LayoutError(f"{self.where}.{name}: expected a list, found {shown(value)}")
        return value

    def text(self, name: str) -> str:
        """The field as text."""
        value = self.value(name)
        if not isinstance(value, str):
            raise LayoutError(f"{self.where}.{name}: expected text, found {shown(value)}")
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
            raise LayoutError(f"{self.where}.format is {shown(found)}; this version reads {name!r}")

    def finish(self) -> None:
        """Refuses fields that were not read: most are typing errors."""
        unknown = [name for name in self._fields if name not in self._used]
        if unknown:
            raise LayoutError(
                f"{self.where}: unknown field {shown(unknown[0])}; "
                f"allowed are {', '.join(sorted(self._used))}"
            )
