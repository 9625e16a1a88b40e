"""record_destinations with vLLM's own models and loaders: ranks 3 and 4 have the tensor-parallel halves of a
model, with experts shared out over both; ranks 0 to 2 hold its checkpoint, in the uneven shards of FSDP2.
vLLM's kernels are not needed to load. The same with the key mappings of transformers."""

from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from types import SimpleNamespace

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

import meshcast
import torch
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import unique_fill
from torch.distributed.tensor import Shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, VllmConfig
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.utils import initialize_model

GROUP_TIMEOUT = 90.0
TRAINERS, SERVERS = [0, 1, 2], [3, 4]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 130,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
QWEN3_MOE = (
    LLAMA
    | MOE
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 1,  # on both ranks
        "num_experts": 5,  # three and two
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
)
DEEPSEEK_V3 = (
    LLAMA
    | MOE
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 1.0,
    }
)
GEMMA3 = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "sliding_window": 64,
    "rope_theta": 1e4,
    "rope_local_base_freq": 1e4,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"],
}


def checkpoint_of(config: dict) -> dict[str, torch.Tensor]:
    """Names and shapes as Hugging Face has them, with values."""
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    latent, gemma = "kv_lora_rank" in config, "gemma" in config["model_type"]
    experts = config.get("num_experts") or config.get("n_routed_experts") or 0
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}

    def mlp(name: str, wide: int) -> None:
        for part in ("gate_proj", "up_proj"):
            shapes[f"{name}.{part}.weight"] = (wide, hidden)
        shapes[f"{name}.down_proj.weight"] = (hidden, wide)

    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        attention = f"{layer}.self_attn"
        if latent:
            q, low, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
            nope, v = config["qk_nope_head_dim"], config["v_head_dim"]
            shapes |= {
                f"{attention}.q_a_proj.weight": (q, hidden),
                f"{attention}.q_a_layernorm.weight": (q,),
                f"{attention}.q_b_proj.weight": (heads * (nope + rope), q),
                f"{attention}.kv_a_proj_with_mqa.weight": (low + rope, hidden),
                f"{attention}.kv_a_layernorm.weight": (low,),
                f"{attention}.kv_b_proj.weight": (heads * (nope + v), low),
                f"{attention}.o_proj.weight": (hidden, heads * v),
            }
        else:
            for part, count in (("q_proj", heads), ("k_proj", kv), ("v_proj", kv)):
                shapes[f"{attention}.{part}.weight"] = (count * head, hidden)
            shapes[f"{attention}.o_proj.weight"] = (hidden, heads * head)
            if config["model_type"] != "llama":
                shapes |= {f"{attention}.{part}_norm.weight": (head,) for part in "qk"}
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma else []
        shapes |= {f"{layer}.{norm}.weight": (hidden,) for norm in norms}
        if experts and number >= config.get("first_k_dense_replace", 0):
            shapes[f"{layer}.mlp.gate.weight"] = (experts, hidden)
            if latent:
                shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (experts,)
                mlp(f"{layer}.mlp.shared_experts", config["moe_intermediate_size"])
            for expert in range(experts):
                mlp(f"{layer}.mlp.experts.{expert}", config["moe_intermediate_size"])
        else:
            mlp(f"{layer}.mlp", config["intermediate_size"])
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return {name: unique_fill(shape, torch.float32, at) for at, (name, shape) in enumerate(shapes.items())}


class Group(SimpleNamespace):
    """What a loader asks of a process group of vLLM."""

    def __init__(self, rank: int, size: int) -> None:
        group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
        super().__init__(
            rank_in_group=rank,
            rank=rank,
            local_rank=rank,
            world_size=size,
            ranks=list(range(size)),
            is_first_rank=rank == 0,
            is_last_rank=rank == size - 1,
            device_group=group,
            cpu_group=group,
            device_communicator=None,
        )


