"""Sums the parameters' gradients over the data-parallel ranks of a stage.

Every rank scales its loss by its share of the samples, so the gradient of the global mean is the *sum* over
ranks, not the average: with averages, stages of unlike data-parallel degree would scale the gradients that
cross between them by the ratio of their degrees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshcast.pipelining.layouts import StageMesh

__all__ = ["average_gradients", "kept_apart", "sum_gradients"]

_BUCKET_BYTES = 32 << 20  # gradients travel together up to this size: fewer messages, bounded extra memory


def sum_gradients(parameters: Sequence[torch.nn.Parameter], mesh: StageMesh, dims: Sequence[int]) -> None:
    """All-reduces each ``grad`` over the given dimensions of the stage's mesh, called by all its ranks.

    A parameter that has a gradient on some ranks only gets it on all; one that has none anywhere keeps None.
    A DTensor parameter is reduced over those of the dimensions that its own mesh does not span, and a pending
    reduction inside its mesh is carried out.
    """
    groups = {dim: mesh.device_mesh.get_group(dim) for dim in dims if mesh.shape[dim] > 1}
    _reduce(parameters, groups, lambda parameter: _not_spanned(parameter, mesh, tuple(groups)))


def average_gradients(parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Each ``grad`` becomes the mean over a group whose ranks hold the same parameters."""
    _reduce(parameters, {0: group}, lambda _: (0,))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(group.size())


@contextmanager
def kept_apart(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Inside, parameters have no gradients of earlier steps; afterwards these are added again."""
    earlier = {
        id(parameter): (parameter, parameter.grad)
        for module in modules
        for parameter in module.parameters()
        if parameter.grad is not None
    }
    for parameter, _ in earlier.values():
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in earlier.values():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def _reduce(
    parameters: Sequence[torch.nn.Parameter], groups: dict[int, dist.ProcessGroup], dims_of: Any
) -> None:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or not groups:
        return
    _complete(trained, list(groups.values()))
    by_kind: dict[tuple[tuple[int, ...], torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in trained:
        if parameter.grad is None:
            continue
        local, over = _local_gradient(parameter), dims_of(parameter)
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


def _local_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter.data, DTensor)
    if gradient.placements != parameter.data.placements:
        gradient = parameter.grad = gradient.redistribute(placements=parameter.data.placements)
    return gradient.to_local()


def _not_spanned(parameter: torch.nn.Parameter, mesh: StageMesh, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Of the dimensions those that the parameter's own mesh does not span. Meshes are told apart by their
    ranks: names are the user's, and need not be there."""
    if not isinstance(parameter.data, DTensor):
        return dims
    own = set(parameter.data.device_mesh.mesh.flatten().tolist())
    return tuple(dim for dim in dims if not own.issuperset(mesh.along([dim])))


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
