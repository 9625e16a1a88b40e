"""The text of values that ranks send each other: whatever goes in comes out, equal values stand once, and a
text of another type is an error that says so."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import meshcast
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from meshcast.base.wire import once, pack, unpack
from torch.distributed.tensor import Replicate, Shard


class Kind(enum.Enum):
    FIRST = 1
    SECOND = "two"


@once
class Family(NamedTuple):
    names: tuple[str, ...]
    ranks: frozenset[int]


@dataclass(frozen=True)
class Entry:
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: meshcast.Layout | None
    family: Family | None
    kind: Kind
    raw: bytes
    pair: tuple[int, str]
    way: Literal["in", "out"]
    plain: bool = False


@dataclass
class Side:
    entries: dict[str, Entry]
    by_rank: dict[int, list[float]]
    option: str | int | None
    anything: Any
    inner: Side | None = None


layouts = st.sampled_from(
    [meshcast.Layout([0, 1], [Shard(0)]), meshcast.Layout([[2, 5]], [Replicate(), Shard(1)])]
)
families = st.builds(Family, st.lists(st.text(), max_size=2).map(tuple), st.frozensets(st.integers(0, 9)))
entries = st.builds(
    Entry,
    st.lists(st.integers(0, 1 << 62), max_size=3).map(tuple),
    st.sampled_from([torch.bfloat16, torch.float8_e4m3fn, torch.int64]),
    st.none() | layouts,
    st.none() | families,
    st.sampled_from(Kind),
    st.binary(max_size=9),
    st.tuples(st.integers(), st.text()),
    st.sampled_from(["in", "out"]),
    st.booleans(),
)
plain = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists)
sides = st.builds(
    Side,
    st.dictionaries(st.text(), entries, max_size=4),
    st.dictionaries(st.integers(), st.lists(st.floats(allow_nan=False)), max_size=3),
    st.none() | st.text() | st.integers(),
    plain,
)


@given(sides, sides)
def test_values_come_back(side: Side, inner: Side) -> None:
    side.inner = inner
    again = unpack(Side, pack(side))
    assert again == side
    assert [type(entry.dtype) for entry in again.entries.values()] == [torch.dtype] * len(side.entries)


def test_equal_values_stand_once_and_become_one_object() -> None:
    def entry(layout: meshcast.Layout) -> Entry:
        family = Family(("dp", "tp"), frozenset([0, 1]))
        return Entry((4,), torch.float32, layout, family, Kind.FIRST, b"", (0, ""), "in")

    made = {str(n): entry(meshcast.Layout([0, 1], [Shard(0)])) for n in range(50)}
    text = pack(Side(made, {}, None, None))
    assert text.count("shard") == 1
    assert text.count("dp") == 1
    known: dict[Any, Any] = {}
    sides = [unpack(Side, text, known) for _ in range(2)]
    found = {id(each.layout) for side in sides for each in side.entries.values()}
    assert len(found) == 1


def test_a_type_that_is_no_class() -> None:
    value = {3: ("a", [1, 2]), 1: ("b", [])}
    assert unpack(dict[int, tuple[str, list[int]]], pack(value, dict[int, tuple[str, list[int]]])) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        '["x",[],3]',
        "[[[1],[]],[]]",
        json.dumps([[{}, [], None], []]),
        json.dumps([[{"a": 3}, [], None, None, None], []]),
        json.dumps([[{}, [[1, ["x"]]], None, None, None], []]),
        json.dumps([["no", [], None, None, None], []]),
        pack(Family(("a",), frozenset([1]))),
    ],
)
def test_another_text_is_an_error(text: str) -> None:
    with pytest.raises(meshcast.MeshcastError, match=r"cannot be read as Side .* same version of meshcast"):
        unpack(Side, text)


@pytest.mark.parametrize(
    ("kind", "value"), [(int, "1"), (bool, 1), (str, 2), (Literal["a"], "b"), (int, True)]
)
def test_another_scalar_is_an_error(kind: Any, value: Any) -> None:
    with pytest.raises(meshcast.MeshcastError, match="cannot be read"):
        unpack(kind, json.dumps([value, []]))


def test_types_that_cannot_be_sent_are_named() -> None:
    with pytest.raises(TypeError, match=r"of type .*Generator.* cannot be sent"):
        pack(torch.Generator())
    with pytest.raises(TypeError, match=r"only X \| None"):
        pack({1: 2}, dict[int, Family | Kind])
