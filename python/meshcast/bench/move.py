"""The input of a method: one rank's part of a case, and the groups that torch's collectives need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from ..layout import Layout
from ..topology import Topology


class Groups:
    """Every call is collective over the whole job, also on ranks outside the group."""

    def __init__(self) -> None:
        self._made: list[dist.ProcessGroup] = []

    def new(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        group = dist.new_group(sorted(ranks), backend=backend)
        if dist.get_rank() in ranks:
            self._made.append(group)
        return group

    def mesh(self, ranks: Any) -> DeviceMesh:
        """A mesh of these ranks (a nested list), usable on ranks outside it as well."""
        mesh = DeviceMesh("cpu", torch.tensor(ranks))
        if mesh.get_coordinate() is not None:
            self._made += [mesh.get_group(dim) for dim in range(mesh.ndim)]
        return mesh

    def mesh_of(self, layout: Layout) -> DeviceMesh:
        return self.mesh(torch.tensor(layout.ranks).view(layout.mesh_shape).tolist())

    def close(self) -> None:
        """Each of the groups; not the job's own, which a mesh of all ranks may have taken."""
        for group in dict.fromkeys(self._made):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        self._made.clear()
        # DTensor remembers how it redistributed, and with it meshes and their groups, whose threads look for
        # messages 100 times a second: after some cases they would take the cores from those that follow.
        redistribution = sys.modules.get("torch.distributed.tensor._redistribute")
        if redistribution is not None:
            redistribution._gen_transform_infos.cache_clear()
            redistribution.clear_redistribute_planner_cache()


Box = tuple[tuple[int, int], ...]
Slices = tuple[slice, ...]


@dataclass
class CaseMove:
    """One rank's part of one tensor."""

    shape: tuple[int, ...]
    src: Layout
    dst: Layout
    source: torch.Tensor | None = None  # local shards
    destination: torch.Tensor | None = None
    dtype: torch.dtype = torch.int32
    replicas: dict[Box, dist.ProcessGroup | None] = field(default_factory=dict)  # of the destination's tiles
    source_mesh: DeviceMesh | None = None  # under a Partial source only
    destination_mesh: DeviceMesh | None = None  # likewise
    held: dict[int, Box] = field(init=False)  # by rank; one box each, ranks with an empty shard left out
    needed: dict[int, Box] = field(init=False)

    def __post_init__(self) -> None:
        self.held = {r: boxes[0] for r, boxes in self.src.shards(self.shape).items() if boxes}
        self.needed = {r: boxes[0] for r, boxes in self.dst.shards(self.shape).items() if boxes}

    @cached_property
    def tiles(self) -> dict[Box, list[int]]:
        """Distinct source shards with their holders."""
        return by_box(self.held)

    @cached_property
    def wanted(self) -> dict[Box, list[int]]:
        """Distinct destination shards with the ranks that need them, ascending."""
        return by_box(self.needed)

    @cached_property
    def summed(self) -> Layout:
        """The source's layout once add_up has run."""
        if not self.src.has_partial:
            return self.src
        mesh = torch.tensor(self.src.ranks).view(self.src.mesh_shape)
        return Layout(mesh, [Replicate() if p.is_partial() else p for p in self.src.placements])

    def add_up(self) -> None:
        """Replaces the pending values of a Partial source by their sums, as torch does: all_reduce."""
        if self.source is None or self.source_mesh is None:
            return
        for dim, placement in enumerate(self.src.placements):
            if placement.is_partial():
                dist.all_reduce(self.source, group=self.source_mesh.get_group(dim))

    def cut(self, box: Box) -> torch.Tensor:
        """A view of the local source."""
        assert self.source is not None
        return self.source[slices(box, self.held[dist.get_rank()])]

    def place(self, box: Box) -> torch.Tensor:
        """A view of the local destination."""
        assert self.destination is not None
        return self.destination[slices(box, self.needed[dist.get_rank()])]

    def put(self, box: Box, data: torch.Tensor) -> None:
        """Writes a box of the tensor into the local destination."""
        self.place(box).copy_(data.view(extent(box)))


@dataclass
class CaseBatch:
    """All tensors of a case on one rank."""

    moves: list[CaseMove]
    topology: Topology
    group: dist.ProcessGroup  # of all ranks of either mesh
    kept: dict[str, Any] = field(default_factory=dict)  # what a method sets up in its first round

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]


def by_box(boxes: dict[int, Box]) -> dict[Box, list[int]]:
    found: dict[Box, list[int]] = {}
    for rank in sorted(boxes):
        found.setdefault(boxes[rank], []).append(rank)
    return found


def slices(box: Box, base: Box) -> Slices:
    """Returns the slices of `box` in a local tensor that holds `base`."""
    return tuple(slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(box, base, strict=True))


def intersection(a: Box, b: Box) -> Box | None:
    box = tuple((max(x, u), min(y, v)) for (x, y), (u, v) in zip(a, b, strict=True))
    return box if all(lo < hi for lo, hi in box) else None


def extent(box: Box) -> tuple[int, ...]:
    return tuple(hi - lo for lo, hi in box)


def elements(box: Box) -> int:
    return prod(extent(box))


def cuts(box: Box, parts: int) -> list[Box]:
    """The box in at most `parts` pieces of nearly equal size, along its longest dimension."""
    dim = max(range(len(box)), key=lambda d: box[d][1] - box[d][0])
    lo, hi = box[dim]
    parts = min(parts, hi - lo)
    edges = [lo + (hi - lo) * part // parts for part in range(parts + 1)]
    return [(*box[:dim], (a, b), *box[dim + 1 :]) for a, b in pairwise(edges)]


def turns(holders: Sequence[int], receiver: int, turn: int) -> int:
    """Returns the rank that sends to `receiver` where holders take turns: itself if it holds the data."""
    return receiver if receiver in holders else holders[(receiver + turn) % len(holders)]
