"""torch.distributed.checkpoint without a disk: what some ranks save, others load on other meshes."""

from __future__ import annotations

import io
import os
import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..base.boxes import Box, extents, held_in_order, piece_view
from ..base.wire import pack, unpack
from ..errors import Caller, MeshcastError
from ..groups.parent import parent_group, seconds
from ..layout import Layout
from ..resharding.state_arguments import Given
from ..resharding.state_dict import reshard_state_dict
from ..resharding.state_run import StateRun, conversation

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["MemoryStorage"]

_OP = "MemoryStorage"
T = TypeVar("T")


# Objects of torch and of planners travel as pickles, as they do in files: bytes below.


@dataclass
class _SavedTensor:
    """The part of a saved tensor that a rank holds. properties: torch's TensorProperties."""

    size: tuple[int, ...]
    properties: bytes
    boxes: list[Box] = field(default_factory=list)


@dataclass
class _Catalogue:
    """A list of what a rank holds, without the values. values: names of what is no tensor."""

    tensors: dict[str, _SavedTensor] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)
    planner_data: bytes | None = None


@dataclass
class _Request:
    """The parts that a rank loads: boxes of tensors, and names of what is no tensor."""

    tensors: dict[str, list[Box]]
    values: list[str]


class MemoryStorage(StorageWriter, StorageReader):
    """A storage of torch.distributed.checkpoint in the memory of the ranks. A load reshards: every byte goes
    straight from the ranks that saved it to those that ask for it, and several of them cost one copy of it.

    Every rank of `group` makes one and calls `load`; those that hold something have called `save` before,
    with the same object. Both take state dicts, planners and meshes as they do with files. A save replaces
    the one before.

    With ``no_dist=True`` a save is local and communicates with no rank, copies that several ranks hold are
    all used as sources, and errors of a load arrive as CheckpointException with a typed error of meshcast in
    ``failures[0][0]``. A rank whose planner refuses its state dict then leaves the others waiting until their
    timeout. Without no_dist torch adds collectives of its own: they notify all ranks of that, but where a
    rank is lost their errors hide those of meshcast.

    Args:
        group: of all ranks that load or hold; None for the default one.
        copy: False keeps the tensors themselves, which then must not change before the last load of them;
            True keeps copies, as files would.
        timeout: for a load, in seconds or as timedelta; None for the group's.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        import torch.distributed.checkpoint as dcp
        from meshcast.integrations.dcp import MemoryStorage

        training, serving = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        storage = MemoryStorage()
        if dist.get_rank() in (0, 1):
            weights = {"w": distribute_tensor(torch.ones(5, 2), training, [Shard(0)], src_data_rank=None)}
            dcp.save(weights, storage_writer=storage, no_dist=True)
        new = {"w": distribute_tensor(torch.zeros(5, 2), serving, [Shard(1)], src_data_rank=None)}
        dcp.load(new, storage_reader=storage, no_dist=True)
        assert bool((new["w"].to_local() == 1).all())
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        copy: bool = True,
        timeout: float | timedelta | None = None,
    ) -> None:
        self._group, self._copy, self._timeout = group, copy, timeout
        self._own = _Catalogue()
        self._held: dict[str, torch.Tensor] = {}  # saved by this rank, in the order of its boxes
        self._values: dict[str, bytes] = {}
        self._failed: Exception | None = None
        self._all: dict[int, _Catalogue] = {}  # of all ranks, by global rank, for the load in progress

    def __repr__(self) -> str:
        return f"<MemoryStorage that holds {len(self._held)} tensors of this rank>"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """There is one checkpoint: the id says nothing."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # torch asks this to find a storage by a path

    # ---- save -------------------------------------------------------------------------------------------

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._own, self._held, self._values = _Catalogue(), {}, {}

    def prepare_local_plan(self, plan: Any) -> Any:  # of both kinds
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    @torch.no_grad()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        pieces: dict[str, list[torch.Tensor]] = {}
        for item in plan.items:
            name, data = item.index.fqn, planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                assert isinstance(data, io.BytesIO)
                self._values[name] = data.getvalue()
                self._own.values.append(name)
                size = len(self._values[name])
            else:
                written = item.tensor_data
                assert written is not None and isinstance(data, torch.Tensor)
                known = self._own.tensors.setdefault(
                    name, _SavedTensor(tuple(written.size), pickle.dumps(written.properties))
                )
                if data.numel() > 0:
                    known.boxes.append(_box(written.chunk.offsets, written.chunk.sizes))
                    pieces.setdefault(name, []).append(data.detach())
                size = data.numel() * data.element_size()
            results.append(WriteResult(item.index, size, self._rank))
        for name, parts in pieces.items():
            boxes = self._own.tensors[name].boxes
            self._held[name] = parts[0] if len(parts) == 1 and not self._copy else _joined(parts, boxes)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        data = metadata.planner_data
        self._own.planner_data = None if data is None else pickle.dumps(data)

    # ---- load -------------------------------------------------------------------------------------------

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """A collective of the group."""
        self._failed = None
        try:
            self._all = self._gathered("holds", self._own)
            with Caller(_OP, self._rank):
                return _metadata(self._all.values())
        except Exception as error:
            self._failed = error  # torch takes any error here for files that are not there, and drops it
            return Metadata({})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self._failed is not None:
            raise self._failed

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """A collective of the group."""
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        asked = _whole_chunks(item for item in plan.items if item.type == LoadItemType.TENSOR)
        boxes = {name: [box for box, _ in chunks] for name, chunks in asked.items()}
        try:
            targets = {
                name: [planner.resolve_tensor(item).detach() for _, item in chunks]
                for name, chunks in asked.items()
            }
        except Exception as error:
            self._refuse(error)
        names = sorted({item.storage_index.fqn for item in values})
        requests = self._gathered("asks", _Request(boxes, names))
        # A tensor that is requested in several chunks arrives in memory of its own.
        out = {
            name: tensors[0]
            if len(tensors) == 1
            else tensors[0].new_empty(held_in_order(boxes[name], tensors[0].ndim)[0])
            for name, tensors in targets.items()
        }
        where = {
            name: _layout({rank: each.tensors.get(name, []) for rank, each in requests.items()})
            for name in boxes
        }
        wanted = {name for each in requests.values() for name in (*each.tensors, *each.values)}
        if not wanted:
            return _done(None)
        state: dict[str, Any] = {name: held for name, held in self._held.items() if name in wanted}
        layouts = {
            name: (
                _layout({r: c.tensors[name].boxes for r, c in self._all.items() if name in c.tensors}),
                self._own.tensors[name].size,
            )
            for name in state
        }
        for name in wanted & self._values.keys():
            if self._rank == min(r for r, c in self._all.items() if name in c.values):
                state[name] = self._values[name]
        received = reshard_state_dict(
            state,
            {name: (layout, "cuda") if out[name].is_cuda else layout for name, layout in where.items()},
            out,
            layouts=layouts,
            group=self._group,
            timeout=self._timeout,
        )
        for name, chunks in asked.items():
            held = held_in_order(boxes[name], len(boxes[name][0]))
            views = [out[name]] if len(chunks) == 1 else [piece_view(out[name], piece) for piece in held[1]]
            for (_, item), target, view in zip(chunks, targets[name], views, strict=True):
                if target is not view:
                    target.copy_(view)
                planner.commit_tensor(item, target)
        for item in values:
            planner.load_bytes(item, io.BytesIO(received[item.storage_index.fqn]))
        return _done(None)

    def _refuse(self, error: Exception) -> NoReturn:
        """Raises it here, and notifies the other ranks, which wait for what this one asks."""
        parent = parent_group(self._group, _OP)
        deadline = time.monotonic() + seconds(self._timeout, parent.timeout)
        conversation(parent).run(StateRun(parent.rank, Given(None, None), wrong=error), deadline)
        raise error

    @property
    def _rank(self) -> int:
        return parent_group(self._group, _OP).rank

    def _gathered(self, what: str, mine: T) -> dict[int, T]:
        """Returns the facts of every rank of the group, by its global rank."""
        texts = reshard_state_dict(
            {f"rank {self._rank} {what}": pack(mine)}, group=self._group, timeout=self._timeout
        )
        return {int(name.split()[1]): unpack(type(mine), text) for name, text in texts.items()}


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    return tuple((at, at + size) for at, size in zip(offsets, sizes, strict=True))


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([lo for lo, _ in box]), torch.Size(extents(box)))


