"""DTensor.redistribute over one mesh that holds both: as far as torch gets without cross-mesh resharding.

The parent mesh has one more dimension, whose first row is the source mesh and whose second is the
destination mesh. Along it the tensor is Partial, the destination's values being zero; redistribute to
Replicate then adds the zeros up on the other side, and the remaining dimensions change their placements on
the way. It needs meshes of one shape, either disjoint or identical.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshcast.layout import Layout

from ..cases import Case, Tensor
from ..groups import Groups
from ..move import CaseBatch
from .method import Method

_NAME = "DTensor parent mesh"


def redistribute(batch: CaseBatch) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    for move, mesh in zip(batch.moves, batch.kept[_NAME], strict=True):
        rank = dist.get_rank()
        if rank not in (*move.src.ranks, *move.dst.ranks):
            continue
        before, after = list(move.src.placements), list(move.dst.placements)
        local = move.source
        if local is None:
            twin = move.src.ranks[(move.src if rank in move.src.ranks else move.dst).ranks.index(rank)]
            local = torch.zeros(move.src.local_shapes(move.shape)[twin], dtype=torch.int32)
        if mesh.ndim > len(before):
            before, after = [Partial("sum"), *before], [Replicate(), *after]
        x = DTensor.from_local(
            local, mesh, before, run_check=False, shape=torch.Size(move.shape),
            stride=torch.empty(move.shape, device="meta").stride(),
        )  # fmt: skip
        y = x.redistribute(mesh, after).to_local()
        if move.destination is not None:
            move.destination.copy_(y)


def _cannot(case: Case) -> str:
    return next((why for tensor in case.tensors if (why := _cannot_move(tensor))), "")


def _cannot_move(tensor: Tensor) -> str:
    src, dst = tensor.src, tensor.dst
    if src.mesh_shape != dst.mesh_shape:
        return "needs meshes of one shape"
    if src.ranks != dst.ranks and set(src.ranks) & set(dst.ranks):
        return "needs disjoint or identical meshes"
    if not (_ascends(src) and _ascends(dst)):
        return "needs ranks in ascending order: torch sorts those of a group"
    return ""


def _ascends(layout: Layout) -> bool:
    mesh = torch.tensor(layout.ranks).view(layout.mesh_shape)
    return all(bool((mesh.diff(dim=dim) > 0).all()) for dim in range(mesh.ndim))


def _meshes(case: Case, groups: Groups) -> list[DeviceMesh]:
    """The parent mesh of each tensor, equal ones shared."""
    made: dict[object, DeviceMesh] = {}
    found = []
    for tensor in case.tensors:
        key = (tensor.src.ranks, tensor.dst.ranks, tensor.src.mesh_shape)
        if key not in made:
            sides = (tensor.src, tensor.dst)[: 1 if key[0] == key[1] else 2]
            meshes = [torch.tensor(layout.ranks).view(layout.mesh_shape).tolist() for layout in sides]
            made[key] = groups.mesh(meshes if len(meshes) > 1 else meshes[0])
        found.append(made[key])
    return found


METHODS = [
    Method(
        _NAME, redistribute,
        "DTensor.redistribute over a mesh that holds both, Partial across them; only for meshes of one shape",
        _cannot, _meshes, adds_up=True,
    )
]  # fmt: skip
