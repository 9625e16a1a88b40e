"""Meshes and DTensors for cases, made without communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from meshcast import Resharder, TensorSpec
from multiproc.oracle import coordinates, cut
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def quiet_mesh(ranks: Sequence) -> DeviceMesh:
    """A mesh without process groups of its own: any rank may build it, and many of them cost nothing. It
    cannot redistribute."""
    return DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False, _rank=dist.get_rank())


def sharded(
    full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], rank: int, *, strided: bool = False
) -> DTensor:
    """`full` on the mesh; on a rank outside, the shell that torch itself hands out. strided: a local tensor
    that is not contiguous."""
    place = coordinates(mesh.mesh).get(rank)
    if place is None:
        local = torch.empty(0, dtype=full.dtype)
    else:
        local = cut(full, mesh.mesh.shape, place, placements).clone()
        if strided:
            local = spread(local)
    return DTensor.from_local(
        local, mesh, list(placements), run_check=False, shape=full.shape, stride=full.stride()
    )


def resharder_between(
    source: TensorSpec | DTensor,
    destination: TensorSpec | DTensor,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Resharder:
    """A Resharder from one to the layout and dtype of the other."""
    mesh = destination.device_mesh if isinstance(destination, DTensor) else destination.mesh
    return Resharder(source, mesh, destination.placements, dtype=destination.dtype, group=group, **options)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with gaps in memory and the dimensions stored in reverse order."""
    reverse = tuple(reversed(range(tensor.ndim)))
    wide = torch.zeros([2 * size for size in reversed(tensor.shape)], dtype=tensor.dtype)
    view = wide[tuple(slice(None, None, 2) for _ in reverse)].permute(reverse)
    view.copy_(tensor)
    return view
