"""Strided regions of storages: where the elements of one come from, found again after views of views.

A link says where a region of a storage comes from. Addresses count elements. To compare two regions, both are
written as cells in a number system whose radices are their strides: a cell is an interval of each digit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..base.boxes import Piece

__all__ = ["Contents", "Dim", "IrregularError", "Link", "boxes_of", "dims_of", "numel"]

MOST_PARTS = 1 << 16  # of one region: more would take longer to plan than the tensor to travel


class IrregularError(Exception):
    """Regions that do not meet in a moderate number of boxes."""


class Dim(NamedTuple):
    """A dimension of a region: how many elements, and the distance of two of them here and at the source."""

    size: int
    step: int
    source: int


class Link(NamedTuple):
    """A region of a storage and its source: element i of each dimension is at `first` + i * step here, and at
    `origin` + i * source there. path: of dtypes that the values have had, from the source on."""

    first: int
    dims: tuple[Dim, ...]
    source: Any
    origin: int
    path: tuple[Any, ...] = ()


def numel(dims: Iterable[Dim]) -> int:
    return math.prod(dim.size for dim in dims)


def dims_of(sizes: Sequence[int], steps: Sequence[int], sources: Sequence[int]) -> tuple[Dim, ...]:
    """The dimensions of a region, outermost first, without those of one element; such that are one dimension
    here and there are joined. Raises IrregularError where two elements have one address here."""
    dims = sorted(
        (Dim(*each) for each in zip(sizes, steps, sources, strict=True) if each[0] != 1),
        key=lambda dim: -dim.step,
    )
    joined: list[Dim] = []
    for dim in reversed(dims):
        if dim.step <= 0:
            raise IrregularError("several elements with one address")
        inner = joined[-1] if joined else None
        if inner is not None and (dim.step, dim.source) == (
            inner.step * inner.size,
            inner.source * inner.size,
        ):
            joined[-1] = Dim(dim.size * inner.size, inner.step, inner.source)
        else:
            joined.append(dim)
    joined.reverse()
    return tuple(joined)


def _end(first: int, dims: Iterable[Dim]) -> int:
    return first + sum((dim.size - 1) * dim.step for dim in dims) + 1


class _Cell(NamedTuple):
    """A product of intervals of digits, outermost first. steps: at the source, for each digit."""

    lows: tuple[int, ...]
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    rest: int  # below the smallest radix
    origin: int


def _radices(steps: Iterable[int]) -> tuple[int, ...]:
    """The steps, each of which divides the one before. Raises IrregularError where they do not."""
    found = sorted({*steps}, reverse=True)
    for outer, inner in itertools.pairwise(found):
        if outer % inner:
            raise IrregularError("strides of which none divides the other")
    return tuple(found)


def _cells(first: int, dims: Sequence[Dim], origin: int, radices: Sequence[int]) -> list[_Cell]:
    """The cells of a region, whose steps are all radices."""
    level = {radix: at for at, radix in enumerate(radices)}
    sizes: dict[int, tuple[int, int]] = {}
    for dim in dims:
        if level[dim.step] in sizes:
            raise IrregularError("several elements with one address")
        sizes[level[dim.step]] = (dim.size, dim.source)
    waiting, found = [(first, sizes, origin)], []
    while waiting:
        first, sizes, origin = waiting.pop()
        split = _carry(first, sizes, origin, radices)
        if split is None:
            lows = tuple(
                (first if at == 0 else first % radices[at - 1]) // radix for at, radix in enumerate(radices)
            )
            each = [sizes.get(at, (1, 0)) for at in range(len(radices))]
            rest = first % radices[-1] if radices else first
            found.append(_Cell(lows, tuple(n for n, _ in each), tuple(s for _, s in each), rest, origin))
        else:
            waiting += split
        if len(found) + len(waiting) > MOST_PARTS:
            raise IrregularError(f"more than {MOST_PARTS} boxes")
    return found


_Part = tuple[int, dict[int, tuple[int, int]], int]


def _carry(
    first: int, sizes: dict[int, tuple[int, int]], origin: int, radices: Sequence[int]
) -> list[_Part] | None:
    """The parts of a region of which one digit runs over its radix; None where none does."""
    for at in range(len(radices) - 1, 0, -1):
        size, step = sizes.get(at, (1, 0))
        radix = radices[at - 1] // radices[at]
        low = first % radices[at - 1] // radices[at]
        if low + size <= radix:
            continue
        if low:
            head = radix - low
            return [
                (first, sizes | {at: (head, step)}, origin),
                (first + head * radices[at], sizes | {at: (size - head, step)}, origin + head * step),
            ]
        if sizes.get(at - 1, (1, 0))[0] > 1:
            raise IrregularError("several elements with one address")
        whole, tail = divmod(size, radix)
        parts = [(first, sizes | {at: (radix, step), at - 1: (whole, step * radix)}, origin)]
        if tail:
            begin = first + whole * radices[at - 1]
            parts.append((begin, sizes | {at: (tail, step)}, origin + whole * radix * step))
        return parts
    return None


def _common(a: _Cell, b: _Cell) -> list[tuple[int, int]] | None:
    """The digits that both cells have, as (low, high); None where they share no address."""
    if a.rest != b.rest:
        return None
    both = []
    for low, size, other_low, other_size in zip(a.lows, a.sizes, b.lows, b.sizes, strict=True):
        begin, end = max(low, other_low), min(low + size, other_low + other_size)
        if begin >= end:
            return None
        both.append((begin, end))
    return both


def _origin(cell: _Cell, lows: Iterable[int]) -> int:
    """The address at the source of the cell's element with these digits."""
    return cell.origin + sum(
        (low - own) * step for low, own, step in zip(lows, cell.lows, cell.steps, strict=True)
    )


