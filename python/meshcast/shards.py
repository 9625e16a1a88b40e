"""Shards of one rank: one for each tensor of a call, None where the rank has none; and whether they fit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from .errors import LayoutError

__all__ = ["Shards", "check_shards", "filled", "settled", "tensor_text"]

Shards = Sequence[torch.Tensor | None]


def check_shards(
    shards: Shards,
    shapes: Sequence[tuple[int, ...] | None],
    dtypes: Sequence[torch.dtype],
    *,
    op: str,
    rank: int,
    side: str,
    on_cpu: bool,
) -> None:
    """Raises LayoutError unless the shards are as their layouts say. shapes: None where this rank is not in
    the mesh. side: "source" or "destination"."""
    if len(shards) != len(shapes):
        raise LayoutError(f"{op}: expected {len(shapes)} {side} shards, one per tensor, found {len(shards)}")
    for index, (shard, shape) in enumerate(zip(shards, shapes, strict=True)):
        if shard is None and shape is None:
            continue
        dtype = dtypes[index]
        if shard is None:
            if shape is not None and 0 not in shape:
                raise LayoutError(
                    f"{op}: rank {rank} is in the {side} mesh and must give its shard of tensor {index}: "
                    f"expected {tensor_text(shape, dtype)}, found None",
                    rank=rank,
                    op=op,
                )
        elif shape is None:
            if shard.numel():
                raise LayoutError(
                    f"{op}: rank {rank} is not in the {side} mesh and holds nothing of tensor {index}: "
                    f"expected None, found {tensor_text(shard.shape, shard.dtype)}",
                    rank=rank,
                    op=op,
                )
        elif shard.shape != shape or shard.dtype != dtype or shard.is_cpu is not on_cpu:
            raise LayoutError(
                f"{op}: the {side} shard of tensor {index} on rank {rank} does not fit its layout: expected "
                f"{tensor_text(shape, dtype)} on {'cpu' if on_cpu else 'cuda'}, found "
                f"{tensor_text(shard.shape, shard.dtype)} on {shard.device}",
                rank=rank,
                op=op,
            )


def filled(shards: Shards) -> list[torch.Tensor | None]:
    return [None if shard is None or shard.numel() == 0 else settled(shard) for shard in shards]


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor behind the wrapper in which functional collectives return before they have finished; the
    wrapper has no memory of its own."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def tensor_text(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"
