"""Weight transfer engines for vLLM, of its workers and of the trainer, which importing this module registers
as the backend "meshcast"; and StateSource, which any of vLLM's engines takes as the trainer's weights."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_common import run_trainer_rendezvous

from ..base.wire import pack, text_digest, unpack
from ..errors import Caller, LayoutError
from ..groups.parent import parent_group, seconds
from ..layout import Layout
from ..resharding.meeting import Meeting, buckets
from ..resharding.state_arguments import Current, Given, SourcePass, State, checked_call
from ..resharding.state_dict import StateResharder
from ..resharding.state_entries import Sides, StateSide, local_of
from ..resharding.state_run import StateRun, conversation
from ..resharding.tensor_map import TensorMap, mapped
from ..spec import TensorSpec

__all__ = ["MeshcastTrainerInitInfo", "MeshcastTrainerEngine", "MeshcastWorkerEngine", "StateSource"]

_OP, _SOURCE = "MeshcastTrainerEngine", "StateSource"
_METADATA = "metadata of the trainers' sources"  # an entry of the first bucket


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

    Raises, from send_weights: the errors of reshard_state_dict. After those of a lost rank and of a timeout
    the group has to be made again. A source that does not fit its metadata, or that raises, is refused on all
    ranks before a byte of that bucket moves; workers have loaded the buckets before.
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
        weights: SourcePass | Exception
        together: list[list[base.ParamMeta]] = [[]]
        try:
            weights = SourcePass(self.source, self.rank, range(self._info.trainers))
            together = list(buckets(weights.metadata, _nbytes, self._info.bucket_bytes)) or together
        except Exception as error:  # the others have to learn of it
            weights = Caller(_OP, self.rank).typed(error)
        if not self.is_sender:
            self._send(together, weights)
            return
        self.client.start_weight_update()
        update = {"names": [[meta.name for meta in bucket] for bucket in together]}
        # Workers receive while trainers send.
        run_trainer_rendezvous(
            init_worker=lambda: self.client.update_weights(update),
            init_trainer=lambda: self._send(together, weights),
        )
        self.client.finish_weight_update()

    @torch.no_grad()
    def _send(self, together: list[list[base.ParamMeta]], weights: SourcePass | Exception) -> None:
        assert self._meeting is not None
        for number, bucket in enumerate(together):
            state: dict[str, Any] = {}
            wrong = weights if isinstance(weights, Exception) else None
            if isinstance(weights, SourcePass):
                try:
                    state = weights.take(bucket, last=number == len(together) - 1)
                except Exception as error:  # the same
                    wrong = Caller(_OP, self.rank).typed(error)
            if number == 0:  # all trainers have the same metadata, or all ranks raise
                state[_METADATA] = "" if isinstance(weights, Exception) else _described(weights)
            deadline = time.monotonic() + self._info.timeout
            self._meeting.move(state, None, deadline=deadline, wrong=wrong)


def _described(weights: SourcePass) -> list[int]:
    """A digest of what all ranks have to agree on. Layouts are compared by the call."""
    metas = weights.metadata
    return list(text_digest(repr([(m.name, str(m.dtype), tuple(m.shape), weights.owners(m)) for m in metas])))


class _Yielded(NamedTuple):
    """A tensor of a StateSource. meta: as vLLM takes it. sources: in the state, by which maps.
    layout: of what the ranks hold of it, where iter_local yields that; None: it is moved to all owners."""

    meta: base.ParamMeta
    sources: tuple[str, ...]
    maps: tuple[TensorMap, ...]
    device_type: str
    layout: Layout | None

    @property
    def whole(self) -> bool:
        """Its owners hold all of it."""
        return self.layout is not None and self.meta.placements is None


class StateSource(base.WeightSource):
    """The weights of a trainer, in any form that WeightSync takes, as a WeightSource for vLLM's engines.

    Constructing it, and each iteration, are calls of all ranks of `group`: their numbers there are those of
    the trainers. `iter_local` yields shards where they are `Shard` or `Replicate` over one mesh. Strided and
    partial ones, and what maps make, are whole on all ranks. `iter_full` yields whole tensors, which are
    moved to all owners in buckets, as by reshard_state_dict.

    Args:
        state: {name: tensor}, a module, whose state_dict() is taken, or a function that returns a mapping.
            Each iteration takes the tensors as they are then. Buffers of a state_dict() are yielded as well.
        maps: TensorMaps, for tensors that are joined, cut, stacked or transposed.
        dtype: of floating-point tensors, as they are yielded; None: their own.
        layouts: of plain tensors that are no copies, as for reshard_state_dict.
        bucket_bytes: of whole tensors, that are moved together.
        group, timeout: as for reshard_state_dict.

    Raises LayoutError and PlanMismatchError as reshard_state_dict; while it is iterated, also for a state
    that has other names, shapes or dtypes than at first.
    """

    def __init__(
        self,
        state: State,
        *,
        maps: TensorMap | Iterable[TensorMap] = (),
        dtype: torch.dtype | None = None,
        layouts: Mapping[str, Any] | None = None,
        bucket_bytes: int = 1 << 30,
        group: dist.ProcessGroup | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        parent = parent_group(group, _SOURCE)
        self._group, self._timeout, self._caller = group, timeout, Caller(_SOURCE, parent.rank)
        self._dtype, self._layouts, self._bucket_bytes = dtype, dict(layouts or {}), bucket_bytes
        text, wrong, limit = "", None, parent.timeout
        try:
            limit = seconds(timeout, parent.timeout)
            self._state = Current("state", state)
            given = Given(self._look(), {}, layouts=layouts, maps=maps, dtype=dtype)
            text = pack(checked_call(parent.rank, given).side)
        except Exception as error:
            wrong = error
        run = StateRun(parent.rank, Given({f"rank {parent.rank}": text}, None), op=_SOURCE, wrong=wrong)
        texts = conversation(parent).run(run, time.monotonic() + limit)
        known: dict[Any, Any] = {}
        with self._caller:
            sides = Sides(
                {rank: unpack(StateSide, texts[f"rank {rank}"], known) for rank in sorted(parent.ranks)}
            )
            sides.check_options()
            self._parts = self._described(sides)
        self._ranks, self._rank = sides.ranks, sides.ranks.index(parent.rank)
        self._calls: dict[bool, list[tuple[list[_Yielded], StateResharder | None]]] = {}

    @cached_property
    def metadata(self) -> list[base.ParamMeta]:
        return [part.meta for part in self._parts]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._walk(full=True)

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._walk(full=False)

    def _look(self) -> dict[str, Any]:
        found = self._state.look()
        if not isinstance(found, Mapping):
            raise LayoutError("state is a WeightSource already")
        return {name: x for name, x in found.items() if isinstance(x, torch.Tensor | TensorSpec)}

    def _described(self, sides: Sides) -> list[_Yielded]:
        """The tensors in the order in which the ranks name them; what a map makes comes where its first
        source would."""
        makers: dict[str, list[TensorMap]] = {}
        for each in sides.first.maps:
            for source in each.names():
                makers.setdefault(source, []).append(each)
        found: dict[str, _Yielded] = {}
        for name in dict.fromkeys(name for side in sides.sides.values() for name in side.held):
            if name not in makers:
                found[name] = self._part(name, sides)
            for each in makers.get(name, ()):
                if each.target_names()[0] not in found:
                    found |= self._mapped(each, sides)
        return list(found.values())

    def _part(self, name: str, sides: Sides) -> _Yielded:
        held = sides.held(name)
        where, dtype = held.where, self._travels(held.dtype)
        if where.by_boxes or not all(type(each) in (Shard, Replicate) for each in where.placements):
            return _Yielded(base.ParamMeta(name, dtype, held.shape), (name,), (), held.device_type, None)
        owners = tuple(map(sides.ranks.index, where.ranks))
        if next(iter(sides.holders(name).values())).layout is None and len(owners) == len(sides.ranks):
            meta = base.ParamMeta(name, dtype, held.shape)  # plain, on all ranks
        else:
            placements = tuple(
                base.Shard(each.dim) if isinstance(each, Shard) else base.Replicate()
                for each in where.placements
            )
            meta = base.ParamMeta(
                name, dtype, held.shape, owners=owners, mesh_shape=where.mesh_shape, placements=placements
            )
        return _Yielded(meta, (name,), (), held.device_type, where)

    def _mapped(self, each: TensorMap, sides: Sides) -> dict[str, _Yielded]:
        sources = {name: sides.held(name) for name in each.names() if sides.holders(name)}
        made = mapped(each, {name: held.shape for name, held in sources.items()})
        kinds = {(self._travels(held.dtype), held.device_type) for held in sources.values()}
        if len(kinds) > 1:
            raise LayoutError(f"{each.target_names()[:4]} are made of tensors of different dtypes or devices")
        ((dtype, device_type),) = kinds
        return {
            name: _Yielded(base.ParamMeta(name, dtype, shape), tuple(sources), (each,), device_type, None)
            for name, (shape, _) in made.items()
        }

    def _travels(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype

    def _buckets(self, full: bool) -> list[tuple[list[_Yielded], StateResharder | None]]:
        """The parts in their order, each bucket with the call that moves those that are moved."""
        found: list[tuple[list[_Yielded], StateResharder | None]] = []
        for bucket in buckets(self._parts, lambda part: _nbytes(part.meta), self._bucket_bytes):
            moved = [part for part in bucket if not self._stays(part, full)]
            if not moved:
                found.append((bucket, None))
                continue
            where = {part.meta.name: (self._owners(part), part.device_type) for part in moved}
            names = {name for part in moved for name in part.sources}
            call = StateResharder(
                where,
                maps=list({id(each): each for part in moved for each in part.maps}.values()),
                dtype=self._dtype,
                layouts={name: each for name, each in self._layouts.items() if name in names},
                group=self._group,
                timeout=self._timeout,
            )
            found.append((bucket, call))
        return found

    def _stays(self, part: _Yielded, full: bool) -> bool:
        return part.whole or (part.layout is not None and not full)

    def _owners(self, part: _Yielded) -> Layout:
        owners = range(len(self._ranks)) if part.meta.owners is None else part.meta.owners
        return Layout([self._ranks[each] for each in owners], [Replicate()])

    def _walk(self, full: bool) -> Iterator[tuple[str, torch.Tensor]]:
        if full not in self._calls:
            self._calls[full] = self._buckets(full)
        state = self._look()
        for bucket, call in self._calls[full]:
            moved = [part for part in bucket if not self._stays(part, full)]
            names = [name for part in moved for name in part.sources if name in state]
            arrived = {} if call is None else call.run({name: state[name] for name in names})
            for part in bucket:
                name, owners = part.meta.name, part.meta.owners
                if owners is not None and self._rank not in owners:
                    continue
                yield name, self._checked(part, arrived, state, full)

    @torch.no_grad()
    def _checked(
        self, part: _Yielded, arrived: Mapping[str, Any], state: Mapping[str, Any], full: bool
    ) -> torch.Tensor:
        """A tensor as its metadata has it."""
        name, shape, stays = part.meta.name, part.meta.shape, self._stays(part, full)
        with self._caller:
            if stays and not isinstance(state.get(name), torch.Tensor):
                raise LayoutError(f"the state has {name!r} no longer, and had when the source was made")
            found: torch.Tensor = local_of(state[name]) if stays else arrived[name]
            if stays and part.layout is not None:
                shape = part.layout.local_shapes(shape)[self._ranks[self._rank]]
            if found.dtype != part.meta.dtype and self._travels(found.dtype) == part.meta.dtype:
                found = found.to(part.meta.dtype)
            if (tuple(found.shape), found.dtype) != (shape, part.meta.dtype):
                raise LayoutError(
                    f"{name!r} is {found.dtype} {tuple(found.shape)}, and was {part.meta.dtype} {shape} when "
                    "the source was made; make it again"
                )
        return found


def _nbytes(meta: Any) -> int:
    return torch.Size(meta.shape).numel() * meta.dtype.itemsize


WeightTransferEngineFactory.register_engine("meshcast", MeshcastWorkerEngine)
WeightTransferTrainerFactory.register_engine("meshcast", MeshcastTrainerEngine)
