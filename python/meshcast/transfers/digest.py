"""Digest of a tensor's values that does not depend on how it is sharded.

Each word of memory is multiplied with two weights that its position in the global tensor has, and the
products are added up, each kind modulo 2^32 (csrc/core/memory/digest.h). The sum over the distinct shards of
any layout is therefore that of the whole tensor. It finds torn, stale and misplaced values; it is no defence
against someone who wants a collision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import _C
from ..base.boxes import piece_view

if TYPE_CHECKING:
    from ..base.boxes import Piece, piece_view
    from ..layout import Box, Layout

__all__ = ["added", "box_digest", "nans_of", "pieces_digest", "shard_digest", "values_digest"]

_ELEMENTS = 1 << 20  # at a time, where a copy of them is made
_BLOCK = 4096  # words
_HALF = (1 << 32) - 1
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Nans(NamedTuple):
    """As DigestNans in C++."""

    value_bytes: int = 0
    magnitude: int = 0
    limit: int = 0


_FLOATS = {
    torch.float64: _Nans(8, 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    torch.float32: _Nans(4, 0x7FFF_FFFF, 0x7F80_0000),
    torch.float16: _Nans(2, 0x7FFF, 0x7C00),
    torch.bfloat16: _Nans(2, 0x7FFF, 0x7F80),
    torch.float8_e4m3fn: _Nans(1, 0x7F, 0x7E),
    torch.float8_e5m2: _Nans(1, 0x7F, 0x7C),
}  # other types have one NaN or none


def added(digests: Iterable[int]) -> int:
    """Returns the digest of parts together: half by half, unsigned. Any of them may be signed."""
    lower = upper = 0
    for each in digests:
        lower, upper = lower + (each & _HALF), upper + (each >> 32)
    return (upper & _HALF) << 32 | (lower & _HALF)


def shard_digest(
    local: torch.Tensor,
    layout: Layout,
    shape: Sequence[int],
    rank: int,
    dtype: torch.dtype | None = None,
) -> int:
    """Returns the digest of this rank's shard, a signed 64-bit integer; 0 if it is empty. NaNs count as one
    value, since casts do not keep their payload. dtype: that the elements are cast to first."""
    held = layout.pieces(shape).get(rank)
    total = 0 if held is None else pieces_digest(local, held[1], shape, dtype)
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def pieces_digest(
    local: torch.Tensor, pieces: Sequence[Piece], shape: Sequence[int], dtype: torch.dtype | None = None
) -> int:
    """Returns the digest of boxes in a local tensor, unsigned. The tensor is read once and not copied, except
    block by block where it is cast, is on a GPU, or is the conjugate of what is in memory."""
    kind = dtype or local.dtype
    return added(box_digest(piece_view(local, piece), piece[0], shape, kind) for piece in pieces)


def values_digest(local: torch.Tensor) -> int:
    """Returns the digest of a tensor by itself, unsigned."""
    return box_digest(local, tuple((0, size) for size in local.shape), local.shape, local.dtype)


def box_digest(part: torch.Tensor, box: Box, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Returns the digest of one box of a tensor of `shape`, unsigned. dtype: as for shard_digest."""
    if part.numel() == 0:
        return 0
    low = [begin for begin, _ in box]
    if part.is_cpu and part.dtype == dtype and not (part.is_conj() or part.is_neg()):
        return _C.digest(part, low, list(shape), *nans_of(dtype))
    if part.ndim == 0:
        part, low, shape = part.reshape(1), [0], [1]
    found, rows = [], max(1, _ELEMENTS // max(part[0].numel(), 1))
    for begin in range(0, part.shape[0], rows):
        block = part[begin : begin + rows].to(dtype).resolve_conj().resolve_neg()
        at = [low[0] + begin, *low[1:]]
        summed = _C.digest if block.is_cpu else _digest_by_torch
        found.append(summed(block, at, list(shape), *nans_of(dtype)))
    return added(found)


@cache
def nans_of(dtype: torch.dtype) -> tuple[int, int, int]:
    """Returns which values of a type are NaNs, as DigestNans in C++."""
    real = dtype.to_real() if dtype.is_complex else dtype
    return _FLOATS.get(real, _Nans())


def _digest_by_torch(
    part: torch.Tensor,
    low: Sequence[int],
    shape: Sequence[int],
    value_bytes: int,
    magnitude: int,
    limit: int,
) -> int:
    """Does what _C.digest does, for tensors on GPUs. Takes tens of bytes for each element."""
    position = torch.zeros((), dtype=torch.int64, device=part.device)
    for begin, size, extent in zip(low, part.shape, shape, strict=True):
        along = torch.arange(begin, begin + size, device=part.device)
        position = position.unsqueeze(-1) * extent + along
    words = part.contiguous().reshape(-1).view(torch.uint8)
    if value_bytes:
        values = words.view(_INTS[value_bytes])
        words = torch.where((values & magnitude) > limit, magnitude, values).view(torch.uint8)
    word_bytes = min(part.element_size(), 2)
    words = words.view(_INTS[word_bytes]).to(torch.int64)
    by_element = part.element_size() // word_bytes
    position = position.reshape(-1, 1) * by_element + torch.arange(by_element, device=part.device)
    position = position.reshape(-1)
    block = _mixed(position // _BLOCK)
    halves = []
    for weights, shift in zip(_weights(), (0, 32), strict=True):
        weight = weights.to(part.device)[position % _BLOCK] * (block >> shift & _HALF | 1)
        halves.append(int((words * weight).sum()) & _HALF)
    return halves[1] << 32 | halves[0]


@cache
def _weights() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights of words in a block, for the lower and the upper half: signed, of 16 bits."""
    x = (torch.arange(_BLOCK) + 0x9E37_79B9) & 0xFFFF_FFFF
    x = ((x ^ (x >> 16)) * 0x85EB_CA6B) & 0xFFFF_FFFF
    x = ((x ^ (x >> 13)) * 0xC2B2_AE35) & 0xFFFF_FFFF
    x = x ^ (x >> 16)
    lower, upper = (((x >> shift) | 1).to(torch.int16).to(torch.int64) for shift in (0, 16))
    return lower, upper


def _mixed(block: torch.Tensor) -> torch.Tensor:
    """SplitMix64. The odd numbers are those of C++ as signed ones; `>>` repeats the sign, which is cut
    off."""
    x = (block + 1) * -7046029254386353131
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685
    return x ^ (x >> 31 & (1 << 33) - 1)
