"""How the modules of drawn stages bring values from the placements they come in to those that they compute
in, and back: collectives whose gradients follow the rules of the pipeline.

A stage computes on its own samples ("data" dimensions) and tokens ("seq"), with whole values on "tensor"
dimensions. On data and seq dimensions a rank's gradients are parts of a sum over the ranks; on tensor
dimensions every rank has the whole gradient. All is made of sums over ranks, of zeros but for the own part:
values are tiny here, and parts may be of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from multiproc.gradient_draws import TOKENS, WIDTH
from torch.distributed import _functional_collectives as functional

__all__ = ["Place", "leave", "take"]


@dataclass(frozen=True)
class Place:
    """Where a rank is in the mesh of a stage. One process that computes everything has a place without
    dimensions."""

    roles: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    coordinate: tuple[int, ...] = ()
    groups: tuple[dist.ProcessGroup | None, ...] = ()

    def part(self, size: int, dim: int) -> tuple[int, int]:
        """Begin and length of this rank's part of `size`, cut as torch.chunk does."""
        each = -(-size // self.shape[dim])
        begin = min(size, each * self.coordinate[dim])
        return begin, min(each, size - begin)

    def cuts(self, dim: int) -> bool:
        return self.shape[dim] > 1


def total(value: torch.Tensor, group: Any) -> torch.Tensor:
    """Its sum over the ranks."""
    summed = functional.wait_tensor(functional.all_reduce(value.contiguous(), "sum", group))
    return summed.elem if isinstance(summed, functional.AsyncCollectiveTensor) else summed


def _spread(value: torch.Tensor, dim: int, begin: int, size: int) -> torch.Tensor:
    """Zeros of `size` along `dim`, but for the value at `begin`."""
    shape = list(value.shape)
    shape[dim] = begin
    before = value.new_zeros(shape)
    shape[dim] = size - begin - value.shape[dim]
    return torch.cat([before, value, value.new_zeros(shape)], dim)


class _Gather(torch.autograd.Function):
    """Every rank's part to the whole. partial: gradients are parts of a sum."""

    @staticmethod
    def forward(ctx, value, dim, begin, size, group, partial):
        ctx.cut, ctx.group, ctx.partial = (dim, begin, value.shape[dim]), group, partial
        return total(_spread(value, dim, begin, size), group)

    @staticmethod
    def backward(ctx, gradient):
        gradient = total(gradient, ctx.group) if ctx.partial else gradient
        return gradient.narrow(*ctx.cut).contiguous(), None, None, None, None, None


class _Own(torch.autograd.Function):
    """Of the whole, which all ranks have, one's own part; every rank gets the whole gradient."""

    @staticmethod
    def forward(ctx, value, dim, begin, length, group):
        ctx.spread, ctx.group = (dim, begin, value.shape[dim]), group
        return value.narrow(dim, begin, length).contiguous()

    @staticmethod
    def backward(ctx, gradient):
        return total(_spread(gradient, *ctx.spread), ctx.group), None, None, None, None


class _Total(torch.autograd.Function):
    """The sum over the ranks, of whose gradient each has a part."""

    @staticmethod
    def forward(ctx, value, group):
        ctx.group = group
        return total(value, group)

    @staticmethod
    def backward(ctx, gradient):
        return total(gradient, ctx.group), None


class _Summand(torch.autograd.Function):
    """Of a value that all ranks have, a part of the sum; all get the whole gradient of the sum."""

    @staticmethod
    def forward(ctx, value, weight):
        del ctx
        return value * weight

    @staticmethod
    def backward(ctx, gradient):
        del ctx
        return gradient.clone(), None


def _gather(
    value: torch.Tensor, place: Place, dim: int, along: int, size: int, partial: bool
) -> torch.Tensor:
    begin, _ = place.part(size, dim)
    group = place.groups[dim]
    if value.is_floating_point():
        return _Gather.apply(value, along, begin, size, group, partial)
    counted = total(_spread(value.to(torch.int64), along, begin, size), group)
    return counted.to(value.dtype)


def take(value: torch.Tensor, kind: str, placed: Sequence[str], place: Place, *, whole: bool) -> torch.Tensor:
    """An input as the stage computes with it. whole: with all samples of the batch."""
    for dim in reversed(range(len(place.roles))):
        if place.roles[dim] == "tensor" and place.cuts(dim) and placed[dim] != "R":
            along = int(placed[dim][1])
            value = _gather(value, place, dim, along, (0, TOKENS, WIDTH)[along], False)
    for dim, role in enumerate(place.roles):
        if not place.cuts(dim) or placed[dim] != "R":
            continue
        if role == "seq" and kind != "stat":
            value = value.narrow(1, *place.part(TOKENS, dim))
        elif role == "data" and kind in ("act", "ids", "mask") and not whole:
            value = value.narrow(0, *place.part(value.shape[0], dim))
    return value


def leave(value: torch.Tensor, kind: str, placed: Sequence[str], place: Place) -> torch.Tensor:
    """What the stage computed, as it leaves."""
    for dim in reversed(range(len(place.roles))):
        role, to = place.roles[dim], placed[dim]
        if not place.cuts(dim):
            continue
        if role == "tensor" and to == "P":
            weights = range(1, place.shape[dim] + 1)
            value = _Summand.apply(value, weights[place.coordinate[dim]] / sum(weights))
        elif role == "tensor" and to != "R":
            along = int(to[1])
            value = _Own.apply(value, along, *place.part(value.shape[along], dim), place.groups[dim])
        elif role != "tensor" and kind == "stat" and to == "R":
            value = _Total.apply(value, place.groups[dim])
        elif role == "seq" and kind == "act" and to == "R":
            value = _gather(value, place, dim, 1, TOKENS, True)
        elif role == "seq" and kind == "bias" and to == "S1":
            value = value.narrow(1, *place.part(TOKENS, dim))
        elif role == "data" and kind == "act" and to == "R":
            value = _gather(value, place, dim, 0, value.shape[0] * place.shape[dim], True)
    return value
