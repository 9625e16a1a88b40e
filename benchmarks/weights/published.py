"""Pairs of layouts that others have published figures for: the shapes of a model's parameters, how trainers
and engines hold them, the hosts, and the figures, each with the document that has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from meshcast import Layout, Topology
from torch.distributed.tensor import Replicate, Shard

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
NIC_GBPS = 400.0  # of each GPU and direction
_REPLICA = Replicate()


class Tensor(NamedTuple):
    """A parameter, under the name that checkpoints give it; the experts of a layer are one, stacked.

    cut: what tensor parallelism does to it: by "rows", by "columns", by rows of heads of keys or values
    ("heads"), or "whole".
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: str
    layer: int  # -1 before the first, and the number of layers after the last

    @property
    def experts(self) -> bool:
        return len(self.shape) == 3

    @property
    def projection(self) -> bool:
        """Whether NeMo-RL moves it from shard to shard: gate, up and down of experts and of dense layers; it
        broadcasts the others whole."""
        return self.name.startswith(("gate_", "up_", "down_"))

    @property
    def resolved(self) -> bool:
        """Whether vLLM has a parameter of its name that tensor parallelism cuts: of the others, parts are
        fused (qkv_proj, gate_up_proj, experts), and norms and routers are whole anyway."""
        return not self.experts and self.name.split(".")[-1] in (
            "q_b_proj",
            "kv_b_proj",
            "o_proj",
            "down_proj",
        )


class Model(NamedTuple):
    name: str
    layers: int
    tensors: tuple[Tensor, ...]
    heads: int  # of keys and values; tensor parallelism over more ranks repeats them


class _Shapes(NamedTuple):
    """Of a mixture of experts; fields of the model's config.json."""

    hidden: int
    layers: int
    dense: int  # of these layers, the first ones without experts
    dense_inner: int
    experts: int
    inner: int
    shared: int  # experts for all tokens, one MLP
    vocabulary: int


def _mlp(
    name: str, hidden: int, inner: int, dtype: torch.dtype, layer: int, *experts: int
) -> Iterator[Tensor]:
    for part in ("gate_proj", "up_proj"):
        yield Tensor(name + part, (*experts, inner, hidden), dtype, "rows", layer)
    yield Tensor(name + "down_proj", (*experts, hidden, inner), dtype, "columns", layer)


_Attention = dict[str, tuple[str, tuple[int, ...]]]  # by name, the cut and the shape


def _model(name: str, s: _Shapes, dtype: torch.dtype, heads: int, attention: _Attention, bias: bool) -> Model:
    """bias: of the router. Matrices of layers have `dtype`, all else is bfloat16. Scales of fp8 are left out:
    two hundredths of a percent of the bytes."""
    found = [Tensor("embed_tokens", (s.vocabulary, s.hidden), BF16, "rows", -1)]
    for layer in range(s.layers):
        for each, (cut, shape) in attention.items():
            found.append(Tensor(each, shape, dtype if len(shape) > 1 else BF16, cut, layer))
        found += [Tensor(each, (s.hidden,), BF16, "whole", layer) for each in ("input_norm", "post_norm")]
        if layer < s.dense:
            found += _mlp("", s.hidden, s.dense_inner, dtype, layer)
            continue
        found.append(Tensor("router", (s.experts, s.hidden), BF16, "whole", layer))
        if bias:
            found.append(Tensor("router_bias", (s.experts,), torch.float32, "whole", layer))
        found += _mlp("", s.hidden, s.inner, dtype, layer, s.experts)
        if s.shared:
            found += _mlp("shared_experts.", s.hidden, s.shared * s.inner, dtype, layer)
    found.append(Tensor("norm", (s.hidden,), BF16, "whole", s.layers))
    found.append(Tensor("lm_head", (s.vocabulary, s.hidden), BF16, "rows", s.layers))
    return Model(name, s.layers, tuple(found), heads)


def latent_attention(name: str, dtype: torch.dtype, s: _Shapes, heads: int) -> Model:
    """DeepSeek-V3 and Kimi K2: ranks 1536 and 512 of queries and of keys and values, heads of 128 with 64 for
    positions. The layer that predicts several tokens is left out."""
    query, key, nope, rope, value = 1536, 512, 128, 64, 128
    attention: _Attention = {
        "q_a_proj": ("whole", (query, s.hidden)), "q_a_norm": ("whole", (query,)),
        "q_b_proj": ("rows", (heads * (nope + rope), query)),
        "kv_a_proj": ("whole", (key + rope, s.hidden)), "kv_a_norm": ("whole", (key,)),
        "kv_b_proj": ("rows", (heads * (nope + value), key)),
        "o_proj": ("columns", (s.hidden, heads * value)),
    }  # fmt: skip
    return _model(name, s, dtype, heads, attention, bias=True)


