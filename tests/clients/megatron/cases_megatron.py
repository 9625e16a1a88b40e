"""swap_model_weights of Megatron Core with MeshcastCopyService: a GPT of tensor-parallel degree 2 (ranks 0, 1
and a replica on 2, 3) into one of degree 4, and into four replicas of degree 1. The oracle is the whole
weights, cut as Megatron's parameters say."""

from __future__ import annotations

import os
import signal
import time
import zlib

import meshcast
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.resharding.refit import swap_model_weights
from megatron.core.transformer.transformer_config import TransformerConfig
from meshcast.integrations.megatron import MeshcastCopyService

GROUP_TIMEOUT = 60.0
LEAVE_UP = True  # the last case loses a rank
VICTIM = 3
# 0.19 waits for a GPU, which there is none of, after each run.
torch.cuda.synchronize = lambda *_: None


def model(degree: int, dtype: torch.dtype) -> GPTModel:
    """Parameters of Megatron on `degree` ranks, replicas on the others. Their values are noise."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(degree, create_gloo_process_groups=False)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=degree,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gated_linear_unit=True,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=64,
        max_sequence_length=16,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def whole(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=random).to(dtype)


def part(name: str, parameter: torch.Tensor, degree: int, rank: int) -> torch.Tensor:
    """What this rank holds of the whole tensor. partition_stride 2: gate and up are cut each by itself."""
    shape = list(parameter.shape)
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole(name, parameter.shape, parameter.dtype)
    dim, stride = parameter.partition_dim, parameter.partition_stride
    shape[dim] *= degree
    pieces = whole(name, torch.Size(shape), parameter.dtype).chunk(degree * stride, dim)
    return torch.cat([pieces[k * degree + rank % degree] for k in range(stride)], dim)


def filled(degree: int, dtype: torch.dtype, rank: int) -> GPTModel:
    made = model(degree, dtype)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(part(name, parameter, degree, rank))
    return made


def refit(context, to: int, dtype: torch.dtype) -> dict:
    source, target = filled(2, dtype, context.rank), model(to, dtype)
    service = MeshcastCopyService(timeout=30)
    for _ in range(2):  # the second time all is compiled
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.fill_(-1)
        swap_model_weights(source, target, refit_method=service)
        names = []
        for name, parameter in target.named_parameters():
            assert torch.equal(parameter, part(name, parameter, to, context.rank)), name
            names.append(name)
        assert len(names) > 12
    return {"names": len(names)}


def degree_2_to_4(context) -> dict:
    return refit(context, 4, torch.float32)


def degree_2_to_replicas(context) -> dict:
    return refit(context, 1, torch.bfloat16)


def equal_sends_are_one(context) -> None:
    """Rank 0 sends one tensor to three ranks, from memory of its own for each: its host sends it once."""
    from meshcast.integrations import megatron

    x = torch.arange(1000.0) if context.rank == 0 else torch.zeros(1000)
    service = MeshcastCopyService()
    sends = [(x.clone(), rank, None) for rank in (1, 2, 3)] + [(x + 1, 1, 9), (x.clone(), 1, 8)]
    assert [[rank for rank, _ in sent.to] for sent in megatron._merged(sends)] == [[1, 2, 3], [1], [1]]
    x = torch.full((4,), float("nan"))
    assert len(megatron._merged([(x, 1, None), (x.clone(), 2, None)])) == 1  # by bits
    assert len(megatron._merged([(torch.zeros(4), 1, None), (-torch.zeros(4), 2, None)])) == 2
    got = torch.zeros(1000)
    if context.rank == 0:
        for tensor, rank, _ in sends[:3]:
            service.submit_send(tensor, rank)
    else:
        service.submit_recv(got, 0)
    service.run()
    assert context.rank == 0 or torch.equal(got, torch.arange(1000.0))


def what_does_not_match(context) -> None:
    """All ranks hear of it, nothing moves, and the next run is right."""
    service, x = MeshcastCopyService(), torch.ones(3)
    cases = {
        "no receive": lambda: service.submit_send(x, 1) if context.rank == 0 else None,
        "does not send it": lambda: service.submit_recv(x, 0) if context.rank == 1 else None,
        "which receives": lambda: (
            service.submit_send(x, 1)
            if context.rank == 0
            else service.submit_recv(torch.zeros(4), 0)
            if context.rank == 1
            else None
        ),
    }
    for text, submit in cases.items():
        submit()
        with pytest.raises(meshcast.PlanMismatchError, match=text):
            service.run()
    got = torch.zeros(3)
    if context.rank == 0:
        service.submit_send(x, 1)
    if context.rank == 1:
        service.submit_recv(got, 0)
    service.run()
    assert context.rank != 1 or bool((got == 1).all())


def a_rank_is_lost(context) -> dict:
    """In the middle of a run: after all have said what they send, and before its own tensors move."""
    service, x = MeshcastCopyService(timeout=30), torch.full((1 << 20,), float(context.rank))
    got = torch.zeros(1 << 20)
    service.submit_send(x, (context.rank + 1) % 4)
    service.submit_recv(got, (context.rank - 1) % 4)
    if context.rank == VICTIM:
        from meshcast.integrations import megatron

        megatron._matched = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises((meshcast.PeerLostError, meshcast.AbortedError)) as caught:
        service.run()
    assert time.monotonic() - begin < 20
    assert f"rank {VICTIM}" in str(caught.value)
    dist.destroy_process_group()
    return {"text": str(caught.value)}


CASES = [degree_2_to_4, degree_2_to_replicas, equal_sends_are_one, what_does_not_match, a_rank_is_lost]
