"""Inference engines with tensor and expert parallelism, whose loaders work as those of vLLM do: each rank
gets every whole tensor of the checkpoint, and cuts, fuses, stacks and pads what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from multiproc.oracle import unique_fill
from torch import nn

Weights = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. experts 0: dense; latent 0: attention as Llama has it, else DeepSeek's."""

    layers: int = 2
    hidden: int = 12
    heads: int = 4
    kv_heads: int = 2
    head: int = 4
    wide: int = 8
    vocabulary: int = 26
    experts: int = 0
    latent: int = 0
    dense_layers: int = 0
    tied: bool = False
    bias: bool = False

    def is_moe(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.dense_layers

    def checkpoint(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes, as Hugging Face has them."""
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            own = {f"self_attn.{name}": shape for name, shape in self._attention().items()}
            own |= {
                "input_layernorm.weight": (self.hidden,),
                "post_attention_layernorm.weight": (self.hidden,),
            }
            if self.is_moe(layer):
                own["mlp.gate.weight"] = (self.experts, self.hidden)
                for expert in range(self.experts):
                    own |= self._mlp(f"mlp.experts.{expert}.")
                own |= self._mlp("mlp.shared_expert.") if self.latent else {}
            else:
                own |= self._mlp("mlp.")
            found |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
        found["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            found["lm_head.weight"] = (self.vocabulary, self.hidden)
        return found

    def _attention(self) -> dict[str, tuple[int, ...]]:
        if self.latent:
            return {
                "q_a_proj.weight": (self.latent, self.hidden),
                "q_b_proj.weight": (self.heads * self.head, self.latent),
                "kv_a_proj_with_mqa.weight": (self.latent + 2, self.hidden),
                "kv_b_proj.weight": (self.heads * self.head * 2, self.latent),
                "o_proj.weight": (self.hidden, self.heads * self.head),
            }
        sizes = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        found: dict[str, tuple[int, ...]] = {
            f"{name}.weight": (n * self.head, self.hidden) for name, n in sizes.items()
        }
        if self.bias:
            found |= {f"{name}.bias": (n * self.head,) for name, n in sizes.items()}
        return found | {"o_proj.weight": (self.hidden, self.heads * self.head)}

    def _mlp(self, prefix: str) -> dict[str, tuple[int, ...]]:
        return {
            f"{prefix}gate_proj.weight": (self.wide, self.hidden),
            f"{prefix}up_proj.weight": (self.wide, self.hidden),
            f"{prefix}down_proj.weight": (self.hidden, self.wide),
        }

    def values(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """A checkpoint."""
        shapes = self.checkpoint().items()
        return {
            name: unique_fill(shape, torch.float32, at).to(dtype) for at, (name, shape) in enumerate(shapes)
        }


class Engine(nn.Module):
    """One rank's part. tp: tensor parallelism; experts are shared out over the same ranks. Device and dtype
    are torch's defaults."""

    def __init__(self, shape: Shape, tp_rank: int, tp: int, *, pad_to: int = 8) -> None:
        super().__init__()
        self.shape, self.tp_rank, self.tp = shape, tp_rank, tp
        self.loaders: dict[str, Callable[..., None]] = {}
        padded = -(-shape.vocabulary // pad_to) * pad_to
        assert padded % tp == 0
        self.rows = padded // tp  # of the vocabulary
        self._add("model.embed_tokens.weight", (self.rows, shape.hidden), self._load_vocabulary)
        for layer in range(shape.layers):
            self._add_layer(f"model.layers.{layer}.", layer)
        self._add("model.norm.weight", (shape.hidden,))
        if not shape.tied:
            self._add("lm_head.weight", (self.rows, shape.hidden), self._load_vocabulary)

    def _add(self, name: str, shape: tuple[int, ...], loader: Callable[..., None] | None = None) -> None:
        parameter = nn.Parameter(
            torch.full(shape, -7.0) if shape else torch.tensor(-7.0), requires_grad=False
        )
        self.register_parameter(name.replace(".", "/"), parameter)
        self.loaders[name] = loader or self._load_whole

    def get(self, name: str) -> nn.Parameter:
        return getattr(self, name.replace(".", "/"))

    def _add_layer(self, name: str, layer: int) -> None:
        shape, tp = self.shape, self.tp
        heads, kv = shape.heads // tp, max(shape.kv_heads // tp, 1)
        if shape.latent:
            fused = 2 * shape.latent + 2
            self._add(f"{name}self_attn.fused_qkv_a_proj.weight", (fused, shape.hidden), self._load_latent)
            self._add(f"{name}self_attn.q_b_proj.weight", (heads * shape.head, shape.latent), self._load_rows)
            self._add(
                f"{name}self_attn.kv_b_proj.weight", (heads * shape.head * 2, shape.latent), self._load_rows
            )
        else:
            rows = (heads + 2 * kv) * shape.head
            self._add(f"{name}self_attn.qkv_proj.weight", (rows, shape.hidden), self._load_qkv)
            if shape.bias:
                self._add(f"{name}self_attn.qkv_proj.bias", (rows,), self._load_qkv)
        self._add(f"{name}self_attn.o_proj.weight", (shape.hidden, heads * shape.head), self._load_columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            self._add(f"{name}{norm}.weight", (shape.hidden,))
        if not shape.is_moe(layer):
            self._add_mlp(f"{name}mlp.")
            return
        self._add(f"{name}mlp.gate.weight", (shape.experts, shape.hidden))
        local = len(self._experts())
        self._add(f"{name}mlp.experts.w13_weight", (local, 2 * shape.wide, shape.hidden), self._load_expert)
        self._add(f"{name}mlp.experts.w2_weight", (local, shape.hidden, shape.wide), self._load_expert)
        if shape.latent:
            self._add_mlp(f"{name}mlp.shared_expert.")

    def _add_mlp(self, name: str) -> None:
        wide = self.shape.wide // self.tp
        self._add(f"{name}gate_up_proj.weight", (2 * wide, self.shape.hidden), self._load_merged)
        self._add(f"{name}down_proj.weight", (self.shape.hidden, wide), self._load_columns)

    def _experts(self) -> range:
        """Experts of this rank; the first ranks have one more where they do not divide."""
        each, more = divmod(self.shape.experts, self.tp)
        begin = self.tp_rank * each + min(self.tp_rank, more)
        return range(begin, begin + each + (self.tp_rank < more))

    def load_weights(self, weights: Weights) -> set[str]:
        fused = [
            ("qkv_proj", "q_proj", "q"),
            ("qkv_proj", "k_proj", "k"),
            ("qkv_proj", "v_proj", "v"),
            ("gate_up_proj", "gate_proj", 0),
            ("gate_up_proj", "up_proj", 1),
            ("fused_qkv_a_proj", "q_a_proj", 0),
            ("fused_qkv_a_proj", "kv_a_proj_with_mqa", 1),
        ]
        loaded = set()
        for name, weight in weights:
            if "rotary_emb.inv_freq" in name:
                continue
            if ".experts." in name:
                before, _, rest = name.partition(".experts.")
                expert, part, _ = rest.split(".")
                if int(expert) not in self._experts():
                    continue
                into = "w2" if part == "down_proj" else "w13"
                target = f"{before}.experts.{into}_weight"
                self.loaders[target](self.get(target), weight, int(expert), part)
                loaded.add(target)
                continue
            for into, part, shard in fused:
                if f".{part}." in name:
                    target = name.replace(part, into)
                    self.loaders[target](self.get(target), weight, shard)
                    loaded.add(target)
                    break
            else:
                self.loaders[name](self.get(name), weight)
                loaded.add(name)
        return loaded

    def _load_whole(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        assert parameter.shape == weight.shape
        parameter.data.copy_(weight)

    def _load_vocabulary(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        assert weight.shape[0] == self.shape.vocabulary
        begin = min(self.tp_rank * self.rows, self.shape.vocabulary)
        end = min(begin + self.rows, self.shape.vocabulary)
        weight = weight.narrow(0, begin, end - begin)
        parameter[: weight.shape[0]].data.copy_(weight)
        parameter[weight.shape[0] :].data.fill_(0)

    def _load_rows(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        rows = parameter.data.shape[0]
        parameter.data.copy_(weight.narrow(0, self.tp_rank * rows, rows))

    def _load_columns(self, parameter: nn.Parameter, weight: torch.Tensor) -> None:
        columns = parameter.data.shape[1]
        parameter.data.copy_(weight.narrow(1, self.tp_rank * columns, columns))

    def _load_merged(self, parameter: nn.Parameter, weight: torch.Tensor, shard: int) -> None:
        rows = parameter.data.shape[0] // 2
        place = parameter.data.narrow(0, shard * rows, rows)
        place.copy_(weight.narrow(0, self.tp_rank * rows, rows))

    def _load_latent(self, parameter: nn.Parameter, weight: torch.Tensor, shard: int) -> None:
        parameter.data.narrow(0, shard * self.shape.latent, weight.shape[0]).copy_(weight)

    def _load_qkv(self, parameter: nn.Parameter, weight: torch.Tensor, shard: str) -> None:
        """Key heads are on several ranks where there are fewer than ranks."""
        shape = self.shape
        heads, kv = shape.heads // self.tp, max(shape.kv_heads // self.tp, 1)
        begin = {"q": 0, "k": heads, "v": heads + kv}[shard] * shape.head
        size = (heads if shard == "q" else kv) * shape.head
        at = self.tp_rank if shard == "q" else self.tp_rank * shape.kv_heads // max(self.tp, shape.kv_heads)
        parameter.data.narrow(0, begin, size).copy_(weight.narrow(0, at * size, size))

    def _load_expert(self, parameter: nn.Parameter, weight: torch.Tensor, expert: int, part: str) -> None:
        place = parameter.data[expert - self._experts().start]
        if part != "down_proj":
            place = place.narrow(0, self.shape.wide * (part == "up_proj"), self.shape.wide)
        place.copy_(weight)


LLAMA = Shape()
BIASED = Shape(kv_heads=1, bias=True)  # one key head on several ranks
MOE = Shape(experts=5)
DEEPSEEK = Shape(layers=3, experts=4, latent=6, dense_layers=1)
GEMMA = Shape(kv_heads=4, tied=True, vocabulary=30)
SHAPES = {"llama": LLAMA, "biased": BIASED, "moe": MOE, "deepseek": DEEPSEEK, "gemma": GEMMA}
