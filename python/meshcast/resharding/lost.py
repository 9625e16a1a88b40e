"""Ranks that are lost: which ranks hold a tensor without them, and what of it lives nowhere any more."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..base import checks
from ..base.boxes import box_text
from ..errors import LayoutError
from ..layout import Box, Layout, _rebuild
from .mesh_family import everywhere
from .tensor_move import Destination, Source, positive_placements

__all__ = [
    "Gone",
    "check_lost",
    "check_not_wanted",
    "gone",
    "living",
    "lost_ranks",
    "raise_gone",
    "ranks_text",
    "renumbered",
    "survivors",
]

_MAX_RANK = (1 << 31) - 1
_SHOWN = 20  # boxes that a message lists; the error has all of them


class Gone(NamedTuple):
    """A box that no rank holds any more. ranks: those that had it."""

    name: str
    box: Box
    ranks: tuple[int, ...]


def lost_ranks(lost: Any, op: str) -> tuple[int, ...]:
    """The argument `lost`, ascending and each rank once. Raises LayoutError for what are no ranks."""
    listed = checks.listed(f"{op}: lost", lost)
    return tuple(sorted({checks.integer(f"{op}: lost rank", rank, 0, _MAX_RANK) for rank in listed}))


def check_lost(lost: Collection[int], rank: int, op: str) -> None:
    """Raises LayoutError on a rank that is called lost."""
    if rank in lost:
        raise LayoutError(
            f"{op}: rank {rank} is named in lost= and yet makes the call; leave it out of lost=, or the call "
            "out on it",
            rank=rank,
            op=op,
        )


def living(
    sources: Sequence[Source], destinations: Sequence[Destination], lost: Sequence[int], rank: int, op: str
) -> list[Source]:
    """The sources as ranks hold them that are not lost. Raises LayoutError where a lost rank is in no source
    or in a destination, where a gradient is asked for, and where a box lives nowhere any more."""
    layouts = [everywhere(source.layout, source.slices) for source in sources]
    in_sources = {rank for layout in layouts for rank in layout.ranks}
    never = [rank for rank in lost if rank not in in_sources]
    if never:
        raise LayoutError(
            f"{op}: lost= names {ranks_text(never)}, not in {_layouts_text(layouts)}; "
            "name ranks that held a part of the source",
            rank=rank,
            op=op,
        )
    names = {number: number for number in lost}
    found, missing = [], []
    for index, (source, layout, destination) in enumerate(zip(sources, layouts, destinations, strict=True)):
        name = "x" if len(sources) == 1 else f"xs[{index}]"
        placements = positive_placements(destination.placements, len(source.shape))
        wanted = everywhere(Layout(destination.mesh, placements), destination.slices)
        check_not_wanted(name, wanted, names, rank, op)
        if source.needs_grad:
            raise LayoutError(
                f"{op}: {name} requires a gradient, which could not travel back to ranks that are lost; call "
                "it under torch.no_grad()",
                rank=rank,
                op=op,
            )
        left = survivors(layout, source.shape, lost, f"{op}: {name}")
        if left is not layout:
            missing += gone(name, source.shape, layout, names, wanted)
            source = replace(source, layout=left or _nothing(wanted, len(source.shape)), slices=())
        found.append(source)
    raise_gone(missing, op, rank)
    return found


def check_not_wanted(name: str, wanted: Layout, lost: Mapping[int, int], rank: int, op: str) -> None:
    """Raises LayoutError where a lost rank is to receive. lost: as for gone()."""
    both = [lost[number] for number in wanted.ranks if number in lost]
    if both:
        raise LayoutError(
            f"{op}: {ranks_text(both)} is lost, and yet in the destination of {name!r}, {wanted}; choose a "
            "mesh of ranks that live",
            rank=rank,
            op=op,
        )


def _nothing(wanted: Layout, ndim: int) -> Layout:
    """The source of a tensor without elements that no rank holds any more."""
    return Layout._of_held(wanted.ranks[:1], (((0,) * ndim, ()),), ndim)


def _layouts_text(layouts: Sequence[Layout]) -> str:
    distinct = list(dict.fromkeys(layouts))
    return (
        str(distinct[0])
        if len(distinct) == 1
        else f"{distinct[0]} nor in the other {len(distinct) - 1} layouts"
    )


def survivors(layout: Layout, shape: tuple[int, ...], lost: Collection[int], what: str) -> Layout | None:
    """Returns the layout of what the other ranks hold: the layout itself where no lost rank is in it, None
    where no other rank is. Raises LayoutError for values that are partial: those of lost ranks are missing in
    every sum. what: the operation and the tensor."""
    if not lost or not any(rank in lost for rank in layout.ranks):
        return layout
    if layout.has_partial:
        raise LayoutError(
            f"{what}: {layout} holds Partial, and the values of lost ranks are missing in every element; "
            "reduce before ranks can be lost"
        )
    left = {rank: held for rank, held in sorted(layout.pieces(shape).items()) if rank not in lost}
    return Layout._of_held(tuple(left), tuple(left.values()), len(shape)) if left else None


def gone(
    name: str, shape: tuple[int, ...], layout: Layout, lost: Mapping[int, int], wanted: Layout
) -> list[Gone]:
    """Returns the boxes of a tensor that are wanted and were held by lost ranks alone. lost: their numbers in
    the layout, each with what messages call it."""
    found = []
    for box, holders in layout._core(shape).tiles(shape):
        if all(rank in lost for rank in holders) and all(lo < hi for lo, hi in box):
            found.append(Gone(name, box, tuple(lost[rank] for rank in holders)))
    if not found or not wanted.by_boxes:
        return found
    tiles = [box for box, _ in wanted._core(shape).tiles(shape)]
    met = []
    for each in found:
        for tile in tiles:
            box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(each.box, tile, strict=True))
            if all(lo < hi for lo, hi in box):
                met.append(each._replace(box=box))
    return met


def raise_gone(found: Sequence[Gone], op: str, rank: int) -> None:
    """Raises LayoutError that lists what lives on no rank."""
    if not found:
        return
    text = "; ".join(
        f"{each.name!r} {box_text(each.box)} of {ranks_text(each.ranks)}" for each in found[:_SHOWN]
    )
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise LayoutError(
        f"{op}: {len(found)} {'boxes live' if len(found) > 1 else 'box lives'} on no rank any more: "
        f"{text}{more}. Load these from a checkpoint; the field `gone` of this error lists all of them",
        rank=rank,
        op=op,
        gone=tuple((each.name, each.box, each.ranks) for each in found),
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks for a message: "rank 3", "ranks 0, 1", with the first eight of more."""
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' * (len(ranks) > 1)} {shown}" + (", ..." if len(ranks) > 8 else "")


def renumbered(layout: Layout, numbers: Mapping[int, int], what: str) -> Layout:
    """The layout with its ranks called otherwise. Raises LayoutError for a rank that has no new number."""
    without = [rank for rank in layout.ranks if rank not in numbers]
    if without:
        raise LayoutError(
            f"{what}: {layout} has {ranks_text(without)}, for which ranks= gives no new rank; name what is "
            "gone in lost="
        )
    ranks = array("i", [numbers[rank] for rank in layout.ranks])
    return _rebuild(layout.mesh_shape, ranks.tobytes(), layout._placements, layout._ndim, layout._held)
