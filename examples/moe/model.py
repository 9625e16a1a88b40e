"""The GPT of gpt.model with a router and experts in the place of each MLP.

Next to the hidden state a number for each sample goes from stage to stage: how unevenly the routers so far
have spread its tokens. It is of one sequence alone (as the sequence-wise balance loss of DeepSeek-V3,
section 2.1.2), so it does not depend on the micro-batch, nor on the rank that the sequence is on.
"""

from collections.abc import Callable
from typing import Any

import torch
from gpt.model import Attention, GPTStage
from gpt.model import loss_fn as token_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from training.layout import split_layers

from moe.config import MoEConfig
from moe.experts import Experts


class Router(nn.Module):
    """(batch, seq, width) -> (batch, seq, experts) probabilities, in float32 under autocast too: what would
    round to equal ones is not equally good (Switch Transformer, section 2.4)."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weight = self.weight
            return F.linear(x.to(weight.dtype), weight).softmax(-1)


class SparseMLP(nn.Module):
    """Each token goes to the experts that its router gives most; what they make counts by its probabilities,
    which are not made to sum up to 1: with a single expert no gradient would reach the router."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.active = config.active
        self.router = Router(config)
        self.experts = Experts(config.experts, config.width, 4 * config.width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, seq, width) -> the same, and `imbalance`."""
        probabilities = self.router(x)
        gates, chosen = probabilities.topk(self.active, dim=-1)  # (batch, seq, active)
        tokens = x.flatten(0, 1).repeat_interleave(self.active, dim=0)
        made = self.experts(tokens, chosen.flatten()).view(*chosen.shape, x.shape[-1])
        return (made * gates.unsqueeze(-1)).sum(2), imbalance(probabilities, chosen)


def imbalance(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """Of each sequence: sum over the experts of its part of the choices times its mean probability, times
    their number. 1 where all experts get the same, their number where one gets everything."""
    experts = probabilities.shape[-1]
    share = F.one_hot(chosen, experts).sum(2).to(probabilities.dtype).mean(1) / chosen.shape[-1]
    return experts * (share * probabilities.mean(1)).sum(-1)


class MoEBlock(nn.Module):
    """One layer: attention and experts, each behind a layer norm and inside a residual."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = SparseMLP(config)

    def forward(self, x: Tensor, imbalance: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm_attention(x))
        made, more = self.mlp(self.norm_mlp(x))
        return x + made, imbalance + more


class MoEStage(GPTStage):
    """Consecutive layers. Takes and returns the hidden state and the sum of `imbalance` over the layers so
    far; the first stage takes tokens, the last one returns logits and the sum."""

    block: Callable[[Any], nn.Module] = MoEBlock

    def forward(self, x: Tensor, imbalance: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if self.embedding is not None:
            x = self.embedding(x)
        if imbalance is None:
            imbalance = x.new_zeros(len(x))
        for block in self.layers.values():
            x, imbalance = block(x, imbalance)
        return x if self.head is None else self.head(x), imbalance


def build_stage(config: MoEConfig, stage: int, n_stages: int, seed: int) -> MoEStage:
    """Stage `stage` of `n_stages`; `build_stage(config, 0, 1, seed)` is the whole model."""
    return MoEStage(config, split_layers(config.layers, n_stages)[stage], seed)


def parallelize(stage: MoEStage, mesh: DeviceMesh) -> None:
    """Experts over the ranks of dimension "data"; the heads of attention, and the inner width of each expert,
    over those of "tensor". All else is whole on every rank."""
    for block in stage.layers.values():
        assert isinstance(block, MoEBlock)
        block.mlp.experts.share(mesh)
        if mesh["tensor"].size() > 1:
            plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel()}
            parallelize_module(block.attention, mesh["tensor"], plan)


def loss_fn(config: MoEConfig, outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte, and the mean imbalance of a layer by its weight."""
    logits, imbalance = outputs
    return token_loss(logits, targets) + config.balance / config.layers * imbalance.mean()
