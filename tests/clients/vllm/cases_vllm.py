"""vLLM's factories give the engines of meshcast: three trainers with FSDP2, uneven, send their shards to two
workers, each with a model that loads its tensor-parallel part. vLLM's own models need its kernels; the client
that carries the calls of the first trainer to the workers is a store here, where vLLM has HTTP and Ray."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from functools import cached_property
from types import SimpleNamespace

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast.integrations.vllm import MeshcastTrainerInitInfo
from multiproc import llama
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from vllm.distributed.weight_transfer import (
    ModuleSource,
    ParamMeta,
    WeightSource,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)

GROUP_TIMEOUT = 60.0
LEAVE_UP = True  # the last case loses a rank
TRAINERS, WORKERS, VICTIM = 3, 2, 4


class Client:
    """Tells the workers what to call, and waits until each of them has."""

    def __init__(self, context) -> None:
        self._store, self._case, self._calls = context.store, context.case, 0

    def _call(self, name: str, *arguments) -> None:
        self._store.set(f"{self._case} {self._calls}", json.dumps([name, *arguments]))
        for rank in range(WORKERS):
            self._store.wait([f"{self._case} {self._calls} done by {rank}"])
        self._calls += 1

    def init_weight_transfer_engine(self, info: dict) -> None:
        self._call("init", info)

    def start_weight_update(self) -> None:
        self._call("start")

    def update_weights(self, update: dict) -> None:
        self._call("update", update)

    def finish_weight_update(self, weight_version: str | None = None) -> None:  # noqa: ARG002
        self._call("finish")


class Model(torch.nn.Module):
    """A worker's part of the model: the first or second half of the first dimension of each tensor."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.loaded = rank, {}
        self.dies = None

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.loaded[name] = tensor.chunk(WORKERS)[self.rank].clone()
            if self.dies:  # its call has ended, as HTTP's does then
                self.dies()


def worked(context, model: Model, engine, calls: int) -> None:
    """What a worker of vLLM does with the calls that come."""
    for number in range(calls):
        context.store.wait([f"{context.case} {number}"])
        name, *arguments = json.loads(context.store.get(f"{context.case} {number}"))
        try:
            if name == "init":
                engine.init_transfer_engine(engine.parse_init_info(arguments[0]))
            elif name == "update":
                engine.update_weights(arguments[0])
        finally:
            context.store.set(f"{context.case} {number} done by {model.rank}", "")


def engine_of(model: Model):
    parallel = SimpleNamespace(data_parallel_index=0, world_size=WORKERS, rank=model.rank)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    transfer = SimpleNamespace(backend="meshcast")
    return WeightTransferEngineFactory.create_engine(transfer, config, torch.device("cpu"), model)


def trainer_of(context, source: WeightSource, bucket: int):
    if context.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            context.store.set(f"{context.case} port", str(free.getsockname()[1]))
    info = MeshcastTrainerInitInfo(
        host="127.0.0.1",
        port=int(context.store.get(f"{context.case} port")),
        trainers=TRAINERS,
        workers=WORKERS,
        bucket_bytes=bucket,
        timeout=30.0,
        rank=context.rank,
    )
    return WeightTransferTrainerFactory.trainer_init(info, client=Client(context), source=source)


class Whole(WeightSource):
    """One that can only yield whole tensors, as an export of Megatron does."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._inner = ModuleSource(module)

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return self._inner.metadata

    def iter_full(self):
        return self._inner.iter_full()


def sent(context, source_of, bucket: int) -> None:
    module, fulls = llama.filled()
    mesh = DeviceMesh("cpu", list(range(TRAINERS)))
    if context.rank >= TRAINERS:
        model = Model(context.rank - TRAINERS)
        engine = engine_of(model)
        worked(context, model, engine, 7)
        assert sorted(model.loaded) == sorted(name for name, _ in module.named_parameters())
        for name, part in model.loaded.items():
            assert torch.equal(part, 2 * fulls[name].chunk(WORKERS)[model.rank]), name
    else:
        fully_shard(module, mesh=mesh)
        assert module.embed.weight.to_local().shape[0] == (14, 14, 12)[context.rank]
        engine = trainer_of(context, source_of(module), bucket)
        engine.send_weights()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(2)
        engine.send_weights()
    context.wait_for_all("sent", limit=60.0)
    engine.shutdown()


def shards_of_fsdp(context) -> None:
    sent(context, ModuleSource, 3000)


def whole_tensors(context) -> None:
    sent(context, Whole, 1 << 30)


def a_rank_is_lost(context) -> None:
    """A worker, while it loads the first of three buckets."""
    module = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(3)))
    lost = (meshcast.PeerLostError, meshcast.AbortedError)
    if context.rank >= TRAINERS:
        model = Model(context.rank - TRAINERS)
        if context.rank == VICTIM:
            model.dies = lambda: (
                context.store.set(f"{context.case} 2 done by {model.rank}", ""),
                os.kill(os.getpid(), signal.SIGKILL),
            )
        engine = engine_of(model)
        with pytest.raises(lost):
            worked(context, model, engine, 4)
    else:
        engine = trainer_of(context, ModuleSource(module), 1)
        begin = time.monotonic()
        with pytest.raises(lost):
            engine.send_weights()
        assert time.monotonic() - begin < 20
    context.wait_for_all("heard", [0, 1, 2, 3], limit=60.0)
    dist.destroy_process_group()


CASES = [shards_of_fsdp, whole_tensors, a_rank_is_lost]
