"""The text in which ranks send values to each other: `pack` writes it and `unpack` reads it, both from the
type hints of the value's class."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import struct
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

import torch

from ..errors import MeshcastError
from .checks import Reader, dtype, dtype_name

__all__ = ["once", "pack", "text_digest", "unpack"]

T = TypeVar("T")

_ONCE: set[Any] = {torch.dtype}
_SCALARS = (int, str, bool, float, types.NoneType)


def once(kind: type[T]) -> type[T]:
    """Marks a hashable class: equal values of it stand once in a text, however many others refer to them.

    Classes with `to_wire`, such as `Layout`, need no mark.
    """
    _ONCE.add(kind)
    return kind


def pack(value: Any, kind: Any = None) -> str:
    """Returns `value` as text that `unpack` reads.

    A value is a dataclass or a NamedTuple of values; an Enum; a bool, number, text, bytes or None; a
    torch.dtype; an object with `to_wire` and `from_wire`; a list, tuple, set or mapping whose hint has the
    types of its items; and where the hint is Any, whatever JSON can hold.

    Args:
        value: what is sent.
        kind: its type, if type(value) does not say it, for example ``dict[int, Side]``.
    """
    table: _Table = {}
    body = _codec(type(value) if kind is None else kind)[0](value, table)
    return json.dumps([body, [row for _, row in table.values()]], separators=(",", ":"))


def unpack(kind: type[T], text: str, known: dict[Any, Any] | None = None) -> T:
    """Returns the value of type `kind` that `pack` wrote.

    Args:
        kind: the type, as it was given to `pack`.
        text: from another rank.
        known: values that stand once in a text, from earlier texts. Equal ones become the same object,
            which makes comparing them cheap. New ones are added.

    Raises:
        MeshcastError: the text is of another type, as of a rank with another version of meshcast.
    """
    try:
        body, rows = json.loads(text)
        return typing.cast(T, _codec(kind)[1](body, _Rows(rows, {} if known is None else known)))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise MeshcastError(
            f"what another rank sent cannot be read as {name} ({type(error).__name__}: {error}); give all "
            "ranks the same version of meshcast"
        ) from error


def text_digest(text: str) -> tuple[int, int]:
    """Returns a digest of what a rank says: 128 bits in two int64; zeros for ""."""
    if not text:
        return 0, 0
    low, high = struct.unpack("<qq", hashlib.blake2b(text.encode(), digest_size=16).digest())
    return low, high


class _Rows:
    """Values that stand once in the text that is read."""

    def __init__(self, rows: list[Any], known: dict[Any, Any]) -> None:
        self._rows = rows
        self.known = known
        self._read: dict[int, Any] = {}

    def value(self, place: int, read: Callable[[Any, _Rows], Any]) -> Any:
        if place not in self._read:
            value = read(self._rows[place], self)
            self._read[place] = self.known.setdefault(value, value)
        return self._read[place]


_Table = dict[Any, tuple[int, Any]]  # of values that stand once: the place of each, and its JSON
_Write = Callable[[Any, _Table], Any]
_Read = Callable[[Any, _Rows], Any]


def _codec(kind: Any) -> tuple[_Write, _Read]:
    """Returns how a value of this type becomes JSON, and how it is read."""
    return _codecs(kind)  # mypy takes the metaclass of a type for one without a hash


@functools.cache
def _codecs(kind: Any) -> tuple[_Write, _Read]:
    write, read = _whole_codec(kind)
    if kind not in _ONCE and not hasattr(kind, "to_wire"):
        return write, read

    def place(value: Any, table: _Table) -> int:
        found = table.get((kind, value))
        if found is None:
            written = write(value, table)  # which may give places to the values in it
            found = table[kind, value] = len(table), written
        return found[0]

    return place, lambda at, rows: rows.value(at, read)


def _whole_codec(kind: Any) -> tuple[_Write, _Read]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Any, object):
        return _as_it_is, lambda raw, _: raw
    if origin is typing.Annotated or isinstance(kind, typing.NewType):
        return _codec(arguments[0] if arguments else kind.__supertype__)
    if origin in (typing.Union, types.UnionType):
        return _optional(kind, arguments)
    if kind in _SCALARS or origin is typing.Literal:
        return _as_it_is, _scalar(kind, arguments)
    if kind is bytes:
        return lambda value, _: base64.b64encode(value).decode(), lambda raw, _: base64.b64decode(raw)
    if kind is torch.dtype:
        return lambda value, _: dtype_name(value), lambda raw, _: dtype(raw)
    if hasattr(kind, "to_wire"):
        return _write_object, functools.partial(_read_object, kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda value, _: value.name, lambda raw, _: kind[raw]
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return _record(kind)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(*arguments)
    if origin is tuple and Ellipsis not in arguments:
        return _row(arguments, tuple)
    if isinstance(origin, type) and issubclass(origin, Sequence | AbstractSet):
        return _items(arguments[0], origin)
    raise TypeError(f"a value of type {kind} cannot be sent")


def _write_object(value: Any, _: _Table) -> str:
    """The JSON as one string: a reader that knows it has nothing to parse."""
    return json.dumps(value.to_wire(), separators=(",", ":"))


def _read_object(kind: Any, raw: Any, rows: _Rows) -> Any:
    found = rows.known.get((kind, raw))
    if found is None:
        found = kind.from_wire(Reader(json.loads(raw), kind.__name__))
        rows.known[kind, raw] = found
    return found


def _as_it_is(value: Any, _: _Table) -> Any:
    return value


def _scalar(kind: Any, allowed: tuple[Any, ...]) -> _Read:
    fitting = (float, int) if kind is float else (kind,)  # JSON writes 2.0 as it is; a float may hold an int

    def read(raw: Any, _: _Rows) -> Any:
        if not (raw in allowed if allowed else type(raw) in fitting):
            raise TypeError(f"{raw!r} is no {kind}")
        return raw

    return read


def _optional(kind: Any, arguments: tuple[Any, ...]) -> tuple[_Write, _Read]:
    kinds = [each for each in arguments if each is not types.NoneType]
    if all(each in _SCALARS for each in kinds):
        return _as_it_is, lambda raw, _: raw
    if len(kinds) != 1 or len(kinds) == len(arguments):
        raise TypeError(f"a value of type {kind} cannot be sent: only X | None and unions of scalars can")
    write, read = _codec(kinds[0])
    return (
        lambda value, table: None if value is None else write(value, table),
        lambda raw, rows: None if raw is None else read(raw, rows),
    )


def _record(kind: Any) -> tuple[_Write, _Read]:
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [each.name for each in fields(kind) if each.init] if is_dataclass(kind) else list(kind._fields)
    write, read = _row(tuple(hints[name] for name in names), list)
    if hasattr(kind, "_make"):
        return write, lambda raw, rows: kind._make(read(raw, rows))
    return (
        lambda value, table: write([getattr(value, name) for name in names], table),
        lambda raw, rows: kind(**dict(zip(names, read(raw, rows), strict=True))),
    )


def _row(kinds: tuple[Any, ...], make: type) -> tuple[_Write, _Read]:
    # Made as the first value comes, since a type may hold itself.
    writes: list[_Write] = []
    reads: list[_Read] = []

    def write(value: Any, table: _Table) -> Any:
        if not writes:
            writes.extend(_codec(kind)[0] for kind in kinds)
        return [codec(each, table) for codec, each in zip(writes, value, strict=True)]

    def read(raw: Any, rows: _Rows) -> Any:
        if not reads:
            reads.extend(_codec(kind)[1] for kind in kinds)
        found = [codec(each, rows) for codec, each in zip(reads, _listed(raw), strict=True)]
        return found if make is list else make(found)

    return write, read


def _items(kind: Any, origin: type) -> tuple[_Write, _Read]:
    write, read = _codec(kind)
    of_set = issubclass(origin, AbstractSet)
    make: type = origin if origin in (list, set, frozenset) else frozenset if of_set else tuple
    if kind in (int, str) and make is tuple:  # shapes and lists of ranks, of which there are most

        def read_row(raw: Any, rows: _Rows) -> Any:
            fit = {*map(type, _listed(raw))} <= {kind}
            return tuple(raw) if fit else tuple(read(each, rows) for each in raw)

        return lambda value, _: value, read_row
    return (
        lambda value, table: [write(each, table) for each in (sorted(value) if of_set else value)],
        lambda raw, rows: make(read(each, rows) for each in _listed(raw)),
    )


def _mapping(key: Any, kind: Any) -> tuple[_Write, _Read]:
    if key is str:
        write, read = _codec(kind)
        return (
            lambda value, table: {name: write(each, table) for name, each in value.items()},
            lambda raw, rows: {name: read(each, rows) for name, each in raw.items()},
        )
    pairs, read_pairs = _items(tuple[key, kind], list)
    return lambda value, table: pairs(value.items(), table), lambda raw, rows: dict(read_pairs(raw, rows))


def _listed(raw: Any) -> Any:
    if not isinstance(raw, list):
        raise TypeError(f"{raw!r} is no list")
    return raw
