"""Digest of a tensor's values that does not depend on how it is sharded.

Each element is mixed with its position in the global tensor, and the results are added up modulo 2^64. The
sum over the distinct shards of any layout is therefore that of the whole tensor. It finds torn, stale and
misplaced values; it is no defence against someone who wants a collision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..base.boxes import extents

if TYPE_CHECKING:
    from ..base.boxes import Piece
    from ..layout import Box, Layout

__all__ = ["pieces_digest", "shard_digest"]

_ELEMENTS = 1 << 20  # at a time: the mixing takes 24 bytes of memory for each
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd numbers of the mixing function of SplitMix64, as signed 64-bit integers.
_STEP = -7046029254386353131
_FIRST = -4658895280553007687
_SECOND = -7723592293110705685


def shard_digest(local: torch.Tensor, layout: Layout, shape: Sequence[int], rank: int) -> int:
    """Of this rank's shard, as a signed 64-bit integer; 0 for an empty one. All NaNs count as one value,
    since casts do not keep their payload."""
    held = layout.pieces(shape).get(rank)
    total = 0 if held is None else pieces_digest(local, held[1], shape)
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def pieces_digest(local: torch.Tensor, pieces: Sequence[Piece], shape: Sequence[int]) -> int:
    """Of boxes in a local tensor, as an integer to be taken modulo 2^64."""
    return sum(_box_digest(_view(local, piece), piece[0], shape) for piece in pieces)


def _view(local: torch.Tensor, piece: Piece) -> torch.Tensor:
    box, at, axes, steps = piece
    if not axes and local.ndim == len(box):
        for dim, ((low, high), begin) in enumerate(zip(box, at, strict=True)):
            local = local.narrow(dim, begin, high - low)
        return local
    strides = [local.stride(axis) * step if step else 0 for axis, step in zip(axes, steps, strict=True)]
    first = sum(index * stride for index, stride in zip(at, local.stride(), strict=True))
    return local.as_strided(extents(box), strides, local.storage_offset() + first)


def _box_digest(part: torch.Tensor, box: Box, shape: Sequence[int]) -> int:
    if part.numel() == 0:
        return 0
    if part.ndim == 0:
        return int(_mixed(_words(part.reshape(1)), torch.zeros(1, dtype=torch.int64, device=part.device)))
    total = 0
    rows = max(1, _ELEMENTS // max(part[0].numel(), 1))
    for begin in range(0, part.shape[0], rows):
        block = part[begin : begin + rows]
        first = (box[0][0] + begin, box[0][0] + begin + block.shape[0])
        position = torch.zeros((), dtype=torch.int64, device=part.device)
        for dim, (low, high) in enumerate((first, *box[1:])):
            along = torch.arange(low, high, device=part.device) * math.prod(shape[dim + 1 :])
            position = position + along.reshape([-1 if d == dim else 1 for d in range(len(box))])
        total += int(_mixed(_words(block), position.expand(block.shape)))
    return total


def _words(values: torch.Tensor) -> torch.Tensor:
    """The bits of each element as int64, complex numbers folded."""
    if values.is_complex():
        parts = torch.view_as_real(values.resolve_conj())
        return _words(parts[..., 0]) * 31 + _words(parts[..., 1])
    if values.is_floating_point() and values.element_size() == 1:  # torch compares no float8
        words = values.contiguous().view(torch.uint8).to(torch.int64)
        return torch.where(values.to(torch.float32).isnan(), torch.full_like(words, 127), words)
    if values.is_floating_point():
        values = torch.where(values != values, torch.full((), math.nan, dtype=values.dtype), values)
    values = values.contiguous()
    return values.view(_WORDS[values.element_size()]).to(torch.int64)


def _mixed(words: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    mixed = words + (position + 1) * _STEP
    mixed = (mixed ^ (mixed >> 30)) * _FIRST
    mixed = (mixed ^ (mixed >> 27)) * _SECOND
    return (mixed ^ (mixed >> 31)).sum()
