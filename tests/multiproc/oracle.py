"""The plain-PyTorch oracle: cut a tensor into shards with torch.chunk, put it together again, and nothing of
meshcast."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def cut(
    full: torch.Tensor, mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> torch.Tensor:
    """The part of `full` that belongs to a mesh coordinate: mesh dimensions left to right, each cut by
    torch.chunk. Partial and Replicate hold everything. What _StridedShard holds, torch's own says."""
    part = full
    for size, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, _StridedShard):
            part = placement._split_tensor(part, size, with_padding=False)[0][index]
        elif isinstance(placement, Shard):
            pieces = torch.chunk(part, size, placement.dim)
            part = (
                pieces[index]
                if index < len(pieces)
                else part.narrow(placement.dim, part.shape[placement.dim], 0)
            )
    return part


def coordinates(mesh: torch.Tensor) -> dict[int, tuple[int, ...]]:
    """{global rank: coordinate}"""
    return {int(mesh[c]): c for c in itertools.product(*(range(n) for n in mesh.shape))}


def gather_full(
    local: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    mesh: torch.Tensor,
    placements: Sequence[Placement],
) -> torch.Tensor:
    """The global value, from the shards of all ranks of the default group (None outside the mesh). Every
    element must be covered; replicas must agree; Partial('sum') values are added up over their mesh
    dimensions."""
    shards: list[torch.Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, None if local is None else local.contiguous())
    index = torch.arange(torch.Size(shape).numel()).reshape(tuple(shape))
    partial_dims = [d for d, p in enumerate(placements) if isinstance(p, Partial)]
    groups: dict[tuple[int, ...], torch.Tensor] = {}  # by coordinate along the partial dimensions
    covered: dict[tuple[int, ...], torch.Tensor] = {}
    for rank, coordinate in coordinates(mesh).items():
        shard = shards[rank]
        assert shard is not None
        where = cut(index, mesh.shape, coordinate, placements).reshape(-1)
        key = tuple(coordinate[d] for d in partial_dims)
        full = groups.setdefault(key, torch.zeros(index.numel(), dtype=dtype))
        seen = covered.setdefault(key, torch.zeros(index.numel(), dtype=torch.bool))
        values = shard.reshape(-1)
        again = seen[where]
        assert torch.equal(full[where][again], values[again]), "replicas of the source differ"
        full[where] = values
        seen[where] = True
    assert all(bool(seen.all()) for seen in covered.values())
    total = next(iter(groups.values()))
    for part in list(groups.values())[1:]:
        total = total + part
    return total.reshape(tuple(shape))


def unique_fill(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor in which misplaced bytes show: all elements different where the type is wide enough, random
    bits elsewhere."""
    count = torch.Size(shape).numel()
    if dtype in (torch.int32, torch.int64, torch.float64, torch.float32, torch.complex64):
        return (torch.arange(count) + seed * 1009 + 1).to(dtype).reshape(tuple(shape))
    bits = torch.randint(
        0, 2 if dtype == torch.bool else 120, (count,), generator=torch.Generator().manual_seed(seed)
    )
    return bits.to(dtype).reshape(tuple(shape))