def _metadata(catalogues: Iterable[_Catalogue]) -> Metadata:
    """Returns the metadata of all ranks together. Copies of one chunk are one here."""
    metadata = Metadata({})
    for catalogue in catalogues:
        for name, tensor in catalogue.tensors.items():
            known = metadata.state_dict_metadata.setdefault(
                name, TensorStorageMetadata(pickle.loads(tensor.properties), torch.Size(tensor.size), [])
            )
            assert isinstance(known, TensorStorageMetadata)
            chunks = [_chunk(box) for box in tensor.boxes]
            known.chunks += [chunk for chunk in chunks if chunk not in known.chunks]
        for name in catalogue.values:
            metadata.state_dict_metadata.setdefault(name, BytesStorageMetadata())
        if catalogue.planner_data is not None:
            data = pickle.loads(catalogue.planner_data)
            metadata.planner_data = {**(metadata.planner_data or {}), **data}
    for name, found in metadata.state_dict_metadata.items():
        if isinstance(found, TensorStorageMetadata) and not _cover(found.chunks, found.size):
            raise MeshcastError(f"{name} was saved in part: of {tuple(found.size)} there are {found.chunks}")
    if not metadata.state_dict_metadata:
        raise MeshcastError("no rank of the group has saved anything")
    return metadata


