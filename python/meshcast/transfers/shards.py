"""Shards of one rank: one for each tensor of a call, None where the rank has none; and whether they fit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ..errors import LayoutError

__all__ = ["Shards", "check_shards", "filled", "resolved", "settled", "tensor_text"]

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
        elif side == "destination" and _is_lazy(shard):
            raise LayoutError(
                f"{op}: the destination shard of tensor {index} on rank {rank} is a view that conjugates or "
                f"negates its memory when it is read ({tensor_text(shard.shape, shard.dtype)}): expected "
                "memory that holds the values themselves; give the tensor behind the view, or a clone()",
                rank=rank,
                op=op,
            )


def filled(shards: Shards) -> list[torch.Tensor | None]:
    return [None if shard is None or shard.numel() == 0 else settled(shard) for shard in shards]


def resolved(shards: Shards) -> Shards:
    """The shards with conjugations and negations done that torch has only noted (`x.conj()`, and gradients of
    such): transfers read the memory as it is."""
    if not any(shard is not None and _is_lazy(shard) for shard in shards):
        return shards
    return [None if shard is None else shard.resolve_conj().resolve_neg() for shard in shards]


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor behind the wrapper in which functional collectives return before they have finished; the
    wrapper has no memory of its own."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def tensor_text(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"
