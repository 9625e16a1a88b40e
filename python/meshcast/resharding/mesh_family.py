"""Sub-meshes of one mesh: the ranks of each have their own, and together they hold copies of a tensor.

FSDP2 beside tensor parallelism leaves norms and embeddings on mesh["dp"]: every column of the mesh has a
tensor of that name on a sub-mesh of its own. What the columns hold is one tensor, a copy in each.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from ..errors import LayoutError
from ..layout import Layout

__all__ = ["Family", "Slices", "everywhere", "family_of", "joined", "ranks_then", "separate", "slices_called"]

Slices = tuple[tuple[int, ...], ...]
"""The ranks of slices of one mesh, each row-major. An empty one stands for a mesh that is by itself."""

Family = tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...], tuple[int, ...]]
"""What sub-meshes that belong together have in common: the names of their dimensions; names of dimensions,
shape and ranks of the mesh that they are parts of."""

# Dimensions along which ranks hold unlike tensors, by the names that torch's own programs give them.
_STAGES = "pp"

Key = TypeVar("Key")


def family_of(mesh: DeviceMesh) -> Family | None:
    """None for a mesh that is no part of another."""
    root = getattr(mesh, "_root_mesh", None)
    if root is None or root.size() == mesh.size():
        return None
    names, all_names = tuple(mesh.mesh_dim_names or ()), tuple(root.mesh_dim_names or ())
    return names, all_names, tuple(root.mesh.shape), tuple(root.mesh.flatten().tolist())


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