def _cover(chunks: Sequence[ChunkStorageMetadata], size: Sequence[int]) -> bool:
    """Returns whether the chunks hold every element; they may overlap."""
    boxes = [_box(chunk.offsets, chunk.sizes) for chunk in chunks]
    cuts = [sorted({0, length, *(at for box in boxes for at in box[d])}) for d, length in enumerate(size)]
    places = [{at: index for index, at in enumerate(each)} for each in cuts]
    held = torch.zeros([len(each) - 1 for each in cuts], dtype=torch.bool)  # of the cells between the cuts
    for box in boxes:
        held[tuple(slice(place[lo], place[hi]) for place, (lo, hi) in zip(places, box, strict=True))] = True
    return bool(held.all())


def _layout(boxes: Mapping[int, Sequence[Box]]) -> Layout:
    """Returns the layout of the boxes, on the ranks that have some."""
    return Layout.from_boxes({rank: listed for rank, listed in boxes.items() if listed})


def _joined(parts: Sequence[torch.Tensor], boxes: Sequence[Box]) -> torch.Tensor:
    """A copy of the boxes as a layout by boxes has them."""
    held = held_in_order(boxes, parts[0].ndim)
    local = parts[0].new_empty(held[0])
    for piece, part in zip(held[1], parts, strict=True):
        piece_view(local, piece).copy_(part)
    return local


def _whole_chunks(items: Iterable[ReadItem]) -> dict[str, list[tuple[Box, ReadItem]]]:
    """Returns what a rank asks for, by the name in the storage: boxes of the global tensor, and an item for
    each that reads all of it. A plan has an item for each saved chunk that a box takes something of."""
    found: dict[Any, tuple[Box, Box, ReadItem]] = {}
    for item in items:
        offset = item.storage_index.offset or torch.Size(len(item.lengths) * (0,))
        here = _box([a + b for a, b in zip(offset, item.storage_offsets, strict=True)], item.lengths)
        there = _box(item.dest_offsets, item.lengths)
        key = (item.storage_index.fqn, item.dest_index)
        if key in found:
            here, there = _around(found[key][0], here), _around(found[key][1], there)
        found[key] = here, there, item
    asked: dict[str, list[tuple[Box, ReadItem]]] = {}
    for (name, _), (here, there, item) in found.items():
        offsets = torch.Size([lo for lo, _ in there])
        whole = replace(item, dest_offsets=offsets, lengths=torch.Size(extents(there)))
        asked.setdefault(name, []).append((here, whole))
    return asked


def _around(a: Box, b: Box) -> Box:
    return tuple((min(p[0], q[0]), max(p[1], q[1])) for p, q in zip(a, b, strict=True))


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
