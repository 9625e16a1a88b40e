"""Parts of the U-Transformer: residual blocks that know the time, transformer blocks that look at a label.

Every block copes with a batch of size 0, which a rank gets where a micro-batch has fewer samples than ranks.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_GROUPS = 8


class Residual(nn.Module):
    """Two convolutions around the embedding of the time: (batch, c, h, w) -> (batch, out, h, w)."""

    def __init__(self, channels: int, out: int, embedding: int) -> None:
        super().__init__()
        self.norm_in = nn.GroupNorm(_GROUPS, channels)
        self.conv_in = nn.Conv2d(channels, out, 3, padding=1)
        self.embed = nn.Linear(embedding, out)
        self.norm_out = nn.GroupNorm(_GROUPS, out)
        self.conv_out = nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv_in(F.silu(self.norm_in(x)))
        y = y + self.embed(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv_out(F.silu(self.norm_out(y)))


class Attention(nn.Module):
    """Queries of (batch, n, width) on (batch, m, context). Outputs of the projections are ordered by head:
    cut into equal parts, each part is some whole heads."""

    def __init__(self, width: int, context: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(context, 2 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        query = self.query(x)
        heads = query.shape[2] // self.head_width  # of this rank
        q = query.unflatten(2, (heads, self.head_width)).transpose(1, 2)
        k, v = self.key_value(context).unflatten(2, (heads, 2, self.head_width)).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Self-attention over the pixels, cross-attention to the label's tokens, and an MLP."""

    def __init__(self, channels: int, context: int, head_width: int) -> None:
        super().__init__()
        self.norm_self = nn.LayerNorm(channels)
        self.attend_self = Attention(channels, channels, head_width)
        self.norm_cross = nn.LayerNorm(channels)
        self.attend_cross = Attention(channels, context, head_width)
        self.norm_mlp = nn.LayerNorm(channels)
        self.up = nn.Linear(channels, 4 * channels)
        self.down = nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        y = x.view(batch, channels, height * width).transpose(1, 2)
        inner = self.norm_self(y)
        y = y + self.attend_self(inner, inner)
        y = y + self.attend_cross(self.norm_cross(y), context)
        y = y + self.down(F.gelu(self.up(self.norm_mlp(y))))
        return y.transpose(1, 2).reshape(batch, channels, height, width)


def time_waves(time: Tensor, width: int) -> Tensor:
    """Sines and cosines of the time, (batch,) in 0..1 -> (batch, width), as the positions of Vaswani et al.
    2017, section 3.5."""
    half = width // 2
    rates = torch.exp(
        torch.arange(half, dtype=torch.float32, device=time.device) * (-math.log(10_000.0) / half)
    )
    angles = 1000.0 * time[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
