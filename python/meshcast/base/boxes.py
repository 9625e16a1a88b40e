"""Boxes of a tensor in the memory of a rank: what users hand in, and where each box lies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import LayoutError
from . import checks

if TYPE_CHECKING:
    import torch

__all__ = [
    "Box",
    "HeldBoxes",
    "Piece",
    "box_text",
    "common",
    "extents",
    "held_in_order",
    "piece_view",
    "read_boxes",
    "read_held",
]

Box = tuple[tuple[int, int], ...]
"""Half-open n-d interval of the global tensor: (lo, hi) per tensor dimension."""

Piece = tuple[Box, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A box and where it lies in a local tensor: the index of its first element there; and, for each dimension of
the box, the local dimension that it lies along and how many of its elements a step takes. Without the latter
two the dimensions are the same."""

HeldBoxes = tuple[tuple[int, ...], tuple[Piece, ...]]
"""The holding of a rank: the shape of its local tensor, and the boxes in it."""

_MAX_BOXES = 1 << 20  # of all ranks of a layout
_MAX_RANK = (1 << 31) - 1


def extents(box: Box) -> tuple[int, ...]:
    return tuple(hi - lo for lo, hi in box)


def box_text(box: Box) -> str:
    return "[" + ", ".join(f"{lo}:{hi}" for lo, hi in box) + "]"


def common(a: Box, b: Box) -> Box | None:
    """Returns the elements of both boxes; None where there are none."""
    both = tuple((max(lo, low), min(hi, high)) for (lo, hi), (low, high) in zip(a, b, strict=True))
    return both if all(lo < hi for lo, hi in both) else None


def read_boxes(given: Any) -> tuple[int, dict[int, tuple[Box, ...]]]:
    """Checks {rank: boxes}: the number of tensor dimensions, and the boxes that are not empty, by ascending
    rank. Raises LayoutError naming the rank and the box."""
    if not isinstance(given, Mapping) or not given:
        raise LayoutError(
            f"from_boxes {checks.shown(given)}: expected a mapping of ranks to lists of boxes, of one rank "
            "or more"
        )
    ndim: int | None = None
    boxes: dict[int, tuple[Box, ...]] = {}
    for rank in sorted(checks.integer("from_boxes: rank", rank, 0, _MAX_RANK) for rank in given):
        listed = checks.listed(f"from_boxes: the boxes of rank {rank}", given[rank])
        read = [_read_box(rank, index, box) for index, box in enumerate(listed)]
        for box in read:
            ndim = len(box) if ndim is None else ndim
            if len(box) != ndim:
                raise LayoutError(
                    f"from_boxes: the box {box_text(box)} of rank {rank} has {len(box)} dimensions, others "
                    f"{ndim}"
                )
        boxes[rank] = tuple(box for box in read if all(lo < hi for lo, hi in box))
        _check_apart(rank, boxes[rank])
    if ndim is None:
        raise LayoutError("from_boxes: no rank has a box, so nothing says how many dimensions the tensor has")
    if sum(map(len, boxes.values())) > _MAX_BOXES:
        raise LayoutError(f"from_boxes: more than {_MAX_BOXES} boxes")
    return ndim, boxes


def _read_box(rank: int, index: int, box: Any) -> Box:
    where = f"from_boxes: box {index} of rank {rank}"
    sides = checks.listed(where, box)
    if len(sides) > checks.MAX_DIMS:
        raise LayoutError(f"{where} has {len(sides)} dimensions: allowed are 0 to {checks.MAX_DIMS}")
    read = []
    for dim, side in enumerate(sides):
        pair = checks.listed(f"{where}, dimension {dim}", side)
        if len(pair) != 2:
            raise LayoutError(f"{where}, dimension {dim} {checks.shown(side)}: expected (lo, hi)")
        lo = checks.integer(f"{where}, dimension {dim}: lo", pair[0], 0, checks.MAX_INT64)
        hi = checks.integer(f"{where}, dimension {dim}: hi", pair[1], lo, checks.MAX_INT64)
        read.append((lo, hi))
    return tuple(read)