def model_of(config: dict, rank: int, dtype: torch.dtype) -> torch.nn.Module:
    """vLLM's model, one of two tensor-parallel ranks."""
    whole, alone = Group(rank, len(SERVERS)), Group(0, 1)
    for name in ("_WORLD", "_TP", "_EP", "_ETP"):
        setattr(parallel_state, name, whole)
    for name in ("_PP", "_DP", "_PCP", "_DCP", "_ENGRAM_DP", "_EPLB"):
        setattr(parallel_state, name, alone)
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/config.json", "w") as file:
            json.dump(config | {"torch_dtype": str(dtype).removeprefix("torch.")}, file)
        model_config = ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype=dtype, max_model_len=64, enforce_eager=True
        )
        parallel = ParallelConfig(
            tensor_parallel_size=len(SERVERS),
            enable_expert_parallel="moe_intermediate_size" in config,
            distributed_executor_backend="mp",
        )
        all_ = VllmConfig(
            model_config=model_config,
            parallel_config=parallel,
            cache_config=CacheConfig(),
            device_config=DeviceConfig("cpu"),
        )
        torch.set_default_dtype(dtype)
        try:
            model = initialize_model(all_)
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-7)
    return model


def served(context, config: dict) -> None:
    """The same bits as the whole checkpoint through vLLM's loader, in the model's own memory."""
    rank = context.rank
    fulls = checkpoint_of(config)
    for dtype in (torch.bfloat16, torch.float32):
        held, model = None, None
        if rank in TRAINERS:
            mesh = quiet_mesh(TRAINERS)
            held = {name: sharded(full, mesh, [Shard(0)], rank) for name, full in fulls.items()}
        else:
            model = model_of(config, SERVERS.index(rank), dtype)
        recorded = meshcast.record_destinations(model, names_and_shapes=held)
        assert not recorded.left, recorded.left
        assert not recorded.skipped, recorded.skipped
        result = meshcast.reshard_state_dict(held, recorded, digest=True)
        if model is not None:
            expected = model_of(config, SERVERS.index(rank), dtype)
            expected.load_weights(fulls.items())
            for name, parameter in expected.named_parameters():
                found = result[name].detach().contiguous().view(torch.uint8)
                assert torch.equal(found, parameter.detach().contiguous().view(torch.uint8)), name
                assert result[name] is model.get_parameter(name)


def llama(context) -> None:
    served(context, LLAMA)


def qwen3_moe(context) -> None:
    served(context, QWEN3_MOE)


def deepseek_v3(context) -> None:
    served(context, DEEPSEEK_V3)


def gemma3(context) -> None:
    served(context, GEMMA3)


def _converting(model: torch.nn.Module, weights) -> None:
    """What from_pretrained does with a state dict, in threads: experts are stacked, gate and up fused."""
    mapping = get_model_conversion_mapping(model)
    config = LoadStateDictConfig(weight_mapping=mapping, device_map={"": "cpu"}, dtype=torch.bfloat16)
    convert_and_load_state_dict_in_model(model, dict(weights), config)


def transformers_mappings(context) -> None:
    """The key mappings of transformers: ranks 3 and 4 have a replica each, of tensors that it makes anew."""
    rank = context.rank
    mixture = {key: QWEN3_MOE[key] for key in QWEN3_MOE if key not in ("architectures", "model_type")}
    config = Qwen3MoeConfig(**mixture)
    fulls = checkpoint_of(QWEN3_MOE)
    held = model = None
    if rank in TRAINERS:
        mesh = quiet_mesh(TRAINERS)
        held = {name: sharded(full, mesh, [Shard(0)], rank) for name, full in fulls.items()}
    else:
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    load = None if model is None else partial(_converting, model)
    recorded = meshcast.record_destinations(model, load, held)
    assert not recorded.left, recorded.left
    meshcast.reshard_state_dict(held, recorded, digest=True)
    if model is not None:
        expected = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
        _converting(expected, fulls.items())
        for (name, parameter), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.equal(parameter, wanted), name


CASES = [llama, qwen3_moe, deepseek_v3, gemma3, transformers_mappings]
