"""prepare_pippy of accelerate: transformers' Llama, and a module that takes keywords; run by torchrun.

    program.py torch|meshcast

Compares what comes out with one process, and prints a line of JSON for each case: whose schedule it was, and
the largest difference, null on ranks that get nothing.
"""

from __future__ import annotations

import json
import sys

import torch
from accelerate import PartialState
from accelerate.inference import prepare_pippy
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

PACKAGE = sys.argv[1]
if PACKAGE == "meshcast":
    import meshcast.integrations.accelerate  # noqa: F401

VOCABULARY, SEQUENCE = 96, 12


class Head(nn.Module):
    """Of the logits alone: what a pipeline hands on are tensors."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model, self.lm_head = model.model, model.lm_head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(tokens, use_cache=False).last_hidden_state)


class Scaled(nn.Module):
    """accelerate gives what the model is called with to its first stage alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = x * scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def tokens(samples: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (samples, SEQUENCE), generator=torch.Generator().manual_seed(samples))


def compare(name: str, model: nn.Module, given: dict, args: tuple, kwargs: dict) -> None:
    """given: for prepare_pippy. Of a batch that has to be padded the first rows count."""
    samples = len((*args, *kwargs.values())[0])
    with torch.no_grad():
        expected = model(*args, **kwargs)
        prepared = prepare_pippy(model, **given)
        home = type(prepared.pippy_stage).__module__
        for _ in range(2):
            out = prepared(*args, **kwargs)
    far = None if out is None else (out[:samples] - expected).abs().max().item()
    print(json.dumps({"case": name, "home": home, "far": far}), flush=True)


def main() -> None:
    state = PartialState(cpu=True)
    ranks = state.num_processes
    example_args = (tokens(1),)  # accelerate pads what has not one sample for each micro-batch
    auto = {"example_args": example_args, "no_split_module_classes": ["LlamaDecoderLayer"]}
    compare("layers by themselves", Head(llama()), auto, (tokens(ranks),), {})
    cut = {"example_args": example_args, "split_points": [f"model.layers.{i}" for i in range(1, ranks)]}
    # Not gather_output=: accelerate 1.15 gives torch.zeros a tensor for a size.
    compare("one more micro-batch", Head(llama()), cut | {"num_chunks": ranks + 1}, (tokens(ranks + 1),), {})
    compare("padded", Head(llama()), cut, (tokens(ranks - 1),), {})
    torch.manual_seed(1)
    values = {"x": torch.randn(ranks, 16), "scale": torch.rand(ranks, 1)}
    example = {name: value[:1] for name, value in values.items()}
    named = {"example_kwargs": example, "split_points": [f"layers.{i}" for i in range(1, ranks)]}
    compare("by keywords", Scaled(), named, (), values)
    state.destroy_process_group()


if __name__ == "__main__":
    main()
