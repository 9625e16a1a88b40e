"""Layers of the examples' models as `partition` takes them.

Shapes and bytes are measured on the meta device, times are counts of floating-point operations. So the models
may be large, and are the same everywhere.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

import torch
from meshcast.pipelining import Layer, Value
from meshcast.tuning.partition import _called, measured_layers
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["RATE", "gpt", "scaled", "unet"]

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpt.config import MODELS as GPT_MODELS
from gpt.model import build_stage
from unet.config import MODELS as UNET_MODELS
from unet.model import UNetStage

RATE = 40e12  # floating-point operations per second
PLAN = {
    "layers.*.attention.qkv": ColwiseParallel(),
    "layers.*.attention.out": RowwiseParallel(),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
}


def gpt(name: str, layers: int, samples: int, degrees: tuple[int, ...] = ()) -> list[Layer]:
    """A GPT of so many layers, embedding and head; attention and MLP shared by tensor-parallel ranks."""
    config = replace(GPT_MODELS[name], layers=layers)
    with torch.device("meta"):
        model = build_stage(config, 0, 1, seed=0)
        tokens = torch.zeros(samples, config.seq_len, dtype=torch.long)
    return _timed(model, (tokens,), degrees)


def unet(name: str, samples: int) -> list[Layer]:
    """A U-Transformer: 13 layers, skip connections between them."""
    config = UNET_MODELS[name]
    with torch.device("meta"):
        model = UNetStage(config, 0, 1, seed=0)
        image = torch.zeros(samples, config.image_channels, config.image, config.image)
        return _timed(model, (image, torch.zeros(samples), torch.zeros(samples, dtype=torch.long)), ())


def scaled(layers: list[Layer], seconds: float, nbytes: float) -> list[Layer]:
    """The same, with times and bytes multiplied. Values have their samples and one dimension of floats."""
    return [
        replace(
            _times(layer, seconds),
            parameters=round(layer.parameters * nbytes / 4) * 4,
            held=round(layer.held * nbytes),
            values=tuple(_scaled(value, nbytes) for value in layer.values),
            tensor={},
        )
        for layer in layers
    ]


def _times(layer: Layer, factor: float) -> Layer:
    inputs = None if layer.inputs is None else factor * layer.inputs
    return replace(layer, forward=factor * layer.forward, backward=factor * layer.backward, inputs=inputs)


def _scaled(value: Value, nbytes: float) -> Value:
    samples, *rest = value.shape
    floats = math.prod(rest) * value.dtype.itemsize / 4
    return Value((samples, max(1, round(floats * nbytes))), torch.float32, value.used_by)


def _timed(
    model: torch.nn.Module, example: tuple[torch.Tensor, ...], degrees: tuple[int, ...]
) -> list[Layer]:
    layers = measured_layers(model, example, None, degrees, PLAN if degrees else {})
    found = []
    for layer, call in zip(layers, _called(model, example, None), strict=True):
        with FlopCounterMode(display=False) as counter:
            call.module(*call.args, **call.kwargs)
        seconds = counter.get_total_flops() / RATE
        # Of a layer that is shared nearly all operations are.
        shared = {degree: _with(each, seconds / degree) for degree, each in layer.tensor.items()}
        found.append(replace(_with(layer, seconds), tensor=shared))
    return found


def _with(layer: Layer, forward: float) -> Layer:
    return replace(layer, forward=forward, backward=2 * forward, inputs=forward)
