"""The rollout side: the model in bfloat16 with another cut, which takes in weights and writes text."""

import torch
from gpt.config import ModelConfig
from gpt.data import TextSamples, read_text
from gpt.model import build_stage, loss_fn, parallelize
from gpt.sample import continue_text
from meshcast import WeightSync
from torch.distributed.device_mesh import DeviceMesh

from weight_sync.weights import Destinations

PROMPT = b"def "
LENGTH = 48
TEMPERATURE = 0.7  # the likeliest byte would be a blank again and again
HELD_OUT_BATCH = 16


class Rollout:
    """A GPT whose layers are shared over the ranks of `mesh`: tensor parallelism."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: DeviceMesh,
        destinations: Destinations,
        seed: int,
    ) -> None:
        self.samples = TextSamples(read_text(None), config.seq_len, seed)
        self.module = build_stage(config, 0, 1, seed).to(torch.bfloat16).eval()
        parallelize(self.module, mesh)
        # One buffer, and that is the model: all ranks take in each version together, between two texts. With
        # two they would get it in the background, each for itself, and could be a version apart.
        own = {name: parameter.detach() for name, parameter in self.module.named_parameters()}
        self.sync = WeightSync(None, destinations, buffers=1, out=own)

    def receive(self, version: int) -> int:
        """Takes in that version, or a later one; returns which."""
        return self.sync.pull(version)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        (inputs,), targets = self.samples.held_out(0, HELD_OUT_BATCH)
        return loss_fn(self.module(inputs), targets).item()

    def text(self) -> str:
        """A continuation drawn with the same luck for every version, so that what changes is what was learnt.
        Alike on all ranks: they draw each byte together, from logits that are equal on all of them."""
        drawn = continue_text(self.module, PROMPT, LENGTH, temperature=TEMPERATURE, seed=0)
        return drawn.decode(errors="replace")
