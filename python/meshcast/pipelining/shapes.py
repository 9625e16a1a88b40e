"""Shapes of the values that leave a stage, on each rank and as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard
from torch.utils._pytree import tree_flatten

from meshcast.errors import LayoutError
from meshcast.layout import Layout
from meshcast.pipelining.compat import mesh_layout

__all__ = [
    "LocalValue",
    "SentDTensor",
    "as_tuple",
    "describe_values",
    "global_shape",
    "local_values",
    "rows_of",
    "with_empty",
]


@dataclass(frozen=True, slots=True)
class SentDTensor:
    """The data from which a rank of another stage makes the DTensor of its local part. There its mesh has
    other ranks, but the same names of dimensions and the same layout (`compat.mesh_layout`)."""

    placements: tuple[Placement, ...]
    shape: tuple[int, ...]  # of the whole
    names: tuple[str, ...]
    layout: tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class LocalValue:
    """One output of one micro-batch on one rank. placements, sent: of a DTensor, else None."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    placements: tuple[Placement, ...] | None = None
    sent: SentDTensor | None = None


def as_tuple(values: Any, what: str) -> tuple[torch.Tensor, ...]:
    """The tensors of an output. Raises LayoutError unless it is a tensor or a sequence of tensors."""
    found = (
        (values,)
        if isinstance(values, torch.Tensor)
        else tuple(values)
        if isinstance(values, (tuple, list))
        else ()
    )
    if not found or not all(isinstance(value, torch.Tensor) for value in found):
        kinds = [type(value).__name__ for value in found] or type(values).__name__
        raise LayoutError(f"{what}: values that leave a stage must be tensors, found {kinds}")
    return found


def local_values(value: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor or plain tensor, its values in memory: a functional collective (there are
    some inside tensor-parallel modules) returns a stand-in that has none until it is waited for."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def rows_of(values: Sequence[Any]) -> int | None:
    """Samples that the first tensor has here."""
    for value in tree_flatten(values)[0]:
        if isinstance(value, torch.Tensor) and value.dim():
            return int(local_values(value).shape[0])
    return None


def describe_values(values: Sequence[torch.Tensor], with_grad: bool) -> list[LocalValue]:
    """Local shapes of tensors or DTensors."""
    described = []
    for value in values:
        placements = sent = None
        local = value
        if isinstance(value, DTensor):
            placements, local = tuple(value.placements), value.to_local()
            names = tuple(value.device_mesh.mesh_dim_names or ())
            sent = SentDTensor(placements, tuple(value.shape), names, mesh_layout(value.device_mesh))
        described.append(
            LocalValue(tuple(local.shape), value.dtype, with_grad and value.requires_grad, placements, sent)
        )
    return described


def global_shape(layout: Layout, local: Mapping[int, Sequence[int]], what: str) -> tuple[int, ...]:
    """The global shape of a value from the local shape on each rank of its mesh.

    Raises LayoutError if no shape laid out this way has these shards, naming the rank whose shard differs.
    """
    dims = {len(shape) for shape in local.values()}
    if len(dims) != 1:
        raise LayoutError(f"{what}: its ranks have tensors of different dimensions: {dict(local)}")
    ndim = dims.pop()
    sharding: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(layout.placements):
        if isinstance(placement, (Shard, _StridedShard)):
            if not -ndim <= placement.dim < ndim:
                raise LayoutError(
                    f"{what}: {placement} does not fit a tensor of {ndim} dimensions; its local "
                    f"shape is {local}"
                )
            sharding.setdefault(placement.dim % ndim, []).append(mesh_dim)
    ranks = torch.tensor(layout.ranks).reshape(layout.mesh_shape)
    shape = []
    for dim in range(ndim):
        along = ranks[
            tuple(slice(None) if axis in sharding.get(dim, ()) else 0 for axis in range(ranks.dim()))
        ]
        shape.append(sum(local[int(rank)][dim] for rank in along.reshape(-1)))
    for rank, expected in layout.local_shapes(shape).items():
        if tuple(local[rank]) != tuple(expected):
            raise LayoutError(
                f"{what}: the module's output does not match its layout {layout}: rank {rank} has a "
                f"local shape of {tuple(local[rank])}, "
                f"a tensor of shape {tuple(shape)} would have {tuple(expected)} there (uneven sizes "
                "follow torch.chunk). "
                "Check output_placements, leave the batch dimension unflattened, or, where ranks have "
                "different numbers of rows, pad them and send their counts as another output "
                '(docs/pipelining.md, "Outputs of different sizes")',
                rank=rank,
            )
    return tuple(shape)


def with_empty(
    known: Mapping[int, Sequence[int]], layout: Layout, data_dims: Sequence[int]
) -> dict[int, Sequence[int]]:
    """Local shapes of a value on all ranks, given those of the ranks that have samples.

    A rank that has none has the shape of one that differs from it in the data-parallel dimensions only, with
    no rows where the value is split by samples.
    """
    if len(known) == len(layout.ranks):
        return dict(known)
    ranks = torch.tensor(layout.ranks).reshape(layout.mesh_shape)
    by_samples = any(layout.placements[dim] == Shard(0) for dim in data_dims)
    found: dict[int, Sequence[int]] = {}
    for rank in layout.ranks:
        if rank in known:
            found[rank] = known[rank]
            continue
        place = (ranks == rank).nonzero()[0].tolist()
        alike = ranks[tuple(slice(None) if dim in data_dims else at for dim, at in enumerate(place))]
        like = next((int(each) for each in alike.flatten() if int(each) in known), next(iter(known)))
        found[rank] = [0, *known[like][1:]] if by_samples else known[like]
    return found
