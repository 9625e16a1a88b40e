"""Bits of block-scaled types against torchao's own functions, and what arrives of a tensor in shards."""

from __future__ import annotations

import pytest
import torch
from meshcast.transfers.block_scaled import amax_of, scales_of, scheme_of, tensor_scale_of, values_of
from quantize_formula import quantized, same
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
from torchao.quantization.quant_primitives import _choose_scale_float8, _quantize_affine_float8

SCHEMES = ["fp8_e4m3:128x128", "fp8_e4m3:1x128", "mxfp8", "nvfp4"]


def torchaos(x: torch.Tensor, scheme: str) -> tuple[torch.Tensor, ...]:
    if scheme == "mxfp8":
        scale, values = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.FLOOR)
        return values, scale
    if scheme == "nvfp4":
        tensor = per_tensor_amax_to_scale(x.abs().max().clamp(min=1e-12))
        scale, values = nvfp4_quantize(x, 16, tensor)
        return values, scale.reshape(*x.shape[:-1], -1), tensor
    block = [int(size) for size in scheme.removeprefix("fp8_e4m3:").split("x")]
    x = x.float()
    scale = _choose_scale_float8(x, block, hp_value_lb=1e-12)
    return _quantize_affine_float8(x, scale), scale


def ours(x: torch.Tensor, text: str) -> tuple[torch.Tensor, ...]:
    scheme = scheme_of(text)
    block, low = scheme.blocks("x", x.shape), [0] * x.ndim
    amax = torch.empty(scheme.scales_shape("x", x.shape))
    amax_of(x, low, block, amax)
    most = float(amax.max())
    scales = torch.empty(amax.shape, dtype=scheme.scales[0])
    scales_of(scheme, amax, most, scales)
    values = torch.empty(scheme.values_shape(x.shape), dtype=scheme.values)
    values_of(scheme, x, low, block, amax, most, values)
    return (values, scales, torch.tensor(tensor_scale_of(most)))[: 3 if text == "nvfp4" else 2]


def drawn(seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros, subnormals, ties, and blocks of all sizes that bfloat16 has."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 384, generator=draw)
    x *= torch.exp2(torch.randint(-120, 100, (256, 1), generator=draw)) if seed % 2 else 1.0
    x[3, :200] = 0
    x[5] = torch.randint(-900, 900, (384,), generator=draw) / 2
    x[7] = torch.rand(384, generator=draw) * 2.0**-127
    return x.to(dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_torchao(scheme: str, dtype: torch.dtype) -> None:
    for seed in range(20):
        x = drawn(seed, dtype)
        for which, found in (("ours", ours(x, scheme)), ("the formula of the tests", quantized(x, scheme))):
            for mine, theirs in zip(found, torchaos(x, scheme), strict=True):
                assert same(mine, theirs), f"{which}, seed {seed}: {(mine != theirs).sum()} differ"


def test_zeros_have_finite_scales() -> None:
    for scheme in SCHEMES:
        x = torch.zeros(128, 128)
        values, scales, *_ = ours(x, scheme)
        assert int(values.view(torch.uint8).max()) == 0
        assert bool((scales.float() > 0).all()), scheme