def _part(cell: _Cell, box: Sequence[tuple[int, int]]) -> _Cell:
    lows = tuple(low for low, _ in box)
    sizes = tuple(high - low for low, high in box)
    return cell._replace(lows=lows, sizes=sizes, origin=_origin(cell, lows))


def _without(cell: _Cell, box: Sequence[tuple[int, int]]) -> list[_Cell]:
    """The parts of a cell that are outside of a box in it."""
    parts = []
    own = [(low, low + size) for low, size in zip(cell.lows, cell.sizes, strict=True)]
    for at, (low, high) in enumerate(box):
        for begin, end in ((own[at][0], low), (high, own[at][1])):
            if begin < end:
                parts.append(_part(cell, [*own[:at], (begin, end), *own[at + 1 :]]))
        own[at] = (low, high)
    return parts


def _link(cell: _Cell, radices: Sequence[int], like: Link) -> Link:
    first = cell.rest + sum(low * radix for low, radix in zip(cell.lows, radices, strict=True))
    return like._replace(first=first, dims=dims_of(cell.sizes, radices, cell.steps), origin=cell.origin)


class Contents:
    """The links of a storage; no two have an address in common."""

    def __init__(self, links: Iterable[Link] = ()) -> None:
        self.links = list(links)
        self._ends = [_end(link.first, link.dims) for link in self.links]

    def write(self, link: Link) -> None:
        """Adds a link, instead of what was there. Raises IrregularError."""
        end = _end(link.first, link.dims)
        hit = [
            at
            for at, (other, ends) in enumerate(zip(self.links, self._ends, strict=True))
            if other.first < end and link.first < ends
        ]
        if hit:
            dense = numel(link.dims) == end - link.first
            left: list[Link] = []
            for at in hit:
                if not (dense and link.first <= self.links[at].first and self._ends[at] <= end):
                    left += _outside(self.links[at], link)
            gone = set(hit)
            kept = [each for at, each in enumerate(self.links) if at not in gone]
            self.links = kept + left
            self._ends = [_end(each.first, each.dims) for each in self.links]
        self.links.append(link)
        self._ends.append(end)

    def read(self, first: int, dims: Sequence[Dim], to: int) -> list[Link]:
        """The links of a region, as one that begins at `to` elsewhere and has the steps `source` of the
        dimensions there. Less than the whole region where something in it has no link. Raises
        IrregularError."""
        end, found = _end(first, dims), []
        for link, ends in zip(self.links, self._ends, strict=True):
            if link.first < end and first < ends:
                found += _meeting(link, first, dims, to)
                if len(found) > MOST_PARTS:
                    raise IrregularError(f"more than {MOST_PARTS} boxes")
        return found


def _outside(link: Link, other: Link) -> list[Link]:
    """The parts of a link that another does not cover."""
    radices = _radices(dim.step for dim in (*link.dims, *other.dims))
    parts = _cells(link.first, link.dims, link.origin, radices)
    touched = False
    for cell in _cells(other.first, other.dims, 0, radices):
        left = []
        for part in parts:
            box = _common(part, cell)
            touched |= box is not None
            left += [part] if box is None else _without(part, box)
        parts = left
    return [_link(part, radices, link) for part in parts] if touched else [link]


