"""A decoder-only transformer as in GPT-3, cut into pipeline stages by layers.

Learned positions, layer norm before attention and MLP, GELU, causal attention. A parameter has a global name
(`layers.3.attention.qkv.weight`) in whichever stage it lives. Its initial value depends on seed and name
alone: any cut into stages and any number of ranks starts from the same weights.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from training.layout import split_layers
from training.rng import generator_for

from gpt.config import ModelConfig

TIED = "embedding.tokens.weight"  # the matrix that a tied head projects with, wherever the two live


class Attention(nn.Module):
    """Causal multi-head self-attention: (batch, seq, width) -> (batch, seq, width)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        # Outputs of qkv are ordered by head: cut into equal parts, each part is some whole heads.
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_width)).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One layer: attention and MLP, each behind a layer norm and inside a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class Embedding(nn.Module):
    """Token plus learned position: (batch, seq) integers -> (batch, seq, width)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.seq_len, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]


class Head(nn.Module):
    """Last layer norm and projection: (batch, seq, width) -> (batch, seq, vocab) logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class GPTStage(nn.Module):
    """Consecutive layers of the model; the first stage also embeds, the last one also projects to logits."""

    block: Callable[[Any], nn.Module] = Block  # one layer, of its own kind of config

    def __init__(self, config: ModelConfig, layers: range, seed: int) -> None:
        super().__init__()
        self.embedding = Embedding(config) if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(i): type(self).block(config) for i in layers})
        self.head = Head(config) if layers.stop == config.layers else None
        initialise(self, config, seed)
        if config.tied and self.embedding is not None and self.head is not None:
            self.head.output.weight = self.embedding.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.layers.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def build_stage(config: ModelConfig, stage: int, n_stages: int, seed: int) -> GPTStage:
    """Stage `stage` of `n_stages`; `build_stage(config, 0, 1, seed)` is the whole model."""
    return GPTStage(config, split_layers(config.layers, n_stages)[stage], seed)


def parallelize(stage: GPTStage, mesh: DeviceMesh) -> None:
    """Megatron's cut (Shoeybi et al., section 3): each rank of `mesh` has some heads and some of the MLP's
    inner width, with one sum over the ranks behind each of the two. Embedding, norms and head are whole on
    every rank."""
    plan = {
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in stage.layers.values():
        parallelize_module(block, mesh, plan)


@torch.no_grad()
def initialise(module: nn.Module, config: ModelConfig, seed: int) -> None:
    """GPT-2/3: N(0, 0.02), projections into the residual smaller by sqrt(2 layers), biases 0, norms 1."""
    head = "head.output.weight" if config.tied else None
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif "norm" in name:
            parameter.fill_(1.0)
        else:
            into_residual = name.removesuffix(".weight").endswith(("attention.out", "down"))
            std = 0.02 / math.sqrt(2 * config.layers) if into_residual else 0.02
            parameter.normal_(0.0, std, generator=generator_for(seed, TIED if name == head else name))


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte: (batch, seq, vocab), (batch, seq) -> scalar of float32 or more."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(precise.flatten(0, 1), targets.flatten())
