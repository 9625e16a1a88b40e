"""Stages that compute for real: the models of the examples, one stage on a core, checked against the whole
model in one process."""

from __future__ import annotations

from typing import Any

import torch
from gpt.config import ModelConfig
from gpt.job import GptJob
from torch import nn
from training.job import Job
from unet.config import UNetConfig
from unet.job import UNetJob
from unet.model import crossing

__all__ = ["JOBS", "RealTask"]

# Sizes at which a core takes about a fifth of a second for forward and backward of a stage; samples of a
# micro-batch.
JOBS: dict[str, tuple[Job, int]] = {
    "gpt": (GptJob(ModelConfig(layers=8, heads=8, width=384, seq_len=256)), 1),
    "unet": (UNetJob(UNetConfig(channels=32)), 2),
}
_SEED = 0
_CLOSE = 1e-4  # of the largest gradient of a parameter


class _Fold(torch.autograd.Function):
    """One element for each value. Its backward has full gradients all the same, those of `instead`."""

    @staticmethod
    def forward(ctx: Any, instead: list[torch.Tensor], *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.instead = instead
        return tuple(value.flatten()[:1].clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # noqa: ARG004
        return None, *ctx.instead


class _Unfold(torch.autograd.Function):
    """The other side: full values, those of `instead`, and one element of each gradient."""

    @staticmethod
    def forward(ctx: Any, instead: list[torch.Tensor], *signals: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ARG004
        return tuple(value.clone() for value in instead)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # noqa: ARG004
        return None, *(gradient.flatten()[:1].clone() for gradient in gradients)


class _Free(nn.Module):
    """A stage that computes as ever and sends one element of each value."""

    def __init__(self, stage: nn.Module, first: bool, values: list[torch.Tensor]) -> None:
        super().__init__()
        self.stage, self.first, self.values = stage, first, values
        self.gradients = [torch.randn_like(value) * 1e-3 for value in values]

    def forward(self, *inputs: torch.Tensor) -> Any:
        if not self.first:
            return self.stage(*_Unfold.apply(self.values, *inputs))
        made = self.stage(*inputs)
        return _Fold.apply(self.gradients, *(made if isinstance(made, tuple) else (made,)))


class _Contiguous(torch.autograd.Function):
    """Values and gradients without gaps: torch receives into buffers that are laid out as what was sent, and
    gloo takes no others."""

    @staticmethod
    def forward(ctx: Any, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ARG004
        return tuple(value.contiguous().view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ARG004
        return tuple(gradient.contiguous() for gradient in gradients)


class _Peer(nn.Module):
    """A stage as torch needs it: there are no edges, so that it takes its inputs in the order in which the
    one before it returns them."""

    def __init__(self, stage: nn.Module, order: list[int]) -> None:
        super().__init__()
        self.stage, self.order = stage, order

    def forward(self, *inputs: torch.Tensor) -> Any:
        if inputs[0].is_floating_point() and inputs[0].requires_grad:
            inputs = _Contiguous.apply(*inputs)
        made = self.stage(*(inputs[index] for index in self.order))
        return _Contiguous.apply(*made) if isinstance(made, tuple) else made


class RealTask:
    """Two stages, one on each rank."""

    def __init__(self, name: str, stage: int, microbatches: int) -> None:
        self._job, samples = JOBS[name]
        self.edges = self._job.edges(2)
        self.loss = self._job.loss
        self._stage, self._microbatches = stage, microbatches
        self._plain = self._job.build_stage(stage, 2, _SEED)
        found = self._job.samples(_SEED, None).train(0, samples * microbatches)
        self._inputs, self._targets = found
        with torch.no_grad():
            first = self._plain if stage == 0 else self._job.build_stage(0, 2, _SEED)
            made = first(*(each[:samples] for each in self._inputs))
        values = list(made) if isinstance(made, tuple) else [made]
        self.nbytes = sum(value.nbytes for value in values)
        order = list(range(len(self._inputs) if stage == 0 else len(values)))
        if name == "unet" and stage == 1:
            cut = crossing(2)
            order = [cut.outputs[0].index(value) for value, _ in cut.inputs[1]]
        self._free = _Free(self._plain, stage == 0, [values[i] for i in order] if stage else values)
        self._peer = _Peer(self._plain, order)
        self._expected: dict[str, torch.Tensor] = {}

    def module(self, free: bool, peer: bool) -> nn.Module:
        return self._free if free else self._peer if peer else self._plain

    def feed(self, free: bool, part: int | None) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:  # noqa: ARG002
        return self._inputs, self._targets

    def expect(self) -> None:
        """Runs the same step in one process, for the gradients of this stage."""
        whole = self._job.build_stage(0, 1, _SEED)
        pieces = [each.chunk(self._microbatches) for each in self._inputs]
        targets = self._targets.chunk(self._microbatches)
        for *inputs, target in zip(*pieces, targets, strict=True):
            (self.loss(whole(*inputs), target) / self._microbatches).backward()
        mine = {name for name, _ in self._plain.named_parameters()}
        self._expected = {
            name: parameter.grad
            for name, parameter in whole.named_parameters()
            if name in mine and parameter.grad is not None
        }

    def check(self, row: str, free: bool, peer: bool, part: int) -> None:  # noqa: ARG002
        """Raises RuntimeError unless the gradients of the last step are those of one process. With free
        transfers they are not, and are not looked at."""
        if free:
            return
        found = {name: p.grad for name, p in self._plain.named_parameters() if p.grad is not None}
        if found.keys() != self._expected.keys():
            raise RuntimeError(
                f"{row}, stage {self._stage}: gradients of {found.keys() ^ self._expected.keys()}"
            )
        for name, expected in self._expected.items():
            difference = (found[name] - expected).abs().max() / expected.abs().max().clamp_min(1e-12)
            if not difference < _CLOSE:
                raise RuntimeError(f"{row}, stage {self._stage}: {name} is {difference:.1e} off")
