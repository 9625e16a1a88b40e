"""A small module of Llama's shape, sharded as torch does it: FSDP2 over mesh["dp"], tensor parallelism over
mesh["tp"]."""

from __future__ import annotations

import zlib

import torch
from multiproc.oracle import unique_fill
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

HIDDEN, HEADS, KV_HEADS, HEAD, WIDE, VOCABULARY = 16, 4, 2, 4, 24, 40
COLUMNS = ("q", "k", "v", "gate", "up")
ROWS = ("o", "down")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * HEAD, bias=False)
        self.k = nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False)
        self.v = nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False)
        self.o = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)
        self.register_buffer("inv_freq", torch.arange(HEAD // 2, dtype=torch.float32) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (-1, HEAD)).transpose(-2, -3)
        k = self.k(x).unflatten(-1, (-1, HEAD)).transpose(-2, -3)
        v = self.v(x).unflatten(-1, (-1, HEAD)).transpose(-2, -3)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=-3) for each in (k, v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(attended.transpose(-2, -3).flatten(-2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, WIDE, bias=False)
        self.up = nn.Linear(HIDDEN, WIDE, bias=False)
        self.down = nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), MLP()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def filled() -> tuple[Llama, dict[str, torch.Tensor]]:
    """The module with different small values in every tensor, and copies of these."""
    module = Llama()
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(unique_fill(tensor.shape, tensor.dtype, zlib.crc32(name.encode()) % 50) / 1e5)
    return module, {name: tensor.clone() for name, tensor in module.state_dict().items()}


def sharded_module(module: Llama, mesh: DeviceMesh) -> Llama:
    """In place, on the ranks of the mesh ("dp", "tp")."""
    for block in module.blocks:
        plan = {f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
        plan |= {"attention.o": RowwiseParallel(), "mlp.down": RowwiseParallel()}
        plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    return module
