"""The U-Transformer, cut into pipeline stages between any of its 13 layers.

What layers hand each other has names: `hidden`, the skip connections `skip1` to `skip4`, and `time` and
`label`, which describe the sample. A stage takes what it needs of earlier stages, each value as a tensor of
its own, from the stage that makes it: skip connections go straight to the stage that uses them.
"""

import math
from dataclasses import dataclass

import torch
from meshcast.pipelining import Edge
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from training.layout import split_layers
from training.rng import generator_for

from unet.blocks import Residual, Transformer, time_waves
from unet.config import LAYERS, UNetConfig


class Embed(nn.Module):
    """Layer 0: the first convolution, and the vectors for time and label."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        self.conv = nn.Conv2d(config.image_channels, config.channels, 3, padding=1)
        self.time = nn.Sequential(
            nn.Linear(config.channels, config.embedding), nn.SiLU(),
            nn.Linear(config.embedding, config.embedding),
        )  # fmt: skip
        self.label = nn.Embedding(config.labels, config.label_tokens * config.embedding)

    def forward(self, image: Tensor, time: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = self.label(label).view(label.shape[0], self.config.label_tokens, self.config.embedding)
        return self.conv(image), self.time(time_waves(time, self.config.channels)), tokens


class Down(nn.Module):
    """Layers 1 to 4: residual, transformer on all but the last, then half the height and width."""

    def __init__(self, config: UNetConfig, level: int) -> None:
        super().__init__()
        width = config.widths[level]
        before = config.widths[level - 1] if level else config.channels
        self.residual = Residual(before, width, config.embedding)
        self.transformer = Transformer(width, config.embedding, config.head_width) if level < 3 else None
        self.shrink = nn.Conv2d(width, width, 3, stride=2, padding=1) if level < 3 else None

    def forward(self, hidden: Tensor, time: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        skip = self.residual(hidden, time)
        skip = skip if self.transformer is None else self.transformer(skip, label)
        return skip if self.shrink is None else self.shrink(skip), skip


class Middle(nn.Module):
    """Layer 5: residual and transformer; layer 6: residual."""

    def __init__(self, config: UNetConfig, attends: bool) -> None:
        super().__init__()
        width = config.widths[3]
        self.residual = Residual(width, width, config.embedding)
        self.transformer = Transformer(width, config.embedding, config.head_width) if attends else None

    def forward(self, hidden: Tensor, time: Tensor, label: Tensor) -> Tensor:
        hidden = self.residual(hidden, time)
        return hidden if self.transformer is None else self.transformer(hidden, label)


class Join(nn.Module):
    """Takes in the skip connection of its level; alone it is layer 7."""

    def __init__(self, config: UNetConfig, level: int) -> None:
        super().__init__()
        before = config.widths[min(level + 1, 3)]
        self.residual = Residual(before + config.widths[level], config.widths[level], config.embedding)

    def forward(self, hidden: Tensor, skip: Tensor, time: Tensor) -> Tensor:
        return self.residual(torch.cat([hidden, skip], dim=1), time)


class Grow(nn.Module):
    """Twice the height and width: (batch, c, h, w) -> (batch, c, 2h, 2w)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.conv(hidden.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3))


class Up(nn.Module):
    """Layers 9 to 11: the skip connection, a transformer and, on all but the last, twice the size."""

    def __init__(self, config: UNetConfig, level: int) -> None:
        super().__init__()
        self.join = Join(config, level)
        self.transformer = Transformer(config.widths[level], config.embedding, config.head_width)
        self.grow = Grow(config.widths[level]) if level else nn.Identity()

    def forward(self, hidden: Tensor, skip: Tensor, time: Tensor, label: Tensor) -> Tensor:
        return self.grow(self.transformer(self.join(hidden, skip, time), label))


