"""Values of 8 and 4 bits that share a scale by blocks: the schemes by name, and how a rank quantises a part
of a tensor, on the CPU.

The largest magnitude of each block comes first. Parts that share a block agree on it, and each of them is
then quantised by itself, with the bits that the whole tensor would get (csrc/core/memory/block_quantize.h).
All arithmetic is in float32, of the values of the source as they are:

- ``fp8_e4m3:RxC``: scale = max(amax, 1e-12) / 448; value = x / scale, at most 448, as float8_e4m3fn. torchao
  0.18, quantization/quant_primitives.py: `_choose_scale_float8` with ``hp_value_lb=1e-12``, and
  `_quantize_affine_float8`. Blocks at the end of a tensor may be smaller, as in the checkpoints of
DeepSeek-V3.
- ``mxfp8``: blocks of 32 along the last dimension. scale = 2^(floor(log2(amax)) - 8), at least 2^-127, as
  float8_e8m0fnu; value = x / max(scale, 2^-126), at most 448, as float8_e4m3fn. torchao 0.18,
  prototype/mx_formats/mx_tensor.py: `to_mx` with ``ScaleCalculationMode.FLOOR``.
- ``nvfp4``: blocks of 16 along the last dimension. tensor_scale = max(largest magnitude of the tensor, 1e-12)
  / 2688, float32; scale = amax / 6 / tensor_scale, from 2^-6 to 448, as float8_e4m3fn; value = x * (1 /
  tensor_scale / scale), at most 6, as float4_e2m1, two in a byte, the first one in its low half. torchao
  0.18, prototype/mx_formats/nvfp4_tensor.py: `nvfp4_quantize` with `per_tensor_amax_to_scale`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from .. import _C
from ..base import checks
from ..errors import LayoutError

__all__ = [
    "SCHEMES",
    "SOURCES",
    "Scheme",
    "amax_of",
    "scales_of",
    "scheme_of",
    "tensor_scale_of",
    "values_of",
]

SCHEMES = 'allowed are "fp8_e4m3:RxC", as "fp8_e4m3:128x128", "mxfp8" and "nvfp4"'
SOURCES = (torch.bfloat16, torch.float16, torch.float32)
_FP8 = re.compile(r"fp8_e4m3:([1-9][0-9]{0,8})x([1-9][0-9]{0,8})")


class Scheme(NamedTuple):
    """A block-scaled type. block: sizes along the last dimensions. values, scales: dtypes of both. packed:
    values in a byte, along the last dimension. suffixes: of the names of the scales: those of the blocks, and
    for nvfp4 that of the tensor."""

    text: str
    kind: str
    block: tuple[int, int]
    values: torch.dtype
    scales: torch.dtype
    packed: int
    suffixes: tuple[str, ...]

    def blocks(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the sizes of a block along each dimension of a tensor. Raises LayoutError where the scheme
        does not fit its shape."""
        sizes, (rows, columns) = tuple(shape), self.block
        least = 1 if rows == 1 else 2
        if len(sizes) < least:
            raise self._unfit(name, sizes, f"its blocks have {least} dimension{'s' if least > 1 else ''}")
        if 0 in sizes:
            raise self._unfit(name, sizes, "there is nothing to make scales of")
        if self.kind != "fp8_e4m3" and sizes[-1] % columns:
            raise self._unfit(name, sizes, f"the last dimension must be a multiple of {columns}")
        return (*(1,) * (len(sizes) - 2), *((rows, columns) if len(sizes) > 1 else (columns,)))

    def scales_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The number of blocks along each dimension."""
        return tuple(-(-size // by) for size, by in zip(shape, self.blocks(name, shape), strict=True))

    def values_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // self.packed)

    def _unfit(self, name: str, shape: Sequence[int], why: str) -> LayoutError:
        return LayoutError(f"quantize={self.text!r} does not fit {name!r} of shape {tuple(shape)}: {why}")


@cache
def scheme_of(text: str) -> Scheme:
    """Raises LayoutError for a text that names none."""
    e4m3 = torch.float8_e4m3fn
    if text == "mxfp8":
        return Scheme(text, text, (1, 32), e4m3, torch.float8_e8m0fnu, 1, ("_scale",))
    if text == "nvfp4":
        return Scheme(text, text, (1, 16), torch.uint8, e4m3, 2, ("_scale", "_scale_2"))
    found = _FP8.fullmatch(text)
    if found is None:
        raise LayoutError(f"quantize={checks.shown(text)} is no block-scaled type; {SCHEMES}")
    rows, columns = int(found[1]), int(found[2])
    suffix = "_scale" if rows == 1 else "_scale_inv"  # as in the checkpoints of DeepSeek-V3
    return Scheme(text, "fp8_e4m3", (rows, columns), e4m3, torch.float32, 1, (suffix,))


def amax_of(part: torch.Tensor, low: Sequence[int], block: Sequence[int], out: torch.Tensor) -> None:
    """Fills out, float32, with the largest magnitude of each block that a part touches, row-major. low: where
    the part begins in its tensor. NaN where one of a block is."""
    _C.block_amax(part, low, block, out)


def scales_of(scheme: Scheme, amax: torch.Tensor, tensor_amax: float, out: torch.Tensor) -> None:
    """Fills out with the scales of blocks. tensor_amax: the largest magnitude of the tensor, for nvfp4."""
    _C.block_scales(scheme.kind, amax, tensor_amax, out)


def values_of(
    scheme: Scheme,
    part: torch.Tensor,
    low: Sequence[int],
    block: Sequence[int],
    amax: torch.Tensor,
    tensor_amax: float,
    out: torch.Tensor,
) -> None:
    """Fills out with the values of a part, row-major. amax: of the blocks that it touches, over the whole
    tensor. A part of nvfp4 begins and ends between bytes."""
    if math.prod(part.shape):
        _C.block_values(scheme.kind, part, low, block, amax, tensor_amax, out)


def tensor_scale_of(tensor_amax: float) -> float:
    """The scale of all blocks of a tensor, for nvfp4."""
    return _C.nvfp4_tensor_scale(tensor_amax)
