"""Which addresses strided elements have in common, against sets of every address."""

from __future__ import annotations

import itertools
import math

from hypothesis import example, given, settings
from hypothesis import strategies as st
from meshcast.resharding.memory import Region, meet, repeats

# Small strides make overlaps, zeros among them; powers and multiples make layouts like those of views.
_DIMS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4) | st.integers(0, 40)), max_size=4)


@st.composite
def _views(draw: st.DrawFn) -> Region:
    """A buffer cut, strided and permuted: nothing in it overlaps."""
    sizes, strides, stride = [], [], 1
    for _ in range(draw(st.integers(0, 3))):
        size, step = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        sizes.append(size)
        strides.append(stride * step)
        stride *= size * step + draw(st.integers(0, 2))
    order = draw(st.permutations(range(len(sizes))))
    item = draw(st.sampled_from((1, 2, 4, 8)))
    first = draw(st.integers(0, 12)) * draw(st.sampled_from((1, item)))
    return Region(first, item, tuple(sizes[i] for i in order), tuple(strides[i] for i in order))


@st.composite
def _regions(draw: st.DrawFn) -> Region:
    dims = draw(_DIMS)
    item = draw(st.sampled_from((1, 2, 4, 8)))
    first = draw(st.integers(0, 120))
    return Region(first, item, tuple(size for size, _ in dims), tuple(stride for _, stride in dims))


def _elements(region: Region) -> list[int]:
    """The first byte of each."""
    return [
        region.first + region.item * sum(map(math.prod, zip(index, region.strides, strict=True)))
        for index in itertools.product(*map(range, region.shape))
    ]


def _bytes(region: Region) -> set[int]:
    return {first + byte for first in _elements(region) for byte in range(region.item)}


@settings(max_examples=600, deadline=None, derandomize=True)
@given(_regions() | _views())
@example(Region(0, 4, (6, 3), (2, 1)))
@example(Region(0, 4, (3, 4), (4, 3)))  # neither stride is beyond the reach of the other, yet all differ
@example(Region(0, 4, (4, 5), (4, 3)))
@example(Region(0, 4, (4, 1), (0, 0)))
@example(Region(0, 4, (1, 1), (0, 0)))
@example(Region(0, 4, (), ()))
def test_repeated_addresses(region: Region) -> None:
    elements = _elements(region)
    assert repeats(region.shape, region.strides) == (len(set(elements)) < len(elements))
    assert region.end == max(elements) + region.item


@settings(max_examples=600, deadline=None, derandomize=True)
@given(_regions() | _views(), _regions() | _views())
@example(Region(0, 1, (2, 2, 2), (100, 3, 1)), Region(102, 1, (), ()))  # in the only gap of 100 to 104
@example(Region(0, 4, (2, 2, 2), (100, 3, 1)), Region(403, 1, (2,), (8,)))
def test_common_bytes(a: Region, b: Region) -> None:
    assert meet(a, b) == meet(b, a) == bool(_bytes(a) & _bytes(b))


@settings(deadline=None, derandomize=True)
@given(_views())
def test_views_of_a_buffer_repeat_nothing(region: Region) -> None:
    assert repeats(region.shape, region.strides) is False


def test_large_tensors_are_decided_at_once() -> None:
    rows = (1 << 20, 1 << 20)
    assert repeats(rows, (1 << 20, 1)) is False
    assert repeats(rows, ((1 << 20) - 1, 1)) is True  # each row begins at the last element of the one before
    left = Region(0, 4, (1 << 20, 1000), (1 << 20, 1))
    right = Region(4000, 4, (1 << 20, 1000), (1 << 20, 1))
    assert meet(left, right) is False
    assert meet(left, right._replace(first=3996)) is True
    even, odd = (Region(first, 2, (1 << 10, 1 << 9, 1 << 10), (1 << 20, 1 << 11, 2)) for first in (0, 2))
    assert meet(even, odd) is False


def test_what_takes_too_long_is_left_undecided() -> None:
    strides = (451157147291, 182481218773, 379987412931, 328529233657, 150465418823, 387028256101)
    region = Region(0, 1, (50,) * 6, strides)
    assert repeats(region.shape, strides) is None
    assert meet(region, region._replace(first=700000000001)) is None