def _meeting(link: Link, first: int, dims: Sequence[Dim], to: int) -> list[Link]:
    if (first, [d[:2] for d in dims]) == (link.first, [d[:2] for d in link.dims]):  # as most are
        sizes, steps = [d.size for d in dims], [d.source for d in dims]
        return [link._replace(first=to, dims=dims_of(sizes, steps, [d.source for d in link.dims]))]
    radices = _radices(dim.step for dim in (*link.dims, *dims))
    found = []
    there = _cells(link.first, link.dims, link.origin, radices)
    for cell in _cells(first, dims, to, radices):
        for other in there:
            box = _common(cell, other)
            if box is not None:
                lows = [low for low, _ in box]
                joined = dims_of([high - low for low, high in box], cell.steps, other.steps)
                found.append(
                    link._replace(first=_origin(cell, lows), dims=joined, origin=_origin(other, lows))
                )
    return found


def boxes_of(link: Link, shape: Sequence[int]) -> list[Piece]:
    """The boxes of the source, which is contiguous and has this shape, with their places in the storage.
    Raises IrregularError."""
    own = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    radices = {stride for stride, size in zip(own, shape, strict=True) if size > 1} | {1}
    found: list[Piece] = []
    waiting = [link]
    while waiting:
        link = waiting.pop()
        # Seen from the source, whose addresses are the ones that are decoded.
        turned = [Dim(dim.size, dim.source, dim.step) for dim in link.dims]
        odd = next((at for at, dim in enumerate(turned) if not _fits(dim.step, radices)), None)
        if odd is not None:
            waiting += _unrolled(link, odd)
        else:
            steps = _radices({*radices, *(dim.step for dim in turned)})
            for cell in _cells(link.origin, turned, link.first, steps):
                found += _pieces(cell, steps, own, shape)
        if len(found) + len(waiting) > MOST_PARTS:
            raise IrregularError(f"more than {MOST_PARTS} boxes")
    return found


def _fits(step: int, radices: Iterable[int]) -> bool:
    return step > 0 and all(step % radix == 0 or radix % step == 0 for radix in radices)


def _unrolled(link: Link, at: int) -> list[Link]:
    """A link for each element of one dimension."""
    dim, rest = link.dims[at], (*link.dims[:at], *link.dims[at + 1 :])
    if dim.size > MOST_PARTS:
        raise IrregularError(f"more than {MOST_PARTS} boxes")
    return [
        link._replace(first=link.first + i * dim.step, origin=link.origin + i * dim.source, dims=rest)
        for i in range(dim.size)
    ]


def _pieces(cell: _Cell, radices: Sequence[int], own: Sequence[int], shape: Sequence[int]) -> list[Piece]:
    """The boxes of a cell in the coordinates of the source. A dimension of it may have several digits: they
    are one interval where the inner one has all its values, and are listed value by value elsewhere."""
    parts: list[tuple[int, list[tuple[int, int, int]]]] = [(cell.origin, [])]  # place, (low, size, step)
    at = 0
    for stride, size in zip(own, shape, strict=True):
        if size == 1:
            parts = [(place, [*box, (0, 1, 0)]) for place, box in parts]
            continue
        group = []  # of the digits of this dimension
        while at < len(radices) and radices[at] >= stride:
            group.append((cell.lows[at], cell.sizes[at], cell.steps[at], radices[at] // stride))
            at += 1
        spans = [(0, 0, 1, 0)]  # place, low, size, step; from the inner digit outwards
        for low, count, step, unit in reversed(group):
            wider = []
            for place, begin, extent, by in spans:
                whole = extent == unit and (extent == 1 or step == by * extent)
                if count == 1:
                    wider.append((place, low * unit + begin, extent, by))
                elif whole:
                    wider.append((place, low * unit + begin, count * extent, step if extent == 1 else by))
                else:
                    wider += [(place + i * step, (low + i) * unit + begin, extent, by) for i in range(count)]
            spans = wider
        parts = [
            (place + more, [*box, (low, extent, by)])
            for place, box in parts
            for more, low, extent, by in spans
        ]
        if len(parts) > MOST_PARTS:
            raise IrregularError(f"more than {MOST_PARTS} boxes")
    return [
        (
            tuple((low, low + extent) for low, extent, _ in box),
            (place,),
            (0,) * len(box),
            tuple(by if extent > 1 else 0 for _, extent, by in box),
        )
        for place, box in parts
    ]
