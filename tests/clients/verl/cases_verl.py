"""verl's registry gives MeshcastCheckpointEngine: two actors with uneven FSDP2 send their weights to three
rollout ranks through it: as CheckpointEngineManager does it, without its Ray actors."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import meshcast
import meshcast.integrations.verl  # as checkpoint_engine.custom_backend_module does
import pytest
import torch
import torch.distributed as dist
from multiproc import llama
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from verl.checkpoint_engine.base import CheckpointEngineRegistry

GROUP_TIMEOUT = 60.0
LEAVE_UP = True  # the last case loses a rank
ACTORS, VICTIM = 2, 4


def together(context, engine) -> None:
    """What the manager does before each step."""
    said: list = [None] * context.world
    dist.all_gather_object(said, engine.prepare())
    kind = CheckpointEngineRegistry.get("meshcast")
    actors, rollouts = kind.build_topology(ACTORS, context.world - ACTORS, said)
    mine, place = (actors, context.rank) if context.rank < ACTORS else (rollouts, context.rank - ACTORS)
    engine.init_process_group(**{name: values[place] for name, values in mine.items()})


def made(context, bucket: int, timeout: float = 30.0):
    return CheckpointEngineRegistry.new(
        "meshcast", bucket_size=bucket, is_master=context.rank == 0, timeout=timeout
    )


async def received(engine) -> dict[str, torch.Tensor]:
    return {name: tensor async for name, tensor in engine.receive_weights()}


def weights_arrive(context) -> None:
    module, fulls = llama.filled()
    mesh = DeviceMesh("cpu", list(range(ACTORS)))
    if context.rank < ACTORS:
        fully_shard(module, mesh=mesh)

    def whole():
        for name, tensor in module.state_dict().items():
            yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).bfloat16()

    for bucket in (1, 3000, 1 << 30):
        engine = made(context, bucket)
        together(context, engine)
        for _ in range(2):
            if context.rank < ACTORS:
                asyncio.run(engine.send_weights(whole()))
                continue
            got = asyncio.run(received(engine))
            assert list(got) == list(fulls)
            for name, full in fulls.items():
                assert torch.equal(got[name], full.bfloat16()), name
        engine.finalize()
        together(context, engine)  # a replica has come or gone


def nothing_to_send(context) -> None:
    engine = made(context, 10)
    together(context, engine)
    if context.rank < ACTORS:
        asyncio.run(engine.send_weights(iter(())))
    else:
        assert asyncio.run(received(engine)) == {}


def a_rank_is_lost(context) -> dict:
    engine = made(context, 1 << 22)
    together(context, engine)

    async def dies() -> None:
        async for _ in engine.receive_weights():
            os.kill(os.getpid(), signal.SIGKILL)

    weights = ((str(i), torch.full((1 << 20,), float(i))) for i in range(8))
    begin = time.monotonic()
    if context.rank == 1:  # an actor that sends nothing
        asyncio.run(engine.send_weights(weights))
    else:
        run = engine.send_weights(weights) if context.rank == 0 else received(engine)
        run = dies() if context.rank == VICTIM else run
        with pytest.raises((meshcast.PeerLostError, meshcast.AbortedError)):
            asyncio.run(run)
    assert time.monotonic() - begin < 20
    context.wait_for_all("heard", [0, 1, 2, 3], limit=60.0)
    dist.destroy_process_group()
    return {}


CASES = [weights_arrive, nothing_to_send, a_rank_is_lost]