def grouped_attention(name: str, s: _Shapes, heads: int) -> Model:
    """Qwen3: four heads of keys and values of 128."""
    groups, size = 4, 128
    attention: _Attention = {
        "q_proj": ("rows", (heads * size, s.hidden)), "q_norm": ("whole", (size,)),
        "k_proj": ("heads", (groups * size, s.hidden)), "k_norm": ("whole", (size,)),
        "v_proj": ("heads", (groups * size, s.hidden)), "o_proj": ("columns", (s.hidden, heads * size)),
    }  # fmt: skip
    return _model(name, s, BF16, groups, attention, bias=False)


_DEEPSEEK = _Shapes(7168, 61, 3, 18432, 256, 2048, 1, 129280)
_KIMI = _Shapes(7168, 61, 1, 18432, 384, 2048, 1, 163840)


def deepseek(dtype: torch.dtype) -> Model:
    return latent_attention("DeepSeek-V3", dtype, _DEEPSEEK, 128)


def kimi() -> Model:
    return latent_attention("Kimi K2", FP8, _KIMI, 64)


def qwen_235b() -> Model:
    return grouped_attention("Qwen3-235B", _Shapes(4096, 94, 0, 0, 128, 1536, 0, 151936), 64)


def qwen_30b() -> Model:
    return grouped_attention("Qwen3-30B", _Shapes(2048, 48, 0, 0, 128, 768, 0, 151936), 32)


def rows_of(ranks: range, *lengths: int) -> list:
    """The ranks as a mesh whose inner dimensions have these lengths."""
    found: list = list(ranks)
    for length in reversed(lengths):
        found = [found[first : first + length] for first in range(0, len(found), length)]
    return found


def _cut_dim(tensor: Tensor) -> int:
    return int(tensor.experts) + int(tensor.cut == "columns")


class Side(Protocol):
    """Ranks that hold a model."""

    @property
    def ranks(self) -> range: ...

    def layout(self, tensor: Tensor, model: Model) -> Layout: ...


@dataclass(frozen=True)
class Megatron:
    """Stages of consecutive layers. Tensor parallelism is innermost in a stage, and experts are shared out by
    a mesh of their own over its ranks; what is left of either mesh are replicas."""

    ranks: range
    tensor: int = 1
    context: int = 1
    experts: int = 1
    stages: int = 1

    def layout(self, tensor: Tensor, model: Model) -> Layout:
        stage = min(max(tensor.layer, 0), model.layers - 1) * self.stages // model.layers
        each = len(self.ranks) // self.stages
        ranks = self.ranks[stage * each : (stage + 1) * each]
        if tensor.experts:
            return Layout(rows_of(ranks, self.experts), [_REPLICA, Shard(0)])
        cut = _REPLICA if tensor.cut == "whole" else Shard(_cut_dim(tensor))
        return Layout(rows_of(ranks, self.context, self.tensor), [_REPLICA, _REPLICA, cut])


@dataclass(frozen=True)
class Sharded:
    """FSDP2: rows of every tensor over all ranks, experts by their number."""

    ranks: range

    def layout(self, _tensor: Tensor, _model: Model) -> Layout:
        return Layout(list(self.ranks), [Shard(0)])


@dataclass(frozen=True)
class ShardedInHosts:
    """FSDP inside a host, which is one of many replicas; experts are shared out over the ranks of a host, and
    each is cut by FSDP over the hosts."""

    ranks: range
    per_host: int = 8

    def layout(self, tensor: Tensor, _model: Model) -> Layout:
        hosts = rows_of(self.ranks, self.per_host)
        return Layout(hosts, [Shard(1) if tensor.experts else _REPLICA, Shard(0)])


