"""How much communication there is for how much compute in the jobs of the paper (Zhuang et al., MLSys 2023),
worked out from the sizes in its released code: neither prints such a figure.

A job runs in two stages of four V100s each, on two hosts with a link of 10 Gbit/s. Its accelerators are taken
to reach half their peak, the upper end of the axes of the paper's figures (200 to 500 TFLOPS for the GPT on
eight of them, 20 to 60 for the U-Transformer); slower ones would have less to hide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from gpt.config import MODELS as GPTS
from torch.utils.flop_counter import FlopCounterMode
from unet.config import MODELS as UNETS
from unet.model import PORTS, make_layer

__all__ = ["PaperJob", "gpt", "unet"]

_ACCELERATORS = 8
_LINK = 10e9 / 8  # bytes/s of a host, each way
_REACHED = 0.5  # of the peak


@dataclass(frozen=True)
class PaperJob:
    """One micro-batch of a job. Stages share its compute evenly."""

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
