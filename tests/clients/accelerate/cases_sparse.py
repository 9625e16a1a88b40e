"""Sparse training of transformers' Llama in stages: weights that torch.nn.utils.prune took away stay away,
and all else is as in one process. The first stage is on one rank, the second on two that split samples.

Two ways to keep a mask: torch.nn.utils.prune, whose weight is the product of a parameter and a mask in every
forward; and plain weights, from which a hook of the optimizer takes what a step has put back.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from meshcast.pipelining import PipelineStage, Schedule1F1B, ScheduleEager1F1B, ScheduleGPipe, ScheduleZBH1
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import prune
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import create_causal_mask

VOCABULARY, SEQUENCE, SAMPLES, MICROBATCHES, STEPS = 64, 10, 6, 3, 4
MESHES = [0], [1, 2]
AMOUNT = 0.6
Masks = dict[nn.Module, torch.Tensor]


def llama() -> LlamaForCausalLM:
    """The same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Stage(nn.Module):
    """Half of the layers; the first stage embeds, the last one projects."""

    def __init__(self, model: LlamaForCausalLM, stage: int) -> None:
        super().__init__()
        self.config, self.rotary = model.config, model.model.rotary_emb
        half = len(model.model.layers) // 2
        self.layers = model.model.layers[half * stage : half * (stage + 1)]
        self.embed = model.model.embed_tokens if stage == 0 else nn.Identity()
        self.head = nn.Sequential(model.model.norm, model.lm_head) if stage == 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        places = torch.arange(SEQUENCE).unsqueeze(0)
        mask = create_causal_mask(self.config, x, attention_mask=None, cache=None, position_ids=places)
        turned = self.rotary(x, position_ids=places)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, position_ids=places, position_embeddings=turned)
        return self.head(x)


def linears(module: nn.Module) -> Iterator[nn.Linear]:
    return (each for each in module.modules() if isinstance(each, nn.Linear))


def pruned(model: nn.Module, lasting: bool) -> Masks:
    """lasting: the weights themselves lose what the mask takes; else every forward takes it."""
    masks = {}
    for linear in linears(model):
        prune.l1_unstructured(linear, "weight", AMOUNT)
        masks[linear] = linear.weight_mask.clone()
        if lasting:
            prune.remove(linear, "weight")
    return masks


def optimizer_of(module: nn.Module, masks: Masks, lasting: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)

    def again(*_: object) -> None:
        with torch.no_grad():
            for linear in linears(module):
                linear.weight.mul_(masks[linear])

    if lasting:
        optimizer.register_step_post_hook(again)
    return optimizer


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(0, VOCABULARY, (SAMPLES, 1), generator=torch.Generator().manual_seed(step))
    tokens = (starts + torch.arange(SEQUENCE + 1)) % VOCABULARY
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def one_process(lasting: bool) -> tuple[LlamaForCausalLM, list[float]]:
    model = llama()
    optimizer = optimizer_of(model, pruned(model, lasting), lasting)
    losses = []
    for step in range(STEPS):
        tokens, targets = batch(step)
        loss = loss_fn(model(tokens, use_cache=False).logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def equals_one_process(rank: int, schedule_class: type, *, lasting: bool, **options: object) -> None:
    model = llama()
    masks = pruned(model, lasting)
    meshes = [DeviceMesh("cpu", ranks) for ranks in MESHES]
    mine = int(rank in MESHES[1])
    module = Stage(model, mine)
    stage = PipelineStage(module, mine, 2, torch.device("cpu"), mesh=meshes[mine])
    schedule = schedule_class(stage, MICROBATCHES, loss_fn=loss_fn, **options)
    optimizer = optimizer_of(module, masks, lasting)
    single, expected = one_process(lasting)
    for step in range(STEPS):
        tokens, targets = batch(step)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        schedule.step(*([tokens] if mine == 0 else []), target=targets, losses=losses)
        optimizer.step()
        if mine == 1:
            torch.testing.assert_close(
                torch.stack(losses).mean().item(), expected[step], rtol=1e-5, atol=1e-5
            )
    assert expected[-1] < expected[0]
    reference = dict(Stage(single, mine).named_parameters())
    assert {name for name, _ in module.named_parameters()} == set(reference)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter, reference[name], rtol=1e-4, atol=1e-5, msg=name)
    for linear in linears(module):
        mask = masks[linear]
        kept = linear.weight if lasting else linear.weight_orig * linear.weight_mask
        assert not kept[mask == 0].any()
        assert kept[mask == 1].all()
        assert (mask == 0).float().mean().item() == pytest.approx(AMOUNT, abs=0.01)


def masks_in_every_forward_gpipe(context) -> None:
    equals_one_process(context.rank, ScheduleGPipe, lasting=False)


def masks_in_every_forward_1f1b(context) -> None:
    equals_one_process(context.rank, Schedule1F1B, lasting=False)


def masks_in_every_forward_delayed(context) -> None:
    equals_one_process(context.rank, ScheduleEager1F1B, lasting=False, delay_weight_grad=True)


def masks_in_every_forward_zbh1(context) -> None:
    equals_one_process(context.rank, ScheduleZBH1, lasting=False)


def masks_after_the_step_1f1b(context) -> None:
    equals_one_process(context.rank, Schedule1F1B, lasting=True)


def masks_after_the_step_zbh1(context) -> None:
    equals_one_process(context.rank, ScheduleZBH1, lasting=True)


CASES = [
    masks_in_every_forward_gpipe,
    masks_in_every_forward_1f1b,
    masks_in_every_forward_delayed,
    masks_in_every_forward_zbh1,
    masks_after_the_step_1f1b,
    masks_after_the_step_zbh1,
]
