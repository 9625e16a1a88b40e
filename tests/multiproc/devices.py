"""DTensors on meshes of CPUs and of GPUs, made without communication. DEVICE=cpu puts all of them on the CPU,
where there is none: that checks the cases that use them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from multiproc.oracle import coordinates, cut
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

GPU = os.environ.get("DEVICE", "cuda")


def gpus(most: int = 7) -> int:
    """Ranks of a test that has one for each GPU; on the CPU three stand for them."""
    return min(torch.cuda.device_count() if GPU == "cuda" else 3, most)


def use_a_gpu(rank: int) -> None:
    """The ranks share the GPUs there are."""
    if GPU == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())


def mesh_on(device: str, ranks: object, rank: int) -> DeviceMesh:
    return DeviceMesh(device, torch.tensor(ranks), _init_backend=False, _rank=rank)


def given(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], rank: int) -> DTensor:
    """`full` on the mesh; a shell on a rank outside."""
    place = coordinates(mesh.mesh).get(rank)
    local = (
        torch.empty((0,) * full.ndim, dtype=full.dtype)
        if place is None
        else cut(full, mesh.mesh.shape, place, placements)
    )
    return DTensor.from_local(
        local.clone().to(mesh.device_type),
        mesh,
        list(placements),
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def check(
    result: DTensor, full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], rank: int
) -> None:
    place = coordinates(mesh.mesh).get(rank)
    if place is not None:
        local = result.to_local()
        assert local.device.type == mesh.device_type
        assert torch.equal(local.cpu(), cut(full, mesh.mesh.shape, place, placements))
