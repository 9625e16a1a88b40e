"""Meshes of a call: sub-meshes that together hold copies, and ranks that are lost."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ..base import checks
from ..base.boxes import block_box, box_text, without
from ..base.wire import once
from ..errors import LayoutError
from ..layout import Box, Layout, on_ranks

__all__ = [
    "Destination",
    "Source",
    "positive_placements",
    "Family",
    "Gone",
    "Slices",
    "check_lost",
    "check_not_wanted",
    "everywhere",
    "family_of",
    "gone",
    "joined",
    "living",
    "lost_ranks",
    "raise_gone",
    "ranks_text",
    "ranks_then",
    "renumbered",
    "scales_layout",
    "separate",
    "slices_called",
    "survivors",
]

Slices = tuple[tuple[int, ...], ...]
"""The ranks of slices of one mesh, each row-major. An empty one stands for a mesh that is by itself."""


@once
class Family(NamedTuple):
    """Properties that sub-meshes of one mesh share: the names of their dimensions; names of dimensions, shape
    and ranks of the mesh that they are parts of."""

    names: tuple[str, ...]
    all_names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __hash__(self) -> int:
        return hash((self.names, self.shape, self.ranks[:2]))  # of thousands of ranks it takes long


# Dimensions along which ranks hold different tensors, by the names that torch's own programs give them.
_STAGES = "pp"

Key = TypeVar("Key")


def family_of(mesh: DeviceMesh) -> Family | None:
    """None for a mesh that is no part of another."""
    root = getattr(mesh, "_root_mesh", None)
    if root is None or root.size() == mesh.size():
        return None
    names, all_names = tuple(mesh.mesh_dim_names or ()), tuple(root.mesh_dim_names or ())
    return Family(names, all_names, tuple(root.mesh.shape), tuple(root.mesh.flatten().tolist()))


def ranks_then(mesh: DeviceMesh, rank: int | None) -> torch.Tensor:
    """The ranks of a mesh by the numbers that it was made with, whatever the process group is now: a mesh
    finds out which slice of its parent it is by the rank that this process has. rank: that this process had
    then, None where it was not there."""
    slices = mesh._layout.remap_to_tensor(mesh._rank_map)
    if slices.size(0) == 1:
        return slices[0]
    own = (slices == (-1 if rank is None else rank)).nonzero()
    if not own.size(0):
        raise LayoutError(
            f"the mesh {mesh} is a slice of another, and this process was in none of the slices "
            f"{slices.tolist()}"
        )
    return slices[own[0, 0]]


def joined(said: Mapping[Key, tuple[Layout, Family | None]]) -> Layout | None:
    """The one layout of a tensor that several say, each its own: the same, or those of sub-meshes of one
    mesh, which hold copies of each other. None where they contradict each other."""
    each: dict[Layout, Family | None] = dict(said.values())
    layouts = list(each)
    if len(layouts) == 1:
        return layouts[0]
    first = layouts[0]
    families = set(each.values())
    ranks = [rank for layout in layouts for rank in layout.ranks]
    alike = all(
        layout._placements == first._placements
        and layout.mesh_shape == first.mesh_shape
        and not layout.by_boxes
        for layout in layouts
    )
    if len(families) > 1 or not alike or len(set(ranks)) < len(ranks):
        return None
    (family,) = families
    if family is None:
        return None
    _, names, shape, all_ranks = family
    stage = _stages(names, shape, all_ranks)
    if len({frozenset(map(stage.get, layout.ranks)) for layout in layouts}) > 1:
        return None
    layouts.sort(key=lambda layout: layout.ranks)
    mesh = torch.tensor([layout.ranks for layout in layouts]).reshape(-1, *first.mesh_shape)
    return Layout(mesh, (Replicate(), *first.placements))


def separate(said: Mapping[Key, tuple[Layout, Family | None]]) -> list[Layout]:
    """The layouts of a tensor that ranks of several meshes hold, such as the stages of a pipeline: one for
    each mesh, slices joined. None at all where meshes share ranks, or values are partial."""
    groups: dict[object, dict[Key, tuple[Layout, Family | None]]] = {}
    for key, (layout, family) in said.items():
        of: object = layout
        if family is not None:
            _, names, shape, ranks = family
            stage = _stages(names, shape, ranks)
            of = family, layout.mesh_shape, layout._placements, frozenset(map(stage.get, layout.ranks))
        groups.setdefault(of, {})[key] = layout, family
    found = [layout for layout in map(joined, groups.values()) if layout is not None]
    every = [rank for layout in found for rank in layout.ranks]
    clear = len(found) == len(groups) and len(set(every)) == len(every)
    return found if clear and not any(layout.has_partial for layout in found) else []


def _stages(names: Sequence[str], shape: Sequence[int], ranks: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """{rank: where it is along the dimensions of stages} for the ranks of a mesh, row-major."""
    dims = [dim for dim, name in enumerate(names) if name.startswith(_STAGES)]
    places = itertools.product(*map(range, shape))
    return {rank: tuple(at[dim] for dim in dims) for rank, at in zip(ranks, places, strict=True)}


def _slices_of(mesh: DeviceMesh) -> Slices:
    """The slices that hold copies of what is on this one, itself included: along all dimensions that it
    leaves out, by name or in one that was flattened, but those of stages."""
    own = tuple(mesh.mesh.flatten().tolist())
    root = getattr(mesh, "_root_mesh", None)
    if root is None or root.size() == mesh.size():
        return (own,)
    slices = map(tuple, mesh._layout.remap_to_tensor(mesh._rank_map).flatten(1).tolist())
    stage = _stages(root.mesh_dim_names or (), tuple(root.mesh.shape), root.mesh.flatten().tolist())
    stages = {stage[rank] for rank in own}
    return tuple(ranks for ranks in slices if {stage[rank] for rank in ranks} == stages)


def slices_called(
    source: DeviceMesh, destination: DeviceMesh, lost: Collection[int] = ()
) -> tuple[Slices, Slices]:
    """The slices of both meshes whose ranks make a call together; the same on all of these ranks.

    Of two slices of the same ranks, those are in a call that lead from one to the other by ranks that they
    share. Else all slices of a mesh are, unless the other mesh lies inside of one of them and leaves out
    ranks that are not lost: then the call is that of the slice alone.
    """
    slices = _slices_of(source), _slices_of(destination)
    ranks = [{rank for each in side for rank in each} for side in slices]
    own = [tuple(mesh.mesh.flatten().tolist()) for mesh in (source, destination)]
    if ranks[0] == ranks[1]:
        met = {*own[0], *own[1]}
        while True:
            more = {rank for each in (*slices[0], *slices[1]) if not met.isdisjoint(each) for rank in each}
            if more <= met:
                break
            met |= more
        first, second = (tuple(each for each in side if each[0] in met) for side in slices)
        return first, second
    first, second = (
        (own[at],)
        if ranks[1 - at] < ranks[at].difference(lost)
        and any(ranks[1 - at] <= set(each) for each in slices[at])
        else slices[at]
        for at in (0, 1)
    )
    return first, second


def everywhere(layout: Layout, slices: Slices = ()) -> Layout:
    """A layout of one slice as that of all of them, and in the one form that layouts share under which the
    same ranks hold copies of each other: along the last dimension of the mesh, ascending."""
    if layout.by_boxes:
        return layout
    ranks = torch.tensor(slices if len(slices) > 1 else layout.ranks).reshape(-1, *layout.mesh_shape)
    placements = layout.placements
    cut = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if len(cut) == len(placements) and ranks.size(0) == 1:
        return layout
    mesh = ranks.movedim([dim + 1 for dim in cut], list(range(len(cut))))
    mesh = mesh.flatten(len(cut)).sort(dim=-1).values
    return Layout(mesh, [*(placements[dim] for dim in cut), Replicate()])


_MAX_RANK = (1 << 31) - 1
_SHOWN = 20  # boxes that a message lists; the error has all of them


class Gone(NamedTuple):
    """A box that no rank holds any longer. ranks: those that had it."""

    name: str
    box: Box
    ranks: tuple[int, ...]


def lost_ranks(lost: Any, rank: int | None = None) -> tuple[int, ...]:
    """The argument `lost`, ascending and each rank once. Raises LayoutError for what are no ranks, and for
    the rank that calls."""
    listed = checks.listed("lost", lost)
    found = tuple(sorted({checks.integer("lost rank", each, 0, _MAX_RANK) for each in listed}))
    if rank is not None:
        check_lost(found, rank)
    return found


def check_lost(lost: Collection[int], rank: int) -> None:
    """Raises LayoutError on a rank that is called lost."""
    if rank in lost:
        raise LayoutError(
            f"rank {rank} is named in lost= and yet makes the call; leave it out of lost=, or the call out "
            "on it"
        )


def living(
    sources: Sequence[Source], destinations: Sequence[Destination], lost: Sequence[int]
) -> list[Source]:
    """The sources as ranks hold them that are not lost. Raises LayoutError where a lost rank is in no source
    or in a destination, where a gradient is asked for, and where a box lives nowhere any longer."""
    layouts = [
        everywhere(source.layout, destination.slices[0])
        for source, destination in zip(sources, destinations, strict=True)
    ]
    in_sources = {rank for layout in layouts for rank in layout.ranks}
    never = [rank for rank in lost if rank not in in_sources]
    if never:
        raise LayoutError(
            f"lost= names {ranks_text(never)}, not in {_layouts_text(layouts)}; name ranks that held a part "
            "of the source"
        )
    names = {number: number for number in lost}
    found, missing = [], []
    for index, (source, layout, destination) in enumerate(zip(sources, layouts, destinations, strict=True)):
        name = "x" if len(sources) == 1 else f"xs[{index}]"
        wanted = destination.wanted
        check_not_wanted(name, wanted, names)
        if source.needs_grad:
            raise LayoutError(
                f"{name} requires a gradient, which could not travel back to ranks that are lost; call it "
                "under torch.no_grad()"
            )
        left = survivors(layout, source.shape, lost, name)
        if left is not layout:
            missing += gone(name, source.shape, layout, names, wanted)
            source = replace(source, layout=left or _nothing(wanted, len(source.shape)))
        found.append(source)
    raise_gone(missing)
    return found


def check_not_wanted(name: str, wanted: Layout, lost: Mapping[int, int]) -> None:
    """Raises LayoutError where a lost rank is to receive. lost: as for gone()."""
    both = [lost[number] for number in wanted.ranks if number in lost]
    if both:
        raise LayoutError(
            f"{ranks_text(both)} is lost, and yet in the destination of {name!r}, {wanted}; choose a mesh of "
            "ranks that live"
        )


def _nothing(wanted: Layout, ndim: int) -> Layout:
    """The source of a tensor without elements that no rank holds any longer."""
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


def raise_gone(found: Sequence[Gone]) -> None:
    """Raises LayoutError that lists what lives on no rank."""
    if not found:
        return
    text = "; ".join(
        f"{each.name!r} {box_text(each.box)} of {ranks_text(each.ranks)}" for each in found[:_SHOWN]
    )
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise LayoutError(
        f"{len(found)} {'boxes are' if len(found) > 1 else 'box is'} on no live rank: {text}{more}. "
        "Load these from a checkpoint; the field `gone` of this error lists all of them",
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
            f"{what}: {layout} has {ranks_text(without)}, for which ranks= gives no new rank; name "
            "lost ranks in lost="
        )
    return on_ranks(layout, [numbers[rank] for rank in layout.ranks])


@dataclass(frozen=True)
class Source:
    """A source as every rank knows it, from a DTensor or a spec. A rank outside may know its layout only:
    mesh is then None, and no gradient is possible. device_type: of the mesh. reduce_first: partial values are
    reduced inside the mesh, so that each rank sees what it sends."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    mesh: DeviceMesh | None
    needs_grad: bool = False
    reduce_first: bool = False
    device_type: str = "cpu"

    @property
    def reduced_on_the_way(self) -> bool:
        """``True`` where the transfer itself reduces the partial values. Plans know one operation; a source
        that mixes several is reduced inside its mesh first."""
        return len(self.layout.reduce_ops) == 1 and not self.reduce_first


