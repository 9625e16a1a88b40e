"""Weight transfer engines for vLLM, of its workers and of the trainer. Importing this module registers them
as the backend "meshcast"."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_common import run_trainer_rendezvous

from ..errors import Caller, LayoutError
from ..layout import Layout
from ..resharding.meeting import Meeting, buckets

__all__ = ["MeshcastTrainerInitInfo", "MeshcastTrainerEngine", "MeshcastWorkerEngine"]

_OP = "MeshcastTrainerEngine"


@dataclass
class MeshcastTrainerInitInfo(base.TrainerInitInfo):
    """host, port: where the first trainer has a store for all. trainers, workers: how many there are.
    bucket_bytes: of whole tensors, that travel together. timeout: seconds for a bucket and to wait for it."""

    backend: ClassVar[str] = "meshcast"

    host: str
    port: int
    trainers: int
    workers: int
    bucket_bytes: int = 1 << 30
    timeout: float = 600.0


@dataclass
class _WorkerInitInfo(base.WeightTransferInitInfo):
    host: str
    port: int
    trainers: int
    workers: int
    timeout: float


@dataclass
class _UpdateInfo(base.WeightTransferUpdateInfo):
    """names: of the parameters, by bucket."""

    names: list[list[str]]


class _Joined:
    """The part that both engines share: the meeting that they have joined."""

    _meeting: Meeting | None = None

    def _join(self, info: MeshcastTrainerInitInfo | _WorkerInitInfo, rank: int) -> None:
        """Returns once all have joined. The first trainer has the store, which ends with its engine."""
        store = dist.TCPStore(info.host, info.port, is_master=rank == 0, wait_for_workers=False)
        size = info.trainers + info.workers
        self._meeting = Meeting(store, "MeshcastWeights", range(size), rank, info.timeout)

    def shutdown(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None


class MeshcastWorkerEngine(_Joined, base.WeightTransferEngine[_WorkerInitInfo, _UpdateInfo]):
    """The engine of a worker: every tensor arrives whole, and the model loads it as from a checkpoint."""

    init_info_cls = _WorkerInitInfo
    update_info_cls = _UpdateInfo

    def init_transfer_engine(self, init_info: _WorkerInitInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.trainers + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._info = init_info
        self._join(init_info, rank)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The base's asks for an accelerator. Tensors that have arrived on a GPU are there for this
        stream."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: _UpdateInfo) -> None:
        if self._meeting is None:
            raise Caller("MeshcastWorkerEngine").error(LayoutError, "call init_transfer_engine first")
        info = self._info
        layout = Layout(list(range(info.trainers, info.trainers + info.workers)), [Replicate()])
        where: Any = (layout, "cuda") if self.device.type == "cuda" else layout
        for names in update_info.names:
            deadline = time.monotonic() + info.timeout
            received = self._meeting.move({}, dict.fromkeys(names, where), deadline=deadline)
            self.model.load_weights([(name, received[name]) for name in names])


class MeshcastTrainerEngine(_Joined, base.TrainerWeightTransferEngine[MeshcastTrainerInitInfo]):
    """The engine of a trainer: each trainer sends the shards that it has, and no rank gathers a tensor. Where
    the source yields whole tensors alone, the first owner sends.

    Raises, from send_weights: the errors of reshard_state_dict. The group then has to be made again.
    """

    init_info_cls = MeshcastTrainerInitInfo

    @classmethod
    def trainer_init(
        cls,
        init_info: MeshcastTrainerInitInfo,
        *,
        client: base.VLLMWeightSyncClient,
        source: base.WeightSource | None = None,
    ) -> MeshcastTrainerEngine:
        if source is None:
            raise Caller(_OP).error(LayoutError, "a WeightSource is needed")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        engine._info = init_info
        if not engine.is_sender:
            engine._join(init_info, init_info.rank)
            return engine
        told = {
            name: value for name, value in asdict(init_info).items() if name not in ("rank", "bucket_bytes")
        }

        run_trainer_rendezvous(
            init_worker=lambda: client.init_weight_transfer_engine(told),
            init_trainer=lambda: engine._join(init_info, 0),
        )
        return engine

    def send_weights(self) -> None:
        assert self.source is not None
        together = list(buckets(self.source.metadata, _nbytes, self._info.bucket_bytes))
        if not self.is_sender:
            self._send(together)
            return
        self.client.start_weight_update()
        update = {"names": [[meta.name for meta in bucket] for bucket in together]}
        # Workers receive while trainers send.
        run_trainer_rendezvous(
            init_worker=lambda: self.client.update_weights(update), init_trainer=lambda: self._send(together)
        )
        self.client.finish_weight_update()

    @torch.no_grad()
    def _send(self, together: list[list[base.ParamMeta]]) -> None:
        source, info = self.source, self._info
        assert source is not None and self._meeting is not None
        whole = not source.implements_iter_local()
        pairs = source.iter_full() if whole else source.iter_local()
        for bucket in together:
            state, layouts = {}, {}
            for meta in bucket:
                owners = tuple(range(info.trainers)) if meta.owners is None else meta.owners
                if self.rank not in owners:
                    continue
                name, tensor = next(pairs)
                if name != meta.name:
                    text = f"the source yields {name!r} where its metadata has {meta.name!r}"
                    raise Caller(_OP, self.rank).error(LayoutError, text)
                if not whole or self.rank == owners[0]:
                    state[name] = tensor.detach()
                    layouts[name] = _layout(meta, owners[:1] if whole else owners, whole), meta.shape
            deadline = time.monotonic() + info.timeout
            self._meeting.move(state, None, layouts=layouts, deadline=deadline)


def _nbytes(meta: base.ParamMeta) -> int:
    return torch.Size(meta.shape).numel() * meta.dtype.itemsize


def _layout(meta: base.ParamMeta, owners: tuple[int, ...], whole: bool) -> Layout:
    if whole or meta.placements is None:
        return Layout(list(owners), [Replicate()])
    placements = [
        Shard(each.dim) if isinstance(each, base.Shard) else Replicate() for each in meta.placements
    ]
    return Layout(torch.tensor(owners).view(meta.mesh_shape), placements)


WeightTransferEngineFactory.register_engine("meshcast", MeshcastWorkerEngine)
WeightTransferTrainerFactory.register_engine("meshcast", MeshcastTrainerEngine)
