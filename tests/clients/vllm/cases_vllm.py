"""vLLM's factories give the engines of meshcast: three trainers with FSDP2, uneven, send their shards to two
workers, each with a model that loads its tensor-parallel part. vLLM's own models need its kernels; the client
that carries the calls of the first trainer to the workers is a store here, where vLLM has HTTP and Ray."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import nullcontext
from functools import cached_property
from types import SimpleNamespace

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast.integrations.vllm import MeshcastTrainerInitInfo, StateSource
from multiproc import llama
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import unique_fill
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from vllm.distributed.weight_transfer import (
    ModuleSource,
    ParamMeta,
    WeightSource,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.m2n_common import expected_local_shape, m2n_param_meta
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

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


def worked(context, model: Model, engine, calls: int, first: int = 0) -> None:
    """What a worker of vLLM does with the calls that come."""
    for number in range(first, first + calls):
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


def sources_as_states(context) -> None:
    """vLLM's own source, and one of whole tensors, as the state of a call and of a WeightSync."""
    module, fulls = llama.filled()
    workers = [TRAINERS + each for each in range(WORKERS)]
    where = None
    if context.rank in workers:
        where = {name: (quiet_mesh(workers), [Shard(0)]) for name, _ in module.named_parameters()}
    else:
        fully_shard(module, mesh=DeviceMesh("cpu", list(range(TRAINERS))))
    for source in (ModuleSource(module), Whole(module)) if where is None else (None, None):
        received = meshcast.reshard_state_dict(source, where, digest=True)
        for name in where or ():
            part = fulls[name].chunk(WORKERS)[context.rank - TRAINERS]
            assert torch.equal(received[name].to_local(), part), name
        with meshcast.WeightSync(source, where, timeout=30) as sync:
            for version in (1, 2):
                if where is None:
                    sync.push(version)
                else:
                    assert sync.pull(version) == version
                    part = fulls["embed.weight"].chunk(WORKERS)[context.rank - TRAINERS]
                    assert torch.equal(sync.state["embed.weight"].to_local(), part)


def states_of_meshcast(context) -> None:
    """The engine sends a StateSource as vLLM's own sources."""
    group = trainers_of(context)
    sent(context, lambda module: StateSource(lambda: dict(module.named_parameters()), group=group), 3000)


def trainers_of(context) -> dist.ProcessGroup | None:
    """Their group, made by all ranks; None on the workers."""
    group = dist.new_group(list(range(TRAINERS)))
    return group if context.rank < TRAINERS else None


def as_vllm_has_it(context) -> None:
    """A StateSource describes and yields a model as ModuleSource does, and passes the checks of vLLM's
    engines for NCCL."""
    group = trainers_of(context)
    if group is None:
        return
    module, fulls = llama.filled()
    fully_shard(module, mesh=DeviceMesh("cpu", list(range(TRAINERS))))
    fulls |= dict(module.named_buffers())  # in a state_dict, and not in vLLM's own source
    for state in (module, module.state_dict(), lambda: dict(module.named_parameters())):
        theirs, source = ModuleSource(module), StateSource(state, group=group, bucket_bytes=2000)
        buffers = [meta for meta in source.metadata if meta.name in dict(module.named_buffers())]
        assert [meta for meta in source.metadata if meta not in buffers] == theirs.metadata
        assert all(meta.owners is None for meta in buffers) and len(buffers) in (0, 2)
        assert source.owned_names(context.rank) == [meta.name for meta in source.metadata]
        for _ in range(2):
            full = dict(NCCLTrainerWeightTransferEngine._checked_iter(source, source.metadata))
            assert all(torch.equal(full[name], fulls[name]) for name in full)
            its = dict(theirs.iter_local())
            for (name, mine), meta in zip(source.iter_local(), source.metadata, strict=True):
                assert name == meta.name and torch.equal(mine, its.get(name, fulls[name]))
    with torch.no_grad():  # the next iteration has what the tensors are then
        module.embed.weight.add_(1)
    assert torch.equal(dict(source.iter_full())["embed.weight"], fulls["embed.weight"] + 1)
    even = torch.nn.Linear(4, 6)  # which the engine for M2N asks for
    fully_shard(even, mesh=DeviceMesh("cpu", list(range(TRAINERS))))
    source = StateSource(even, group=group)
    for (_, mine), meta in zip(source.iter_local(), source.metadata, strict=True):
        assert tuple(mine.shape) == expected_local_shape(m2n_param_meta(meta, TRAINERS))


