"""GPT-2 of transformers in stages: its own modules, called in their own order."""

import torch
from meshcast.pipelining import PipelineStage
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.masking_utils import create_causal_mask

SEQUENCE = 16
VOCABULARY = 96


def make_model() -> GPT2LMHeadModel:
    """Random weights, the same on every rank. No dropout: one process and many would draw differently."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=4, n_head=2, n_embd=32, n_positions=SEQUENCE, vocab_size=VOCABULARY,
            bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


class Stage(nn.Module):
    """Some blocks; the first stage embeds, the last one projects."""

    def __init__(self, model: GPT2LMHeadModel, stage: int, n_stages: int) -> None:
        super().__init__()
        body, self.config = model.transformer, model.config
        self.first, self.last = stage == 0, stage == n_stages - 1
        cut = [len(body.h) * i // n_stages for i in range(n_stages + 1)]
        self.h = nn.ModuleList(body.h[cut[stage] : cut[stage + 1]])
        if self.first:
            self.wte, self.wpe = body.wte, body.wpe
        if self.last:
            self.ln_f, self.lm_head = body.ln_f, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        mask = create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=None, past_key_values=None
        )
        for block in self.h:
            x = block(x, None, mask)
        return self.lm_head(self.ln_f(x)) if self.last else x


def make_stage(stage: int, n_stages: int, mesh: DeviceMesh) -> PipelineStage:
    """GPT-2 uses one matrix for embedding and head: with several stages both ends share it."""
    module = Stage(make_model(), stage, n_stages)
    name = {0: "wte.weight", n_stages - 1: "lm_head.weight"}.get(stage) if n_stages > 1 else None
    shared = {"embedding": name} if name else None
    return PipelineStage(module, stage, n_stages, torch.device("cpu"), mesh=mesh, shared_parameters=shared)


def whole(model: GPT2LMHeadModel, tokens: Tensor) -> Tensor:
    return model(tokens).logits


def batch(step: int, samples: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Counting from anywhere: something to learn."""
    starts = torch.randint(0, VOCABULARY, (samples, 1), generator=torch.Generator().manual_seed(step))
    tokens = (starts + torch.arange(SEQUENCE + 1)) % VOCABULARY
    return (tokens[:, :-1].contiguous(),), tokens[:, 1:].contiguous()


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
