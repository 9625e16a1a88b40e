"""Sub-meshes of one mesh: the ranks of each have their own, and together they hold copies of a tensor.

FSDP2 beside tensor parallelism leaves norms and embeddings on mesh["dp"]: every column of the mesh has a
tensor of that name on a sub-mesh of its own. What the columns hold is one tensor, a copy in each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..errors import LayoutError
from ..layout import Layout

__all__ = ["Family", "family_of", "joined", "on_whole_mesh", "ranks_then"]

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
    if family is None or not _one_stage(family, ranks):
        return None
    layouts.sort(key=lambda layout: layout.ranks)
    mesh = torch.tensor([layout.ranks for layout in layouts]).reshape(-1, *first.mesh_shape)
    return Layout(mesh, (Replicate(), *first.placements))


def _one_stage(family: Family, ranks: Sequence[int]) -> bool:
    """Whether all of the ranks are of one slice along the dimensions of stages."""
    _, names, shape, all_ranks = family
    stages = [dim for dim, name in enumerate(names) if name.startswith(_STAGES)]
    place = torch.tensor(all_ranks).reshape(shape)
    found = {
        tuple(int(at[dim]) for dim in stages) for at in (torch.isin(place, torch.tensor(ranks))).nonzero()
    }
    return len(found) == 1


def on_whole_mesh(x: DTensor, destination: DeviceMesh, lost: Collection[int] = ()) -> DTensor:
    """x as a DTensor on the mesh that its own is a part of, with copies along the dimensions left out; the
    same on all ranks. x itself where its mesh is no part of another.

    That all slices hold the same is assumed where they are all called: the destination has a rank outside of
    the whole mesh, or every rank of it that is not lost. Slices along a dimension named "pp" never do: the
    whole mesh is then that of a stage.
    """
    mesh = x.device_mesh
    root = getattr(mesh, "_root_mesh", None)
    if root is None or root.mesh.numel() == mesh.mesh.numel():
        return x
    names, all_names = mesh.mesh_dim_names, root.mesh_dim_names
    if not names or not all_names or tuple(name for name in all_names if name in names) != tuple(names):
        return x  # a dimension that was flattened, or dimensions in another order
    all_names = tuple(name for name in all_names if name in names or not name.startswith(_STAGES))
    if all_names == tuple(names):
        return x
    if len(all_names) < root.ndim:
        root = root[all_names]
    if set(destination.mesh.flatten().tolist()) < set(root.mesh.flatten().tolist()).difference(lost):
        return x
    own = dict(zip(names, x.placements, strict=True))
    placements = [own.get(name, Replicate()) for name in all_names]
    return DTensor.from_local(
        x.to_local(), root, placements, run_check=False, shape=x.shape, stride=x.stride()
    )