@dataclass(frozen=True)
class Engine:
    """Replicas of tensor parallelism, as vLLM holds them: a fused tensor is its parts, each cut by itself.
    `experts` above 1 shares experts out over so many ranks instead. tensor=1: every rank has all."""

    ranks: range
    tensor: int = 1
    experts: int = 1

    def layout(self, tensor: Tensor, model: Model) -> Layout:
        if tensor.experts and self.experts > 1:
            return Layout(rows_of(self.ranks, self.experts), [_REPLICA, Shard(0)])
        if tensor.cut == "whole" or self.tensor == 1:
            return Layout(list(self.ranks), [_REPLICA])
        if tensor.cut == "heads" and self.tensor > model.heads:
            mesh = rows_of(self.ranks, model.heads, self.tensor // model.heads)
            return Layout(mesh, [_REPLICA, Shard(0), _REPLICA])
        return Layout(rows_of(self.ranks, self.tensor), [_REPLICA, Shard(_cut_dim(tensor))])


class Hosts(NamedTuple):
    """Equal hosts, or domains of NVLink: rank r is on host r // per_host. Each rank has a NIC."""

    per_host: int
    local_gbps: float

    @property
    def topology(self) -> Topology:
        return Topology.uniform(
            self.per_host, NIC_GBPS, nics_per_host=self.per_host, local_gbps=self.local_gbps
        )


HOPPER = Hosts(8, 3600.0)  # eight GPUs, NVLink of 450 GB/s and direction
RACK = Hosts(64, 7200.0)  # GB200 NVL72, of which 64 GPUs work; NVLink of 900 GB/s


class Pair(NamedTuple):
    """published: by method (`peer_weights.METHODS`), the authors' figure with its document."""

    name: str
    what: str
    model: Model
    trainers: Side
    servers: Side
    hosts: Hosts
    published: dict[str, str]
    methods: tuple[str, ...] = ()  # none: all

    @property
    def together(self) -> bool:
        """Whether the same ranks have both."""
        return bool(set(self.trainers.ranks) & set(self.servers.ranks))


_M2N = "[NCCL M2N's README](https://github.com/NVIDIA/nccl-extensions/blob/main/nccl_m2n/README.md)"
_NEMO = "[NeMo-RL's nccl-reshard-refit](https://docs.nvidia.com/nemo/rl/latest/design-docs/nccl-reshard-refit.html)"
_VERL = "[verl's checkpoint engines](https://github.com/volcengine/verl/blob/main/verl/checkpoint_engine/README.md)"
_KIMI_ENGINE = "[checkpoint-engine's README](https://github.com/MoonshotAI/checkpoint-engine)"
_PERPLEXITY = "[Perplexity](https://research.perplexity.ai/articles/weight-transfer-for-rl-post-training-in-under-2-seconds)"


def pairs() -> list[Pair]:
    return [
        Pair(
            "DeepSeek-V3, 128 to 128 GB200",
            "fp8. Trainers TP1, EP16, PP4, two or 32 replicas; servers TP8, 16 replicas; two racks each",
            deepseek(FP8), Megatron(range(128), experts=16, stages=4), Engine(range(128, 256), 8), RACK,
            {"ring": f"1.447 s ({_M2N})", "unicasts": f"3.838 s, its direct algorithm ({_M2N})"},
        ),
        Pair(
            "Qwen3-235B, 64 to 64 GB200",
            "bfloat16. Trainers TP2, CP2, EP16, PP4; servers TP8, 8 replicas; a rack each",
            qwen_235b(), Megatron(range(64), 2, 2, 16, 4), Engine(range(64, 128), 8), RACK,
            {"ring": f"0.989 s ({_M2N})", "unicasts": f"2.175 s, its direct algorithm ({_M2N})"},
        ),
        Pair(
            "DeepSeek-V3, 256 to 256 H100",
            "bfloat16. Trainers PP16, EP16; servers TP32, 8 replicas; hosts of 8",
            deepseek(BF16), Megatron(range(256), experts=16, stages=16), Engine(range(256, 512), 32), HOPPER,
            {"stripes": f"2.39 to 2.83 s ({_NEMO})"},
        ),
        Pair(
            "Qwen3-30B, 16 to 16 H100",
            "bfloat16. Trainers EP8, PP2; servers TP8, 2 replicas; hosts of 8",
            qwen_30b(), Megatron(range(16), experts=8, stages=2), Engine(range(16, 32), 8), HOPPER,
            {"stripes": f"0.74 to 1.00 s ({_NEMO})"},
        ),
        Pair(
            "Qwen3-30B, 2 to 30 H100",
            "bfloat16. Two trainers of FSDP; 30 servers, each of which takes in everything; four hosts of 8",
            qwen_30b(), Sharded(range(2)), Engine(range(2, 32)), HOPPER,
            {"broadcast": f"about 7 s, 8.25 GB/s ({_VERL})"},
        ),
        Pair(
            "Kimi K2, 256 to 128",
            "cast to fp8 before it travels. Trainers: FSDP inside a host, experts by FSDP over the hosts and "
            "EP8 inside them (EP assumed); servers of EP32, attention of TP8 (assumed); hosts of 8",
            kimi(), ShardedInHosts(range(256)), Engine(range(256, 384), 8, 32), HOPPER,
            {"unicasts": f"1.3 s, with gather and cast ({_PERPLEXITY})"},
        ),
        Pair(
            "Kimi K2, 256 H20, in place",
            "fp8. Each rank of the engines holds a part of the checkpoint in host memory; TP16, 16 replicas; "
            "hosts of 8",
            kimi(), Sharded(range(256)), Engine(range(256), 16), HOPPER,
            {"broadcast": f"16.04 s, with copy to the GPU and reload ({_KIMI_ENGINE})"},
            ("auto", "broadcast"),
        ),
    ]  # fmt: skip
