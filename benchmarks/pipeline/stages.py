"""A stage whose compute takes a set time: a sleep stands for an accelerator, so that the cores are left to
the transfers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Clock", "TimedStage"]


@dataclass
class Clock:
    """Seconds that forward, input gradient and weight gradient of a micro-batch take. scale 0: none, for the
    steps that only warm up and check values."""

    forward: float
    inputs: float
    weight: float
    scale: float = 1.0

    def sleep(self, seconds: float) -> None:
        if self.scale:
            time.sleep(seconds * self.scale)


class _Slow(torch.autograd.Function):
    """Hands its input on; its backward takes time."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, clock: Clock, seconds: float) -> torch.Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.clock.sleep(ctx.seconds)
        return gradient, None, None


class TimedStage(nn.Module):
    """Multiplies by a weight, whose value is 1, so that what comes out is what went in.

    The product is where the backward can be split: the time of the weight gradient is spent on the way to the
    weight, that of the input gradient on the way to the input. The first stage has no input gradient; all of
    its backward is spent on the way to the weight.
    """

    def __init__(self, clock: Clock, first: bool) -> None:
        super().__init__()
        self.clock, self.first = clock, first
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        clock = self.clock
        weight = _Slow.apply(self.weight, clock, clock.weight + (clock.inputs if self.first else 0.0))
        y = (x if self.first else _Slow.apply(x, clock, clock.inputs)) * weight
        clock.sleep(clock.forward)
        return y
