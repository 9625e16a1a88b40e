"""Summands of Partial sources, and what torch makes of them."""

from __future__ import annotations

import functools

import torch


def summand(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Differs from that of any other seed in nearly every element."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    info = torch.iinfo(dtype)
    low, high = max(info.min, -(2**40)), min(info.max, 2**40)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def reduced(op: str, summands: list[torch.Tensor]) -> torch.Tensor:
    """Torch's own, summand by summand in their own type; floating point in float64, to be rounded once."""
    dtype = summands[0].dtype
    if dtype == torch.bool:
        any_of = op in ("sum", "max")
        return functools.reduce(torch.logical_or if any_of else torch.logical_and, summands)
    if dtype.is_floating_point:
        summands = [s.double() for s in summands]
    combine = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}.get(op, torch.add)
    total = functools.reduce(combine, summands)
    if op == "avg":
        whole = not (total.is_floating_point() or total.is_complex())
        total = torch.div(total, len(summands), rounding_mode="trunc" if whole else None)
    return total
