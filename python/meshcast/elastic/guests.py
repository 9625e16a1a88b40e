"""Ranks that keep copies of boxes for others: each on another host than all ranks that hold the box."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import NamedTuple

import torch

from ..base.boxes import extents
from ..layout import Box, Layout
from ..resharding.meshes import Gone
from ..resharding.state_loaded import with_boxes
from ..resharding.state_sources import Origin

__all__ = ["Guests", "box_views"]


class _Tile(NamedTuple):
    name: str
    box: Box
    holders: tuple[int, ...]
    nbytes: int


class Guests:
    """The same on all ranks. keeper: {(name, box): rank}, of boxes that live on one host alone.

    Where all ranks are on one host, a rank counts as a host. What the same ranks hold goes to one keeper, so
    that few pairs of ranks talk. Keepers are chosen so that each keeps about as many bytes.
    """

    def __init__(self, origins: Mapping[str, Origin], host_of: Mapping[int, Hashable]) -> None:
        """host_of: of each rank of the group."""
        self._origins = origins
        hosts = host_of if len(set(host_of.values())) > 1 else {rank: rank for rank in host_of}
        parts: dict[tuple[int, ...], list[_Tile]] = {}
        for tile in self._tiles():
            if len({hosts[rank] for rank in tile.holders}) == 1:
                parts.setdefault(tile.holders, []).append(tile)
        sizes = {holders: sum(tile.nbytes for tile in tiles) for holders, tiles in parts.items()}
        kept = dict.fromkeys(sorted(hosts), 0)
        place = {rank: index for index, rank in enumerate(kept)}
        self.keeper: dict[tuple[str, Box], int] = {}
        for holders in sorted(parts, key=lambda each: (-sizes[each], each)):
            first = holders[0]
            others = [rank for rank in kept if hosts[rank] != hosts[first]]
            # Of those that keep as little, the next one: else the last hosts would be left without.
            keeper = min(others, key=lambda rank: (kept[rank], (place[rank] - place[first]) % len(place)))
            kept[keeper] += sizes[holders]
            self.keeper |= {(tile.name, tile.box): keeper for tile in parts[holders]}

    def _tiles(self) -> Iterator[_Tile]:
        for name, origin in self._origins.items():
            for box, holders in origin.layout._core(origin.shape).tiles(origin.shape):
                count = math.prod(extents(box))
                if count:
                    yield _Tile(name, box, tuple(sorted(holders)), count * origin.dtype.itemsize)

    def destinations(self) -> dict[str, Layout]:
        """Returns what each keeper receives, by the name of the tensor."""
        boxes: dict[str, dict[int, list[Box]]] = {}
        for (name, box), rank in self.keeper.items():
            boxes.setdefault(name, {}).setdefault(rank, []).append(box)
        return {name: Layout.from_boxes(each) for name, each in boxes.items()}

    def gone(self, lost: Collection[int]) -> list[Gone]:
        """Returns the boxes that live nowhere without these ranks: neither on holders nor on a keeper."""
        found = []
        for tile in self._tiles():
            had = [*tile.holders, *self._keepers(tile)]
            if all(rank in lost for rank in had):
                found.append(Gone(tile.name, tile.box, tuple(sorted(had))))
        return found

    def _keepers(self, tile: _Tile) -> list[int]:
        keeper = self.keeper.get((tile.name, tile.box))
        return [] if keeper is None else [keeper]

    def in_place_of(self, lost: Collection[int]) -> dict[str, dict[int, list[Box]]]:
        """Returns the boxes that living keepers give where all holders are lost, by name and rank."""
        found: dict[str, dict[int, list[Box]]] = {}
        for tile in self._tiles():
            if all(rank in lost for rank in tile.holders):
                for keeper in self._keepers(tile):
                    if keeper not in lost:
                        found.setdefault(tile.name, {}).setdefault(keeper, []).append(tile.box)
        return found

    def layout(self, name: str, more: Mapping[int, list[Box]]) -> Layout:
        """Returns the layout of a tensor, with the boxes of keepers."""
        origin = self._origins[name]
        return with_boxes(origin.layout, origin.shape, more, name) if more else origin.layout


def box_views(
    layout: Layout, shape: tuple[int, ...], rank: int, local: torch.Tensor
) -> dict[Box, torch.Tensor]:
    """The boxes of a layout by boxes, as they lie in the local tensor of a rank."""
    found = {}
    for box, at, axes, _ in layout.pieces(shape)[rank][1]:
        sizes = extents(box)
        if axes:  # boxes one after the other, flat
            found[box] = local[at[0] : at[0] + math.prod(sizes)].view(sizes)
        else:
            found[box] = local[tuple(slice(lo, lo + size) for lo, size in zip(at, sizes, strict=True))]
    return found