@dataclass(frozen=True)
class Destination:
    """The destination of a tensor: its layout on `mesh`, that in which its gradient travels back, its type,
    and the slices of the source mesh and of `mesh` that the call has."""

    mesh: DeviceMesh
    layout: Layout
    gradient: Layout
    dtype: torch.dtype
    slices: tuple[Slices, Slices]

    @property
    def wanted(self) -> Layout:
        """The layout on all slices."""
        return everywhere(self.layout, self.slices[1])


def positive_placements(placements: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    """Shard(-1) as Shard(ndim - 1): equal layouts must look equal to the cache on every rank."""
    return tuple(_positive(p, ndim) for p in placements)


def _positive(placement: Placement, ndim: int) -> Placement:
    if isinstance(placement, Shard | _StridedShard) and -ndim <= placement.dim < 0:
        if isinstance(placement, _StridedShard):
            return _StridedShard(placement.dim + ndim, split_factor=placement.split_factor)
        return Shard(placement.dim + ndim)
    return placement


@lru_cache(maxsize=256)
def scales_layout(layout: Layout, shape: tuple[int, ...], block: tuple[int, ...]) -> Layout:
    """Returns where the scales of a tensor lie whose values lie under `layout`: on each rank those of the
    blocks that it has a part of. Under the same placements, with Replicate for Shard along dimensions in
    which blocks are cut, or where scales would not be sharded as values are. shape, block: of the values, as
    they are stored. Raises LayoutError where two boxes of one rank share a block."""
    scales = tuple(-(-size // by) for size, by in zip(shape, block, strict=True))
    needed = {rank: [block_box(box, block) for box in boxes] for rank, boxes in layout.shards(shape).items()}
    if layout.by_boxes:
        return Layout.from_boxes(needed)
    placements = list(layout.placements)
    mesh = torch.tensor(layout.ranks).reshape(layout.mesh_shape)
    ndim = len(shape)
    sharded = sorted({dim % ndim for kind, dim, *_ in layout._placements if "shard" in kind})
    for dims in [(), *((dim,) for dim in sharded), tuple(sharded)]:
        chosen = [
            Replicate() if "shard" in kind and dim % ndim in dims else placement
            for placement, (kind, dim, *_) in zip(placements, layout._placements, strict=True)
        ]
        found = Layout(mesh, chosen)
        has = found.shards(scales)
        if all(not without(box, has[rank]) for rank, boxes in needed.items() for box in boxes):
            break
    return found