def _check_apart(rank: int, boxes: Sequence[Box]) -> None:
    """Raises LayoutError where two boxes of a rank overlap. Sweeps along the dimension that separates most of
    them apart."""
    if len(boxes) < 2:
        return
    ndim = len(boxes[0])
    sweep = max(range(ndim), key=lambda d: len({box[d][0] for box in boxes}), default=None)
    if sweep is None:
        raise LayoutError(f"from_boxes: rank {rank} holds a scalar twice")
    open_: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[sweep]):
        open_ = [other for other in open_ if other[sweep][1] > box[sweep][0]]
        for other in open_:
            if common(other, box) is not None:
                raise LayoutError(
                    f"from_boxes: the boxes {box_text(other)} and {box_text(box)} of rank {rank} overlap; a "
                    "rank holds every element once"
                )
        open_.append(box)


def held_in_order(boxes: Sequence[Box], ndim: int) -> HeldBoxes:
    """The local tensor that holds boxes in this order: a single one as it is; several that agree in all but
    one dimension joined along it; others one after the other, flat."""
    if not boxes:
        return (0,) * ndim, ()
    if len(boxes) == 1:
        return extents(boxes[0]), ((boxes[0], (0,) * ndim, (), ()),)
    unlike = [d for d in range(ndim) if len({box[d] for box in boxes}) > 1]
    pieces: list[Piece] = []
    at = 0
    if len(unlike) == 1:
        along = unlike[0]
        for box in boxes:
            pieces.append((box, tuple(at if d == along else 0 for d in range(ndim)), (), ()))
            at += box[along][1] - box[along][0]
        shape = list(extents(boxes[0]))
        shape[along] = at
        return tuple(shape), tuple(pieces)
    for box in boxes:
        sizes = extents(box)
        steps = tuple(math.prod(sizes[d + 1 :]) for d in range(ndim))
        pieces.append((box, (at,), (0,) * ndim, steps))
        at += math.prod(sizes)
    return (at,), tuple(pieces)


def piece_view(local: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Returns the box in the local tensor that holds it."""
    box, at, axes, steps = piece
    if not axes and local.ndim == len(box):
        for dim, ((low, high), begin) in enumerate(zip(box, at, strict=True)):
            local = local.narrow(dim, begin, high - low)
        return local
    strides = [local.stride(axis) * step if step else 0 for axis, step in zip(axes, steps, strict=True)]
    first = sum(index * stride for index, stride in zip(at, local.stride(), strict=True))
    return local.as_strided(extents(box), strides, local.storage_offset() + first)


def read_held(where: str, value: Any) -> HeldBoxes:
    """Returns what JSON has, its types checked. Whether the boxes fit is seen with the tensor's shape."""
    fields = checks.listed(where, value)
    if len(fields) != 2:
        raise LayoutError(f"{where} {checks.shown(value)}: expected a local shape and a list of boxes")
    pieces = []
    for index, piece in enumerate(checks.listed(f"{where}: boxes", fields[1])):
        parts = checks.listed(f"{where}: box {index}", piece)
        if len(parts) != 4:
            raise LayoutError(f"{where}: box {index} {checks.shown(piece)}: expected a box and its place")
        box = tuple(_numbers(f"{where}: box {index}", side) for side in checks.listed(where, parts[0]))
        if any(len(side) != 2 for side in box) or len(box) > checks.MAX_DIMS:
            raise LayoutError(f"{where}: box {index} {checks.shown(parts[0])}: expected (lo, hi) pairs")
        place = [_numbers(f"{where}: place of box {index}", part) for part in parts[1:]]
        pieces.append((tuple((lo, hi) for lo, hi in box), place[0], place[1], place[2]))
    return _numbers(f"{where}: local shape", fields[0]), tuple(pieces)


def _numbers(where: str, values: Any) -> tuple[int, ...]:
    listed: Iterable[Any] = checks.listed(where, values)
    return tuple(checks.integer(where, value, 0, checks.MAX_INT64) for value in listed)


def block_box(box: Box, block: Sequence[int]) -> Box:
    """The blocks that a box touches."""
    return tuple((low // by, -(-high // by)) for (low, high), by in zip(box, block, strict=True))


def without(box: Box, others: Iterable[Box]) -> list[Box]:
    """The parts of a box that none of the others has."""
    left = [box]
    for other in others:
        left = [part for each in left for part in _cut(each, other)]
    return left


def _cut(box: Box, other: Box) -> list[Box]:
    both = common(box, other)
    if both is None:
        return [box]
    found, rest = [], list(box)
    for dim, (low, high) in enumerate(both):
        for side in ((rest[dim][0], low), (high, rest[dim][1])):
            if side[0] < side[1]:
                found.append((*rest[:dim], side, *rest[dim + 1 :]))
        rest[dim] = (low, high)
    return found
