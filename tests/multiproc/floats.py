"""Floating-point numbers to convert, and what counts as equal."""

from __future__ import annotations

import torch

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = (F32, BF16, F16, E4M3, E5M2)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Of all sizes, with zeros of both signs, infinities and NaN among them."""
    rng = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel()
    exponents = torch.randint(-26, 20, (size,), generator=rng).float()
    values = torch.randn(size, generator=rng) * torch.exp2(exponents)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 448.0, 464.1, 1e-8])
    values[: len(special)] = special[:size]
    return values[torch.randperm(size, generator=rng)].reshape(shape).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, any NaN for any other."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_floating_point() and a.dtype.itemsize < 8:
        a, b = a.float(), b.float()  # exact
        both = a.isnan() & b.isnan()
        return bool(((a.view(torch.int32) == b.view(torch.int32)) | both).all())
    return torch.equal(a, b)
