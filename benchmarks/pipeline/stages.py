"""Stages whose compute takes a set time: a sleep stands for an accelerator, so that the cores are left to the
transfers. Values and gradients are real."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from meshcast.pipelining import Edge, Layer
from meshcast.tuning.search import uses_of
from torch import nn

from ..ranks import Watch, gathered, share_of_others

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


def timed_step(
    step: Callable[[], Any], clock: Clock, more: Callable[[], Any] = lambda: None
) -> tuple[dict[str, float], list[Any]]:
    """A step of all ranks: its seconds, by how much timed compute ended late, and the part of the cores that
    others had. And what each rank has to say of it (`more`)."""
    clock.late = 0.0
    dist.barrier()
    begin = Watch.now()
    step()
    end = Watch.now()
    every = gathered((begin.wall, end.wall, end.since(begin), clock.late, more()))
    begins, ends, passed, late, said = zip(*every, strict=True)
    # All ranks of one machine share the clock.
    seconds, others = max(ends) - min(begins), share_of_others(passed[0], passed)
    return {"seconds": seconds, "late": max(late), "others": others}, list(said)


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


@dataclass(frozen=True)
class Part:
    """One stage. inputs, outputs: floats for each sample of the values that enter and leave; parameters:
    floats. Times are of a whole micro-batch, seconds."""

    forward: float
    backward: float
    early: float  # the part of the backward for the inputs
    inputs: list[int]
    outputs: list[int]
    parameters: int


def parts_of(layers: Sequence[Layer], counts: Sequence[int]) -> tuple[list[Part], list[Edge]]:
    """The stages of so many layers each, and the edges between them: a value goes to every later stage that
    has a layer which takes it."""
    stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
    users: dict[tuple[int, int], set[int]] = {}  # stages, by the value: its layer, its place there
    for (maker, user), values in uses_of(layers).items():
        if user < len(layers) and stage_of[maker] != stage_of[user]:
            for value in values:
                place = [id(each) for each in layers[maker].values].index(id(value))
                users.setdefault((maker, place), set()).add(stage_of[user])
    inputs: list[list[int]] = [[] for _ in counts]
    outputs: list[list[int]] = [[] for _ in counts]
    edges = []
    for (maker, place), stages in sorted(users.items()):
        source, floats = stage_of[maker], layers[maker].values[place].shape[1]
        for stage in sorted(stages):
            edges.append(Edge(source, len(outputs[source]), stage, len(inputs[stage])))
            inputs[stage].append(floats)
        outputs[source].append(floats)
    parts = []
    for stage in range(len(counts)):
        own = [layer for layer, of in zip(layers, stage_of, strict=True) if of == stage]
        early = sum(layer.backward / 2 if layer.inputs is None else layer.inputs for layer in own)
        backward = sum(layer.backward for layer in own)
        parts.append(
            Part(
                sum(layer.forward for layer in own),
                backward,
                early if stage else 0.0,
                inputs[stage] or [1],
                outputs[stage] or [1],
                sum(layer.parameters for layer in own) // 4,
            )
        )
    return parts, edges


def pattern(floats: int) -> torch.Tensor:
    """Factors that differ from place to place: a misplaced element shows."""
    return torch.arange(floats, dtype=torch.float32) % 7 + 1


class LayersStage(nn.Module):
    """Finds one number for each sample in its inputs, multiplies it by a weight, which is 1, and hides it in
    its outputs, so that what comes out is what went in. The other parameters are zero, and get gradients.

    A rank that has a part of the samples takes that part of the time.
    """

    def __init__(self, part: Part, samples: int, clock: Clock) -> None:
        super().__init__()
        self.part, self.samples, self.clock = part, samples, clock
        self.weight = nn.Parameter(torch.ones(()))
        self.bulk = nn.Parameter(torch.zeros(max(1, part.parameters)))

    def forward(self, *values: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        part, clock = self.part, self.clock
        share = values[0].shape[0] / self.samples
        clock.begin()
        patterns = [pattern(floats) for floats in part.inputs]
        found = [value @ each / each.square().sum() for value, each in zip(values, patterns, strict=True)]
        number = torch.stack(found).mean(0)
        if part.early:
            number = _Slow.apply(number, clock, share * part.early)
        weight = _Slow.apply(self.weight, clock, share * (part.backward - part.early))
        number = number * weight + self.bulk.sum() * number.detach()
        clock.sleep(share * part.forward)
        number = _Begin.apply(number, clock)
        made = tuple(number[:, None] * pattern(floats) for floats in part.outputs)
        return made if len(made) > 1 else made[0]


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output[:, 0] * target).mean()
