"""Stages whose compute is timed: a sleep stands for an accelerator, so that the cores are left to the
transfers. Values are real, and so are the gradients that check them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["Clock", "TimedStage", "TimedTask", "Times"]


@dataclass(frozen=True)
class Times:
    """Seconds of a micro-batch on each stage: forward, whole backward, and the part of it for the weights
    where it is split."""

    forward: list[float]
    backward: list[float]
    weight: list[float]

    @property
    def compute(self) -> float:
        """Forward and backward of a stage, mean over the stages."""
        return (sum(self.forward) + sum(self.backward)) / len(self.forward)


class Clock:
    """Sleeps; not at all while off, as in steps that only warm up and check values.

    The ranks of `tensor_parallel` compute together, as those of a stage do that meet in the collectives of
    each layer: none begins before all of them have their inputs. Without that they would drift apart and
    take turns on the link.
    """

    def __init__(self, tensor_parallel: dist.ProcessGroup) -> None:
        self.on = True
        self._group = tensor_parallel

    def sleep(self, seconds: float) -> None:
        if not self.on or seconds <= 0:
            return
        # They share a host and its clock. What the meeting takes is part of the time of compute.
        begin = torch.tensor(time.monotonic(), dtype=torch.float64)
        dist.all_reduce(begin, dist.ReduceOp.MAX, self._group)
        time.sleep(max(0.0, begin.item() + seconds - time.monotonic()))


class _Slow(torch.autograd.Function):
    """Hands its inputs on; its backward takes time."""

    @staticmethod
    def forward(ctx: Any, clock: Clock, seconds: float, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.clock, ctx.seconds = clock, seconds
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.clock.sleep(ctx.seconds)
        return None, None, *gradients


def pattern(elements: int) -> torch.Tensor:
    """Factors that differ from place to place: a misplaced element shows in the loss and in gradients."""
    return torch.arange(elements, dtype=torch.float32) % 7 + 1


class TimedStage(nn.Module):
    """Multiplies each value by a weight of its own, which is 1, so that what comes out is what went in. The
    last stage returns a loss for each sample.

    The product is where the backward can be split: the time of the weight gradients is spent on the way to
    the first weight, that of the input gradients on the way to the inputs. The first stage has no input
    gradients; all of its backward is spent on the way to the weight.
    """

    def __init__(self, clock: Clock, times: Times, stage: int, values: int) -> None:
        super().__init__()
        self.clock, self.first, self.last = clock, stage == 0, stage == len(times.forward) - 1
        self.seconds = times.forward[stage]
        late = times.backward[stage] if self.first else times.weight[stage]
        self.late, self.early = late, times.backward[stage] - late
        self.weights = nn.ParameterList(torch.ones(()) for _ in range(values))

    def forward(self, *values: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        weights = [*_Slow.apply(self.clock, self.late, self.weights[0]), *list(self.weights)[1:]]
        inputs = values if self.first else _Slow.apply(self.clock, self.early, *values)
        made = [value * weight for value, weight in zip(inputs, weights, strict=True)]
        self.clock.sleep(self.seconds)
        if not self.last:
            return tuple(made) if len(made) > 1 else made[0]
        losses = [(each * pattern(each.shape[1])).mean(1) for each in made]
        return torch.stack(losses).sum(0)


class TimedTask:
    """The values of a step: `parts` samples in each micro-batch, one for each data-parallel rank."""

    edges = None

    def __init__(
        self,
        times: Times,
        stage: int,
        microbatches: int,
        parts: int,
        nbytes: int,
        shares: Sequence[float],
        tensor_parallel: dist.ProcessGroup,
    ) -> None:
        """nbytes: of a micro-batch over all ranks; shares: of each value; tensor_parallel: see Clock."""
        self.clock = Clock(tensor_parallel)
        self._times, self._stage, self._parts = times, stage, parts
        self._samples = microbatches * parts
        self._sizes = [max(1, round(nbytes * share / 4 / parts)) for share in shares]
        self._modules: dict[bool, TimedStage] = {}
        self.nbytes = 4 * parts * sum(self._sizes)

    def module(self, free: bool, peer: bool) -> nn.Module:  # noqa: ARG002  as RealTask's
        if free not in self._modules:
            self._modules[free] = TimedStage(self.clock, self._times, self._stage, len(self._sizes))
        return self._modules[free]

    def feed(self, free: bool, part: int | None) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Arguments and targets of the whole batch, or those of one data-parallel part."""
        values = []
        for size in self._sizes:
            elements = 1 if free else size
            # Small whole numbers, exact as floats.
            places = torch.arange(self._samples * elements, dtype=torch.float32)
            whole = (places % 13 + 1).reshape(self._samples, elements)
            values.append(whole if part is None else whole[part :: self._parts].contiguous())
        return tuple(values), torch.zeros(len(values[0]))

    @staticmethod
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return output.mean()

    def expect(self) -> None:
        """What to expect follows from the values."""

    def check(self, row: str, free: bool, peer: bool, part: int) -> None:
        """Raises RuntimeError unless the gradients of the last step are right."""
        values, _ = self.feed(free, part if peer else None)
        for weight, value in zip(self.module(free, peer).parameters(), values, strict=True):
            expected = (value * pattern(value.shape[1])).double().mean().item()
            found = math.nan if weight.grad is None else weight.grad.item()
            if not math.isclose(found, expected, rel_tol=1e-4):
                raise RuntimeError(f"{row}, stage {self._stage}: gradient {found}, not {expected}")
