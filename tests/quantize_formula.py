"""The formulas of block-scaled types in plain PyTorch, of a whole tensor in one process: those of torchao
0.18, as docs/resharding.md names them. tests/clients compares with torchao itself."""

from __future__ import annotations

import torch

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def quantized(x: torch.Tensor, scheme: str) -> tuple[torch.Tensor, ...]:
    """Values and scales; for nvfp4 also the scale of the tensor."""
    if scheme == "mxfp8":
        return _mxfp8(x.float())
    if scheme == "nvfp4":
        return _nvfp4(x.float())
    rows, columns = map(int, scheme.removeprefix("fp8_e4m3:").split("x"))
    return _fp8(x.float(), (rows, columns) if x.ndim > 1 else (columns,))


def _amax(x: torch.Tensor, block: tuple[int, ...]) -> torch.Tensor:
    """By blocks along the last dimensions; those at the end may be smaller."""
    most = x.abs()
    for dim, by in zip(range(-len(block), 0), block, strict=True):
        most = torch.stack([part.amax(dim) for part in most.split(by, dim)], dim)
    return most


def _expanded(scale: torch.Tensor, block: tuple[int, ...], shape: torch.Size) -> torch.Tensor:
    for dim, by in zip(range(-len(block), 0), block, strict=True):
        scale = scale.repeat_interleave(by, dim).narrow(dim, 0, shape[dim])
    return scale


def _fp8(x: torch.Tensor, block: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    scale = _amax(x, block).clamp(min=1e-12) / 448
    return (x / _expanded(scale, block, x.shape)).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    power = (_amax(x, (32,)).view(torch.int32) >> 23) - 127
    biased = (power - 8).clamp(-127, 128) + 127
    scale = (biased << 23).view(torch.float32).clamp(min=2.0**-126)
    values = (x / _expanded(scale, (32,), x.shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, biased.to(torch.uint8).view(torch.float8_e8m0fnu)


def _nvfp4(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    tensor = x.abs().max().clamp(min=1e-12) / (448.0 * 6.0)
    scale = (_amax(x, (16,)) / 6 / tensor).clamp(2.0**-6, 448).to(torch.float8_e4m3fn)
    scaled = (x * _expanded(1.0 / tensor / scale.float(), (16,), x.shape)).clamp(-6, 6)
    codes = _e2m1(scaled)
    return codes[..., ::2] | codes[..., 1::2] << 4, scale, tensor


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    """The number of the nearest value; of two as near, the even one. Bit 3 is the sign."""
    magnitude = x.abs().double()
    above = torch.bucketize(magnitude, _E2M1).clamp(max=7)
    below = (above - 1).clamp(min=0)
    up, down = _E2M1[above] - magnitude, magnitude - _E2M1[below]
    nearest = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return nearest.to(torch.uint8) | torch.signbit(x).to(torch.uint8) << 3


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, shape and dtype."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return (
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.ndim else a == b
    )