class Last(nn.Module):
    """Layer 12: norm and last convolution."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, config.channels)
        self.conv = nn.Conv2d(config.channels, config.image_channels, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.conv(F.silu(self.norm(hidden)))


@dataclass(frozen=True)
class Ports:
    """What a layer takes and what it makes, in the order of its forward."""

    takes: tuple[str, ...]
    makes: tuple[str, ...]


_SAMPLE = ("image", "moment", "kind")  # arguments of the whole model
PORTS = [
    Ports(_SAMPLE, ("hidden", "time", "label")),
    *(Ports(("hidden", "time", "label"), ("hidden", f"skip{level}")) for level in (1, 2, 3, 4)),
    Ports(("hidden", "time", "label"), ("hidden",)),
    Ports(("hidden", "time", "label"), ("hidden",)),
    Ports(("hidden", "skip4", "time"), ("hidden",)),
    Ports(("hidden",), ("hidden",)),
    *(Ports(("hidden", f"skip{level}", "time", "label"), ("hidden",)) for level in (3, 2, 1)),
    Ports(("hidden",), ("hidden",)),
]


def make_layer(config: UNetConfig, index: int) -> nn.Module:
    if index == 0:
        return Embed(config)
    if index <= 4:
        return Down(config, index - 1)
    if index <= 6:
        return Middle(config, attends=index == 5)
    if index <= 8:
        return Join(config, 3) if index == 7 else Grow(config.widths[3])
    return Up(config, 11 - index) if index < LAYERS - 1 else Last(config)


@dataclass(frozen=True)
class Crossing:
    """What crosses the cuts into stages."""

    inputs: list[list[tuple[str, int]]]  # of each stage: name, stage that makes it (-1: the caller)
    outputs: list[list[str]]  # of each stage: made there and used later

    def edges(self) -> list[Edge]:
        """A value goes straight to every stage that uses it."""
        return [
            Edge(source, self.outputs[source].index(name), target, index)
            for target, inputs in enumerate(self.inputs)
            for index, (name, source) in enumerate(inputs)
            if source >= 0
        ]


def crossing(n_stages: int) -> Crossing:
    """Follows every name from the layer that makes it to those that take it."""
    maker = dict.fromkeys(_SAMPLE, -1)
    inputs: list[list[tuple[str, int]]] = []
    outputs: list[list[str]] = [[] for _ in range(n_stages)]
    for stage, layers in enumerate(split_layers(LAYERS, n_stages)):
        inputs.append([])
        for layer in layers:
            for name in PORTS[layer].takes:
                source = maker[name]
                if source != stage and (name, source) not in inputs[stage]:
                    inputs[stage].append((name, source))
                    if source >= 0 and name not in outputs[source]:
                        outputs[source].append(name)
            maker |= dict.fromkeys(PORTS[layer].makes, stage)
    outputs[-1] = ["hidden"]
    return Crossing(inputs, outputs)


class UNetStage(nn.Module):
    """Consecutive layers. forward takes and returns the values of `crossing`, in its order."""

    def __init__(self, config: UNetConfig, stage: int, n_stages: int, seed: int) -> None:
        super().__init__()
        self.config = config
        found = crossing(n_stages)
        self.inputs = [name for name, _ in found.inputs[stage]]
        self.outputs = found.outputs[stage]
        layers = split_layers(LAYERS, n_stages)[stage]
        self.layers = nn.ModuleDict({str(i): make_layer(config, i) for i in layers})
        initialise(self, seed)

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        at = dict(zip(self.inputs, values, strict=True))
        for index, layer in self.layers.items():
            ports = PORTS[int(index)]
            made = layer(*(at[name] for name in ports.takes))
            at |= zip(ports.makes, made if isinstance(made, tuple) else (made,), strict=True)
        outputs = tuple(at[name] for name in self.outputs)
        return outputs if len(outputs) > 1 else outputs[0]


def parallelize(stage: UNetStage, mesh: DeviceMesh) -> None:
    """Megatron's cut (Shoeybi et al., section 3) of the transformers: each rank of `mesh` has some heads of
    both attentions and some of the MLP's inner width. Convolutions, norms and embeddings are whole on every
    rank."""
    plan = {
        "attend_*.query": ColwiseParallel(),
        "attend_*.key_value": ColwiseParallel(),
        "attend_*.out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for module in stage.modules():
        if isinstance(module, Transformer):
            parallelize_module(module, mesh, plan)


@torch.no_grad()
def initialise(module: nn.Module, seed: int) -> None:
    """N(0, 1 / inputs) of every weight, a tenth of it where a residual branch ends; biases 0, norms 1.
    Depends on seed and name alone: any cut into stages and any number of ranks starts from the same
    weights."""
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif "norm" in name:
            parameter.fill_(1.0)
        else:
            ends_branch = name.endswith(("conv_out.weight", "out.weight", "down.weight"))
            std = (0.1 if ends_branch else 1.0) / math.sqrt(parameter[0].numel())
            parameter.normal_(0.0, std, generator=generator_for(seed, name))


def loss_fn(noise: Tensor, targets: Tensor) -> Tensor:
    """Mean square of what was mistaken about the noise."""
    return F.mse_loss(noise.float(), targets)
