"""Boxes that ranks have read from a checkpoint, beside what they hold: in place of what lost ranks had."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..base import checks
from ..base.boxes import HeldBoxes, Piece, box_text, extents, read_boxes
from ..errors import LayoutError
from ..layout import Box, Layout

__all__ = ["Loaded", "memory_with", "read_loaded", "with_boxes"]

Loaded = dict[str, list[tuple[Box, torch.Tensor]]]


def read_loaded(given: Any, op: str) -> Loaded:
    """The argument {name: [(box, tensor)]}, checked. Raises LayoutError naming the entry that is wrong."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise LayoutError(f"{op}: loaded must be a mapping by name, found {type(given).__name__}")
    found: Loaded = {}
    for name, parts in given.items():
        pairs = [
            checks.listed(f"{op}: loaded {name!r}", pair) for pair in checks.listed(f"{op}: loaded", parts)
        ]
        if any(len(pair) != 2 or not isinstance(pair[1], torch.Tensor) for pair in pairs):
            raise LayoutError(
                f"{op}: loaded has {checks.shown(parts)} for {name!r}: expected (box, tensor) pairs"
            )
        if not pairs:
            continue
        try:
            _, read = read_boxes({0: [box for box, _ in pairs]})
        except LayoutError as error:
            raise LayoutError(f"{op}: loaded {name!r}: {error}") from None
        boxes = read[0]
        tensors = [tensor.detach() for _, tensor in pairs if tensor.numel()]
        if [extents(box) for box in boxes] != [tuple(tensor.shape) for tensor in tensors]:
            raise LayoutError(
                f"{op}: loaded {name!r} has boxes {', '.join(map(box_text, boxes))} for tensors of shapes "
                f"{[tuple(tensor.shape) for tensor in tensors]}; a tensor has just the elements of its box"
            )
        if len({(tensor.dtype, tensor.device.type) for tensor in tensors}) > 1:
            raise LayoutError(f"{op}: loaded {name!r} has tensors of unlike dtypes or devices")
        if tensors:
            found[name] = list(zip(boxes, tensors, strict=True))
    return found


def with_boxes(
    layout: Layout, shape: tuple[int, ...], more: Mapping[int, Sequence[Box]], what: str
) -> Layout:
    """The layout in which ranks hold more boxes, by rank. Raises LayoutError for a box that its rank holds
    already, and for values that are partial."""
    if layout.has_partial:
        raise LayoutError(f"{what}: {layout} holds Partial, of which no part can be loaded")
    pieces = layout.pieces(shape)
    for rank, boxes in more.items():
        own = pieces.get(rank)
        for mine, *_ in own[1] if own is not None else ():
            for box in boxes:
                if all(a[0] < b[1] and b[0] < a[1] for a, b in zip(mine, box, strict=True)):
                    raise LayoutError(
                        f"{what}: rank {rank} has loaded {box_text(box)}, and holds {box_text(mine)} already"
                    )
        pieces[rank] = _held_with(own, boxes)
    ordered = dict(sorted(pieces.items()))
    made = Layout._of_held(tuple(ordered), tuple(ordered.values()), len(shape))
    try:
        made.shards(shape)
    except LayoutError as error:
        raise LayoutError(f"{what}: {error}") from None
    return made


def _held_with(own: HeldBoxes | None, boxes: Sequence[Box]) -> HeldBoxes:
    """Returns where what a rank holds and its other boxes lie in the tensor of memory_with(). A single box is
    a local tensor; others lie one after the other in a tensor of one dimension."""
    local, pieces = own if own is not None else ((), ())
    if not pieces and len(boxes) == 1:
        return extents(boxes[0]), ((boxes[0], (0,) * len(boxes[0]), (), ()),)
    strides = _strides(local)
    flat: list[Piece] = []
    for box, at, axes, steps in pieces:
        along, step = axes or range(len(box)), steps or (1,) * len(box)
        first = sum(index * strides[dim] for dim, index in enumerate(at))
        by = tuple(strides[axis] * each for axis, each in zip(along, step, strict=True))
        flat.append((box, (first,), (0,) * len(box), by))
    end = math.prod(local) if pieces else 0
    for box in boxes:
        flat.append((box, (end,), (0,) * len(box), _strides(extents(box))))
        end += math.prod(extents(box))
    return (end,), tuple(flat)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def memory_with(own: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The local tensor that with_boxes() describes, made anew where it is not a single box."""
    held = own is not None and own.numel() > 0
    if not held and len(tensors) == 1:
        return tensors[0]
    parts = [own, *tensors] if held and own is not None else list(tensors)
    return torch.cat([part.reshape(-1) for part in parts])
