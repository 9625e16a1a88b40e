"""What the end-to-end benchmark runs. Rows: what is compared. The paper's jobs, from which the ratio of
transfer to compute follows. Stages that compute for real, the models of the examples, one stage on a core,
checked against the whole model in one process; and stages whose compute is timed: a sleep stands for an
accelerator, so that the cores are left to the transfers. Values are real, and so are the gradients that check
them."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..harness import ROOT
from .stages import pattern

sys.path.insert(0, str(ROOT / "examples"))

from gpt.config import MODELS as GPTS
from gpt.config import ModelConfig
from gpt.job import GptJob
from training.job import Job
from unet.config import MODELS as UNETS
from unet.config import UNetConfig
from unet.job import UNetJob
from unet.model import PORTS, crossing, make_layer

# ROWS: each row adds one part of the method to the one before it. CHOICES: the schedules for stages that are
# alone on their ranks, and the one that chooses among them.
_WAITS = {"send_model": "rendezvous", "buffers": 0}


@dataclass(frozen=True)
class Row:
    """strategy: of the transfers. options: of the schedule. simulated: further arguments of `simulate`.
    free: messages of one element stand in for the values, what the paper calls signal send/recv."""

    name: str
    schedule: str
    strategy: str = "multicast"
    options: dict[str, Any] = field(default_factory=dict)
    simulated: dict[str, Any] = field(default_factory=dict)
    free: bool = False
    peer: bool = False  # torch.distributed.pipelining
    replicas: bool = False  # only where stages have several ranks: else the same as the row before


BASELINE = "send/recv, 1F1B"
OURS = "+ weight delaying"
FREE = "free transfers, 1F1B"
FREE_DELAYED = "free transfers, eager 1F1B, delaying"
TORCH = "torch.distributed.pipelining, 1F1B"
AUTO = "auto"

_DELAY = {"delay_weight_grad": True}

ROWS = (
    Row(BASELINE, "1F1B", "send_recv", {"overlap": False}, _WAITS),
    Row("broadcast, 1F1B", "1F1B", "broadcast", {"overlap": False}, _WAITS, replicas=True),
    Row("multicast, overlap", "1F1B"),
    Row("+ eager 1F1B", "Eager1F1B"),
    Row(OURS, "Eager1F1B", "multicast", _DELAY, _DELAY),
    Row(FREE, "1F1B", free=True),
    Row(FREE_DELAYED, "Eager1F1B", "multicast", _DELAY, _DELAY, free=True),
    Row(TORCH, "1F1B", "send_recv", peer=True),
)

CHOICES = (
    Row(AUTO, "auto"),
    *(Row(name, name) for name in ("GPipe", "1F1B", "Eager1F1B", "ZBH1", "ZBH2")),
    *(Row(f"{name}, delayed", name, "multicast", _DELAY, _DELAY) for name in ("GPipe", "1F1B", "Eager1F1B")),
)


def rows_for(ranks_per_stage: int) -> list[Row]:
    return [row for row in ROWS if ranks_per_stage > 1 or not row.replicas]


_ACCELERATORS = 8
_LINK = 10e9 / 8  # bytes/s of a host, each way
_REACHED = 0.5  # of the peak


@dataclass(frozen=True)
class PaperJob:
    """One micro-batch of a job of the paper (Zhuang et al., MLSys 2023). Stages share its compute evenly.

    How much communication there is for how much compute is worked out from the sizes in its released code:
    the paper prints no such figure. A job runs in two stages of four V100s each, on two hosts with a link of
    10 Gbit/s. Its accelerators are taken to reach half their peak, the upper end of the axes of the paper's
    figures (200 to 500 TFLOPS for the GPT on eight of them, 20 to 60 for the U-Transformer); slower ones
    would have less to hide.
    """

    name: str
    samples: int
    flops: float  # forward, backward and the forward again that recomputes activations
    nbytes: int  # of the values that cross the cut, once
    peak: float  # FLOP/s of an accelerator in the precision of the job
    microbatches: int  # of a step

    @property
    def compute(self) -> float:
        """Seconds that a stage computes."""
        return self.flops / (_ACCELERATORS * self.peak * _REACHED)

    @property
    def transfer(self) -> float:
        """Seconds that the values take over the link, sent once."""
        return self.nbytes / _LINK

    @property
    def ratio(self) -> float:
        """Transfer, one way, over forward and backward of a stage."""
        return self.transfer / self.compute


def gpt() -> PaperJob:
    """GPT-3 2.6B: sequences of 1024, float16, (data, tensor, pipeline) = (2, 2, 2), 1024 samples in 64
    micro-batches. FLOP with recomputation: 96 B S H^2 L (1 + S / 6H) + 6 B S H V."""
    model, samples = GPTS["2.6B"], 16
    tokens, width = samples * model.seq_len, model.width
    layers = 96 * tokens * width**2 * model.layers * (1 + model.seq_len / (6 * width))
    return PaperJob(
        "GPT-3 2.6B", samples, layers + 6 * tokens * width * model.vocab, 2 * tokens * width, 125e12, 64
    )


def unet() -> PaperJob:
    """U-Transformer 2B: float32, 2048 samples in 32 micro-batches, cut behind layer 7, stages on (1, 4). FLOP
    are counted by torch in the model of examples/unet, four times those of a forward."""
    samples, cut = 64, 8
    model = UNETS["2B"]
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        image = torch.empty(samples, model.image_channels, model.image, model.image)
        at = {
            "image": image,
            "moment": torch.empty(samples),
            "kind": torch.zeros(samples, dtype=torch.long),
        }
        crossing = 0
        for index, ports in enumerate(PORTS):
            if index == cut:
                later = {name for each in PORTS[cut:] for name in each.takes} - {"time", "label"}
                crossing = sum(4 * math.prod(at[name].shape) for name in later)
            made = make_layer(model, index)(*(at[name] for name in ports.takes))
            at |= zip(ports.makes, made if isinstance(made, tuple) else (made,), strict=True)
    return PaperJob("U-Transformer 2B", samples, 4.0 * counter.get_total_flops(), crossing, 15.7e12, 32)


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


class SharedClock:
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
    def forward(
        ctx: Any, clock: SharedClock, seconds: float, *values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.clock, ctx.seconds = clock, seconds
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.clock.sleep(ctx.seconds)
        return None, None, *gradients


class SplitStage(nn.Module):
    """Multiplies each value by a weight of its own, which is 1, so that what comes out is what went in. The
    last stage returns a loss for each sample.

    The product is where the backward can be split: the time of the weight gradients is spent on the way to
    the first weight, that of the input gradients on the way to the inputs. The first stage has no input
    gradients; all of its backward is spent on the way to the weight.
    """

    def __init__(self, clock: SharedClock, times: Times, stage: int, values: int) -> None:
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
        """nbytes: of a micro-batch over all ranks; shares: of each value; tensor_parallel: see
        SharedClock."""
        self.clock = SharedClock(tensor_parallel)
        self._times, self._stage, self._parts = times, stage, parts
        self._samples = microbatches * parts
        self._sizes = [max(1, round(nbytes * share / 4 / parts)) for share in shares]
        self._modules: dict[bool, SplitStage] = {}
        self.nbytes = 4 * parts * sum(self._sizes)

    def module(self, free: bool, peer: bool) -> nn.Module:  # noqa: ARG002  as RealTask's
        if free not in self._modules:
            self._modules[free] = SplitStage(self.clock, self._times, self._stage, len(self._sizes))
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
