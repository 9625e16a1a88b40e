"""Sums the parameters' gradients over the data-parallel ranks of a stage.

Every rank scales its loss by its share of the samples, so the gradient of the global mean is the *sum* over
ranks, not the average: with averages, stages of unlike data-parallel degree would scale the gradients that
cross between them by the ratio of their degrees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

__all__ = ["sum_gradients"]

_BUCKET_BYTES = 32 << 20  # gradients travel together up to this size: fewer messages, bounded extra memory


def sum_gradients(parameters: Sequence[torch.nn.Parameter], mesh: DeviceMesh, dims: Sequence[int]) -> None:
    """All-reduces each ``grad`` over the given dimensions of ``mesh``, called by all ranks of the mesh.

    A parameter that has a gradient on some ranks only gets it on all; one that has none anywhere keeps None.
    A DTensor parameter is reduced over those of the dimensions that its own mesh does not have, and a pending
    reduction inside its mesh is carried out.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = {dim: mesh.get_group(dim) for dim in dims if mesh.size(dim) > 1}
    if not trained or not groups:
        return
    _complete(trained, list(groups.values()))
    by_kind: dict[tuple[tuple[int, ...], torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in trained:
        if parameter.grad is None:
            continue
        local, over = _local_gradient(parameter, mesh, tuple(groups))
        if over and local.numel():
            by_kind.setdefault((over, local.dtype, local.device), []).append(local)
    for (over, _, _), gradients in by_kind.items():
        for bucket in _buckets(gradients):
            _sum_bucket(bucket, [groups[dim] for dim in over])


def _complete(parameters: Sequence[torch.nn.Parameter], groups: Sequence[dist.ProcessGroup]) -> None:
    """Gives zeros to a parameter that only other ranks have a gradient of, so that all ranks reduce the same
    tensors."""
    have = torch.tensor(
        [parameter.grad is not None for parameter in parameters],
        dtype=torch.int32,
        device=parameters[0].device,
    )
    for group in groups:
        dist.all_reduce(have, op=dist.ReduceOp.MAX, group=group)
    for parameter, anywhere in zip(parameters, have.tolist(), strict=True):
        if anywhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _local_gradient(
    parameter: torch.nn.Parameter, mesh: DeviceMesh, dims: tuple[int, ...]
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The local tensor of the gradient, and the dimensions over which it is still to be summed."""
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient, dims
    assert isinstance(parameter.data, DTensor)
    if gradient.placements != parameter.data.placements:
        gradient = parameter.grad = gradient.redistribute(placements=parameter.data.placements)
    own = set(gradient.device_mesh.mesh_dim_names or ())
    names = mesh.mesh_dim_names
    if (
        names is None
    ):  # without names a parameter's mesh cannot be a part of the stage's mesh: it is the whole
        return gradient.to_local(), ()
    return gradient.to_local(), tuple(dim for dim in dims if names[dim] not in own)


def _buckets(gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = [[]]
    size = 0
    for gradient in gradients:
        if buckets[-1] and size + gradient.nbytes > _BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += gradient.nbytes
    return buckets


def _sum_bucket(bucket: Sequence[torch.Tensor], groups: Sequence[dist.ProcessGroup]) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    for group in groups:
        dist.all_reduce(flat, group=group)
    for gradient, summed in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
        gradient.copy_(summed.view(gradient.shape))
