"""Checks of what users and files hand in. Each names the offending item and what is allowed."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import LayoutError

MAX_DIMS = 8  # tensor dimensions that the C++ boxes hold
MAX_INT64 = (1 << 63) - 1


def shown(item: Any, limit: int = 60) -> str:
    """`repr` short enough for a one-line message, whatever was handed in."""
    try:
        text = repr(item).replace("\n", " ")
    except Exception:  # a repr that raises, as of a tensor that cannot be read
        text = f"a {type(item).__name__}"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


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
