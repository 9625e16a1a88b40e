"""Layouts of state dicts: copies of plain tensors, what a map makes of a destination, blocks of scales."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.distributed.tensor import Replicate

from ..base.boxes import HeldBoxes, Piece, box_text
from ..errors import LayoutError
from ..layout import Box, Layout
from .meshes import positive_placements
from .tensor_map import Block

__all__ = ["check_blocks", "check_holds", "copies_on", "mapped_layout", "positive", "together"]

_OP = "reshard_state_dict"


@lru_cache(maxsize=64)
def copies_on(ranks: tuple[int, ...]) -> Layout:
    """A copy on each rank."""
    return Layout(list(ranks), [Replicate()])


def positive(layout: Layout, ndim: int) -> Layout:
    """The layout with dimensions counted from the first."""
    if all(dim >= 0 for _, dim, _, _ in layout._placements):
        return layout
    mesh = torch.tensor(layout.ranks).reshape(layout.mesh_shape)
    return Layout(mesh, positive_placements(layout.placements, ndim))


def together(layouts: Sequence[Layout], shape: tuple[int, ...]) -> Layout:
    """Returns what the ranks of several layouts hold, which share none; the layout itself where it is one."""
    if len(layouts) == 1:
        return layouts[0]
    pieces = dict(sorted(pair for layout in layouts for pair in layout.pieces(shape).items()))
    return Layout._of_held(tuple(pieces), tuple(pieces.values()), len(shape))


def check_holds(name: str, shape: tuple[int, ...], source: Layout, destination: Layout) -> None:
    """Raises LayoutError unless the source has all that the destination wants; only boxes leave gaps."""
    if not (source.by_boxes or destination.by_boxes):
        return
    try:
        source._core(shape).check_holds(destination._core(shape), shape)
    except LayoutError as error:
        raise LayoutError(f"{_OP}: {name!r}: {error}") from None


def mapped_layout(
    blocks: Sequence[Block], shape: tuple[int, ...], target: Layout, ndim: int
) -> Layout | None:
    """Returns the layout in which the destination holds its part of a source, in the source's own
    coordinates. The blocks are all those of one source. shape, target: of the destination; ndim: of the
    source. None where no rank wants any of it."""
    ranks: list[int] = []
    held: list[HeldBoxes] = []
    for rank, (local, pieces) in target.pieces(shape).items():
        found = [part for block in blocks for piece in pieces for part in _meet(block, piece)]
        if found:
            ranks.append(rank)
            held.append((local, tuple(found)))
    return Layout._of_held(ranks, tuple(held), ndim) if ranks else None


def _meet(block: Block, piece: Piece) -> list[Piece]:
    """The part of a block that a piece of the destination holds, as a box of the source; none or one."""
    box, at, axes, steps = piece
    ndim = len(box)
    axes, steps = axes or tuple(range(ndim)), steps or (1,) * ndim
    source: list[tuple[int, int]] = [
        (low, low + size) for low, size in zip(block.low, block.sizes, strict=True)
    ]
    local = list(at)
    for dim, (low, high) in enumerate(box):
        own = block.axes.index(dim) if dim in block.axes else None
        begin = max(low, block.at[dim])
        end = min(high, block.at[dim] + (1 if own is None else block.sizes[own]))
        if begin >= end:
            return []
        if own is not None:
            first = block.low[own] + begin - block.at[dim]
            source[own] = (first, first + end - begin)
        local[axes[dim]] += (begin - low) * steps[dim]
    if any(low >= high for low, high in source):
        return []
    along = tuple(0 if axis is None else axes[axis] for axis in block.axes)
    step = tuple(0 if axis is None else steps[axis] for axis in block.axes)
    return [(tuple(source), tuple(local), along, step)]


def check_blocks(
    name: str,
    scale: str,
    block: Sequence[int],
    tensor: tuple[tuple[int, ...], Layout],
    scales: tuple[tuple[int, ...], Layout],
) -> None:
    """Raises LayoutError unless every rank that gets a part of a tensor gets whole blocks of it, and just
    their scales. tensor, scales: shape and destination."""
    (shape, layout), (scale_shape, scale_layout) = tensor, scales
    expected = tuple(-(-size // by) for size, by in zip(shape, block, strict=False))
    if len(block) != len(shape) or scale_shape != expected:
        raise LayoutError(
            f"{_OP}: {scale!r} has shape {scale_shape}; the scales of blocks of {tuple(block)} of {name!r}, "
            f"which has shape {shape}, have {expected}"
        )
    has = scale_layout.shards(scale_shape)
    for rank, boxes in layout.shards(shape).items():
        wanted = []
        for box in boxes:
            for (low, high), by, size in zip(box, block, shape, strict=True):
                if low % by or (high % by and high != size):
                    raise LayoutError(
                        f"{_OP}: the destination of {name!r} gives rank {rank} {box_text(box)}, which cuts "
                        f"blocks of {tuple(block)}: their scales would not fit; choose a layout that cuts "
                        "between blocks"
                    )
            wanted.append(
                tuple((low // by, -(-high // by)) for (low, high), by in zip(box, block, strict=True))
            )
        if _joined_text(wanted) != _joined_text(has.get(rank, [])):
            raise LayoutError(
                f"{_OP}: rank {rank} gets the blocks {_joined_text(wanted)} of {name!r}, but of {scale!r} "
                f"{_joined_text(has.get(rank, []))}; give both layouts that cut alike"
            )


def _joined_text(boxes: Sequence[Box]) -> str:
    return ", ".join(box_text(box) for box in boxes) or "nothing"
