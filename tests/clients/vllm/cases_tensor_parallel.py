"""record_destinations with the tensor-parallel plans of transformers: two ranks train and serve.
from_pretrained makes the model, of DTensors, and what it has loaded is the oracle."""

from __future__ import annotations

import os
import tempfile
from functools import partial

os.environ |= {"HF_HUB_OFFLINE": "1", "WORLD_SIZE": "2"}

import meshcast
import torch
import torch.distributed as dist
from multiproc.meshes import quiet_mesh, sharded
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor, Shard
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

GROUP_TIMEOUT = 90.0
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 70,
    "max_position_embeddings": 64,
}


def loading(model: torch.nn.Module, dtype: torch.dtype, weights) -> None:
    """What from_pretrained does with a checkpoint."""
    config = LoadStateDictConfig(
        weight_mapping=get_model_conversion_mapping(model), device_map={"": "cpu"}, dtype=dtype
    )
    convert_and_load_state_dict_in_model(model, dict(weights), config)


def served(context, kind, config, dtype: torch.dtype) -> None:
    rank = context.rank
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared, 0)
        folder = shared[0]
        kind(config).save_pretrained(folder)  # of rank 0 alone
        dist.barrier()
        expected = kind.from_pretrained(folder, tp_plan="auto", dtype=dtype)
        model = kind.from_pretrained(folder, tp_plan="auto", dtype=dtype)
        fulls = load_file(f"{folder}/model.safetensors")  # as they are saved: each expert by itself
        dist.barrier()
    cut = [n for n, x in model.named_parameters() if isinstance(x, DTensor) and x.to_local().shape != x.shape]
    assert len(cut) > 6, cut
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-7)
    mesh = quiet_mesh([0, 1])
    held = {name: sharded(full, mesh, [Shard(0)], rank) for name, full in fulls.items()}
    recorded = meshcast.record_destinations(model, partial(loading, model, dtype), held)
    assert not recorded.left, recorded.left
    assert not recorded.skipped, recorded.skipped
    memory = {
        name: x.to_local().data_ptr() if isinstance(x, DTensor) else 0 for name, x in model.named_parameters()
    }
    meshcast.reshard_state_dict(held, recorded, digest=True)
    wanted = dict(expected.named_parameters())
    for name, x in model.named_parameters():
        mine, its = (each.to_local() if isinstance(each, DTensor) else each for each in (x, wanted[name]))
        assert torch.equal(mine, its) and mine.dtype == dtype, name
        assert not memory[name] or mine.data_ptr() == memory[name], name
    dist.barrier()


def llama(context) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        served(context, LlamaForCausalLM, LlamaConfig(**SIZES), dtype)


def mixtral(context) -> None:
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    for dtype in (torch.float32, torch.bfloat16):
        served(context, MixtralForCausalLM, config, dtype)


CASES = [llama, mixtral]
