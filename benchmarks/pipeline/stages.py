"""A stage whose compute takes a set time: a sleep stands for an accelerator, so that the cores are left to
the transfers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Clock", "TimedStage"]

_SPIN = 0.0002  # seconds before a deadline in which it is looked for: a sleep ends late by up to this much


@dataclass
class Clock:
    """Seconds that forward, input gradient and weight gradient of a micro-batch take, the arithmetic of the
    stage included. scale 0: none, for the steps that only warm up and check values."""

    forward: float
    inputs: float
    weight: float
    scale: float = 1.0
    late: float = 0.0  # seconds: the most by which a part ended after its time
    _until: float = field(default=0.0, init=False)  # the end of what was timed last
    _pass: int = field(default=-1, init=False)  # the run of autograd that this belonged to

    def begin(self) -> None:
        """A forward or a backward begins now."""
        self._until, self._pass = time.monotonic(), _current_pass()

    def sleep(self, seconds: float) -> None:
        """Until `seconds` after the beginning, or after the end of the part before."""
        if _current_pass() != self._pass:  # the weight gradient alone
            self.begin()
        self._until += seconds * self.scale
        left = self._until - time.monotonic() - _SPIN
        if left > 0:
            time.sleep(left)
        while time.monotonic() < self._until:
            pass
        self.late = max(self.late, time.monotonic() - self._until)


def _current_pass() -> int:
    """Which run of autograd this thread is in, -1 outside."""
    return int(torch._C._current_graph_task_id())


class _Begin(torch.autograd.Function):
    """Hands its input on; with its backward that of the stage begins."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, clock: Clock) -> torch.Tensor:
        ctx.clock = clock
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock.begin()
        return gradient, None


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
        clock.begin()
        weight = _Slow.apply(self.weight, clock, clock.weight + (clock.inputs if self.first else 0.0))
        y = (x if self.first else _Slow.apply(x, clock, clock.inputs)) * weight
        clock.sleep(clock.forward)
        return _Begin.apply(y, clock)