def states_of_all_kinds(context) -> None:
    """Sub-meshes, strided and partial shards, plain tensors with a layout, stages of a pipeline, maps and a
    narrower type."""
    group, rank = trainers_of(context), context.rank
    if group is None:
        return
    mesh, pair = quiet_mesh([0, 1, 2]), quiet_mesh([2, 0])
    fulls = {
        name: unique_fill(shape, torch.float32, at)
        for at, (name, shape) in enumerate(
            {"q": (6, 4), "k": (3, 4), "pair": (5, 2), "total": (2, 2), "own": (4, 4), "norm": (3,)}.items()
        )
    }
    state = {name: sharded(fulls[name], mesh, [Shard(0)], rank) for name in ("q", "k")}
    if rank != 1:  # names of one stage alone
        state["pair"] = sharded(fulls["pair"], pair, [Shard(0)], rank)
    part = fulls["total"] if rank == 0 else torch.zeros(2, 2)
    state["total"] = DTensor.from_local(part.clone(), mesh, [Partial()], run_check=False)
    rows = [[0, 2], [1, 3], []][rank]
    layout = meshcast.Layout.from_boxes(
        {r: [((row, row + 1), (0, 4)) for row in rows] for r, rows in ((0, [0, 2]), (1, [1, 3]))}
    )
    if rank < 2:
        state["own"] = fulls["own"][rows].clone()
    state["norm"] = fulls["norm"].clone()
    state["steps"] = 3  # no tensor
    layouts = {"own": (layout, (4, 4))} if rank < 2 else None
    qk = meshcast.TensorMap(["q", "k"], "qk", groups=3)
    for dtype in (None, torch.bfloat16):
        source = StateSource(state, maps=[qk], dtype=dtype, layouts=layouts, group=group, bucket_bytes=60)
        by_groups = zip(fulls["q"].chunk(3), fulls["k"].chunk(3), strict=True)
        expected = {"qk": torch.cat([x for both in by_groups for x in both])}
        expected |= {name: fulls[name] for name in ("pair", "total", "own", "norm")}
        expected = {name: x.to(dtype or x.dtype) for name, x in expected.items()}
        metadata = source.metadata
        assert [m.name for m in metadata] == [*expected]
        assert {m.name: (m.dtype, m.shape) for m in metadata} == {
            n: (x.dtype, tuple(x.shape)) for n, x in expected.items()
        }
        assert [m.owners for m in metadata if m.name == "pair"] == [(2, 0)]
        assert ("pair" in source.owned_names(rank)) == (rank != 1)
        for owned in (dict(source.iter_full()), dict(source.iter_local())):
            assert [*owned] == source.owned_names(rank)
            for name, x in owned.items():
                full = expected[name]
                if name == "pair" and x.shape != full.shape:
                    full = full.chunk(2)[0 if rank == 2 else 1]
                assert torch.equal(x, full) and x.dtype == full.dtype, name


def refused_states(context) -> None:
    """All ranks raise where one has a state that cannot be described, or another than at first."""
    group, rank = trainers_of(context), context.rank
    if group is None:
        return
    kinds = (meshcast.LayoutError, meshcast.PlanMismatchError)
    good = {"w": torch.ones(4, 2), "v": torch.ones(3)}
    with pytest.raises(kinds, match=r"state must be a mapping|a WeightSource already"):
        StateSource([3, ModuleSource(torch.nn.Linear(2, 2))][rank % 2] if rank else good, group=group)
    with pytest.raises(kinds, match=r"'v' is torch\.float32"):
        StateSource(good if rank else good | {"v": torch.ones(4)}, group=group)
    with pytest.raises(kinds, match="does not fit"):
        StateSource(good, maps=[meshcast.TensorMap(["w", "u"], "wu")], group=group)
    state = {"w": sharded(torch.ones(4, 2), quiet_mesh([0, 1, 2]), [Shard(0)], rank)}
    source = StateSource(lambda: state, group=group)
    state["w"] = sharded(torch.ones(5, 2), quiet_mesh([0, 1, 2]), [Shard(0)], rank)
    with pytest.raises(meshcast.LayoutError, match="make it again"):
        list(source.iter_full())
    with pytest.raises(meshcast.LayoutError, match="make it again") if rank == 2 else nullcontext():
        list(source.iter_local())  # 2, 2 and 0 rows were to be yielded, of 2, 2 and 1


class Broken(ModuleSource):
    """One that yields other tensors than its metadata has."""

    change = None

    def iter_local(self):
        for number, (name, x) in enumerate(super().iter_local()):
            if number == 2:
                name, x = self.change(name, x)
            yield name, x


def broken_sources(context) -> None:
    """A trainer's source that does not fit: all trainers and workers raise in that bucket, and the next
    round works."""

    def fails(*_):
        raise RuntimeError("disk full")

    module, fulls = llama.filled()
    changes = [lambda name, x: (name, x.double()), lambda _, x: ("other", x), fails]
    texts = ["yields torch.float64", "yields 'other'", "disk full"]
    lost = (meshcast.MeshcastError,)
    if context.rank >= TRAINERS:
        model = Model(context.rank - TRAINERS)
        engine = engine_of(model)
        worked(context, model, engine, 1)
        for number, text in enumerate([*texts, "metadata"]):
            with pytest.raises(lost, match=text):
                worked(context, model, engine, 2, first=1 + 2 * number)
            assert len(model.loaded) <= 2
        worked(context, model, engine, 3, first=1 + 2 * (len(texts) + 1))
        for name, part in model.loaded.items():
            assert torch.equal(part, fulls[name].chunk(WORKERS)[model.rank]), name
    else:
        fully_shard(module, mesh=DeviceMesh("cpu", list(range(TRAINERS))))
        source = Broken(module)
        engine = trainer_of(context, source, 1)
        for change, text in zip(changes, texts, strict=True):
            source.change = change if context.rank == 1 else lambda name, x: (name, x)
            with pytest.raises(lost, match=text):
                engine.send_weights()
        if context.rank == 2:  # other metadata than the others'
            source.metadata = source.metadata[:-1]
        source.change = lambda name, x: (name, x)
        with pytest.raises(lost, match="metadata"):
            engine.send_weights()
        engine.source = ModuleSource(module)
        engine.send_weights()
    context.wait_for_all("broken", limit=60.0)
    engine.shutdown()


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


CASES = [
    shards_of_fsdp,
    whole_tensors,
    sources_as_states,
    states_of_meshcast,
    as_vllm_has_it,
    states_of_all_kinds,
    refused_states,
    broken_sources,
    a_rank_is_lost,
]
