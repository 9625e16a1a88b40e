"""A stage as the other ranks must know it: its mesh, the placements of its inputs and outputs, and the values
that leave it, local and whole.

A gradient has the layout of its value, except for sums: where samples are split, each rank computes a part of
the loss, so the gradient of what is whole there is a pending sum (`gradient_placements`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _StridedShard
from torch.utils._pytree import tree_flatten

from ..base.checks import shown
from ..errors import LayoutError
from ..layout import Layout
from ..transfers.medium import own_obstacle

__all__ = [
    "DataUse",
    "Inferred",
    "LocalValue",
    "Placements",
    "SentDTensor",
    "StageMesh",
    "ValuePlacements",
    "Way",
    "as_dtensor",
    "as_tuple",
    "current",
    "split_dims",
    "global_shape",
    "gradient_placements",
    "local_values",
    "numbered_dims",
    "rows_of",
    "stage_device",
    "stage_mesh",
    "with_empty",
]


Placements = tuple[Placement, ...]


class StageMesh:
    """The ranks of a stage in their shape, with or without a DeviceMesh (none where the stage has one rank
    and none was given)."""

    def __init__(self, ranks: torch.Tensor, rank: int, device_mesh: Any = None) -> None:
        self.shape = tuple(ranks.shape)
        self.ranks = [int(value) for value in ranks.flatten()]
        self.device_mesh = device_mesh
        self.coordinate = tuple(int(value) for value in (ranks == rank).nonzero()[0])
        self._nested = ranks.tolist()

    @property
    def size(self) -> int:
        return len(self.ranks)

    def along(self, dims: Sequence[int]) -> list[int]:
        """The ranks that differ from this one in these dimensions only, this one included."""
        index = tuple(slice(None) if dim in dims else at for dim, at in enumerate(self.coordinate))
        return [int(rank) for rank in torch.tensor(self._nested)[index].flatten()]

    def parts(self, dims: Sequence[int]) -> int:
        """The number of parts of what is split over these dimensions."""
        return math.prod(self.shape[dim] for dim in dims)

    def part(self, dims: Sequence[int]) -> int:
        """The number of this rank's part, from 0."""
        part = 0
        for dim in dims:
            part = part * self.shape[dim] + self.coordinate[dim]
        return part

    def dims_but(self, dims: Sequence[int]) -> list[int]:
        """The other dimensions."""
        return [dim for dim in range(len(self.shape)) if dim not in dims]

    def layout(self, placements: Placements) -> Layout:
        return Layout(self._nested, placements)


def stage_mesh(
    stage_index: int, num_stages: int, group: dist.ProcessGroup | None, mesh: DeviceMesh | None, rank: int
) -> StageMesh:
    """The user's mesh, or without one the rank of the group that has the stage."""
    if mesh is not None:
        if rank not in mesh.mesh:
            raise LayoutError(
                f"stage {stage_index}: mesh= has ranks {mesh.mesh.tolist()}, and not this one: make the "
                "stage on its own ranks only"
            )
        return StageMesh(mesh.mesh, rank, mesh)
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    if len(ranks) > num_stages:
        raise LayoutError(
            f"stage {stage_index}: without mesh= the group has at most one rank per stage: expected up to "
            f"{num_stages} ranks, found {len(ranks)}"
        )
    return StageMesh(torch.tensor([ranks[stage_index] if len(ranks) == num_stages else rank]), rank)


class ValuePlacements:
    """Placements of the numbered inputs or outputs of a stage: one list for all, one list each, or the
    default.

    The default is data parallelism over the first mesh dimension: Shard(0), then Replicate() on the others.
    """

    def __init__(self, what: str, given: Sequence[Any] | None, mesh: StageMesh) -> None:
        self.given = given is not None
        self._what = what
        dims = len(mesh.shape)
        if given is None:
            self._each, self._all = None, (Shard(0), *[Replicate()] * (dims - 1))
        elif all(isinstance(placement, Placement) for placement in given):
            self._each, self._all = None, tuple(given)
        else:
            self._each, self._all = [tuple(placements) for placements in given], ()
        for placements in self.listed():
            if len(placements) != dims or not all(
                isinstance(placement, Placement) for placement in placements
            ):
                raise LayoutError(
                    f"{what}: expected one placement for each of the {dims} mesh dimensions, found "
                    f"{placements!r}"
                )

    def listed(self) -> list[Placements]:
        return [self._all] if self._each is None else self._each

    def __getitem__(self, index: int) -> Placements:
        if self._each is None:
            return self._all
        if index >= len(self._each):
            raise LayoutError(f"{self._what} lists {len(self._each)} values, but value {index} is used")
        return self._each[index]


def split_dims(placements: ValuePlacements) -> list[int]:
    """The mesh dimensions over which the samples of an input are split: data parallelism."""
    found = {
        dim for each in placements.listed() for dim, placement in enumerate(each) if placement == Shard(0)
    }
    return sorted(found)


def numbered_dims(
    what: str, given: Sequence[int | str] | None, mesh: StageMesh, default: list[int]
) -> list[int]:
    """Mesh dimensions given by number or name; None: `default`. Raises LayoutError for one that the mesh does
    not have."""
    if given is None:
        return default
    names = getattr(mesh.device_mesh, "mesh_dim_names", None) or ()
    found = set()
    for each in [given] if isinstance(given, (int, str)) else given:
        number = names.index(each) if isinstance(each, str) and each in names else each
        if not isinstance(number, int) or not 0 <= number < len(mesh.shape):
            raise LayoutError(
                f"{what}: expected mesh dimensions 0..{len(mesh.shape) - 1}"
                f"{f' or their names {list(names)}' if names else ''}, found {shown(each)}"
            )
        found.add(number)
    return sorted(found)


def gradient_placements(placements: Placements, summed: Sequence[int] = ()) -> Placements:
    """The placements of a value's gradient: those of the value, but whole where the value is a pending sum,
    and a pending sum where it is whole on ranks that each compute a part of the loss.

    summed: these mesh dimensions; see ``data_dims`` of `PipelineStage`.

    Raises LayoutError for pending reductions whose gradient is not the value's (max, min, product, avg).
    """
    found: list[Placement] = []
    for dim, placement in enumerate(placements):
        if isinstance(placement, Partial):
            if placement.reduce_op != "sum":
                raise LayoutError(
                    f"a value with placement {placement} cannot leave a stage that trains; only "
                    "Partial('sum') can"
                )
            found.append(Replicate())
        elif isinstance(placement, Replicate) and dim in summed:
            found.append(Partial())
        else:
            found.append(placement)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class SentDTensor:
    """The data from which a rank of another stage makes the DTensor of its local part. There its mesh has
    other ranks, but the same names of dimensions and the same layout (`compat.mesh_layout`)."""

    placements: tuple[Placement, ...]
    shape: tuple[int, ...]  # of the whole
    names: tuple[str, ...]
    layout: tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class LocalValue:
    """One output of one micro-batch on one rank. placements, sent: of a DTensor, else None."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    placements: tuple[Placement, ...] | None = None
    sent: SentDTensor | None = None


def as_tuple(values: Any, what: str) -> tuple[torch.Tensor, ...]:
    """The tensors of an output. Raises LayoutError unless it is a tensor or a sequence of tensors."""
    listed = (values,) if isinstance(values, torch.Tensor) else values
    found = tuple(listed) if isinstance(listed, (tuple, list)) else ()
    if not found or not all(isinstance(value, torch.Tensor) for value in found):
        kinds = [type(value).__name__ for value in found] or type(values).__name__
        raise LayoutError(f"{what}: values that leave a stage must be tensors, found {kinds}")
    return found


def local_values(value: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor or plain tensor, its values in memory: a functional collective (there are
    some inside tensor-parallel modules) returns a stand-in that has none until it is waited for."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def as_dtensor(
    local: torch.Tensor, mesh: DeviceMesh | None, placements: Placements, shape: Sequence[int]
) -> torch.Tensor:
    """The DTensor of this shape that a local shard belongs to."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def rows_of(values: Sequence[Any]) -> int | None:
    """Samples that the first tensor has here."""
    for value in tree_flatten(values)[0]:
        if isinstance(value, torch.Tensor) and value.dim():
            return int(local_values(value).shape[0])
    return None


DataUse = Literal["if needed", "alone", "always"]


@dataclass(frozen=True, slots=True)
class Inferred:
    """The way this rank runs its module on micro-batches of some shape, and what comes out.

    outputs: None where the rank has no samples, and ranks with samples determine them.
    stand_in: the rank has no samples, and the module cannot run without: it runs on a fake one.
    copies: the module writes on its inputs in place, so it gets copies.
    needs_data: fake tensors were not enough: all ranks of the stage have to run the module on values.
    """

    outputs: list[LocalValue] | None
    stand_in: bool = False
    copies: bool = False
    needs_data: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """The way a stage runs its module for micro-batches of one shape.

    outputs: local shapes and types of what leaves the stage; None for the last. sums: those of them that are
    pending sums over ranks with other samples. stand_in: see `Inferred`.
    """

    outputs: list[tuple[tuple[int, ...], torch.dtype]] | None = None
    stand_in: bool = False
    sums: frozenset[int] = frozenset()


def global_shape(layout: Layout, local: Mapping[int, Sequence[int]], what: str) -> tuple[int, ...]:
    """The global shape of a value from the local shape on each rank of its mesh.

    Raises LayoutError if no shape laid out this way has these shards, naming the rank whose shard differs.
    """
    dims = {len(shape) for shape in local.values()}
    if len(dims) != 1:
        raise LayoutError(f"{what}: its ranks have tensors of different dimensions: {dict(local)}")
    ndim = dims.pop()
    cuts: list[int | None] = []  # the dimension that each mesh dimension cuts
    for placement in layout.placements:
        cut = placement.dim if isinstance(placement, (Shard, _StridedShard)) else None
        if cut is not None and not -ndim <= cut < ndim:
            raise LayoutError(
                f"{what}: {placement} does not fit a tensor of {ndim} dimensions; its local shape is {local}"
            )
        cuts.append(None if cut is None else cut % ndim)
    mesh = StageMesh(torch.tensor(layout.ranks).reshape(layout.mesh_shape), layout.ranks[0])
    shape = []
    for dim in range(ndim):
        along = mesh.along([mesh_dim for mesh_dim, cut in enumerate(cuts) if cut == dim])
        shape.append(sum(local[rank][dim] for rank in along))
    for rank, expected in layout.local_shapes(shape).items():
        if tuple(local[rank]) != tuple(expected):
            raise LayoutError(
                f"{what}: the module's output does not match its layout {layout}: rank {rank} has a "
                f"local shape of {tuple(local[rank])}, "
                f"a tensor of shape {tuple(shape)} would have {tuple(expected)} there (uneven sizes "
                "follow torch.chunk). "
                "Check output_placements, leave the batch dimension unflattened, or, where ranks have "
                "different numbers of rows, pad them and send their counts as another output "
                '(docs/pipelining.md, "Outputs of different sizes")',
                rank=rank,
            )
    return tuple(shape)


def with_empty(
    known: Mapping[int, Sequence[int]], layout: Layout, data_dims: Sequence[int]
) -> dict[int, Sequence[int]]:
    """Local shapes of a value on all ranks, given those of the ranks that have samples.

    A rank that has none has the shape of one that differs from it in the data-parallel dimensions only, with
    no rows where the value is split by samples.
    """
    if len(known) == len(layout.ranks):
        return dict(known)
    ranks = torch.tensor(layout.ranks).reshape(layout.mesh_shape)
    by_samples = any(layout.placements[dim] == Shard(0) for dim in data_dims)
    found: dict[int, Sequence[int]] = {}
    for rank in layout.ranks:
        if rank in known:
            found[rank] = known[rank]
            continue
        others = StageMesh(ranks, rank).along(data_dims)
        like = next((each for each in others if each in known), next(iter(known)))
        found[rank] = [0, *known[like][1:]] if by_samples else known[like]
    return found


def stage_device(what: str, device: Any, mesh: DeviceMesh | None) -> torch.device:
    """The device of a stage; of "cuda" without a number the current one. what: names the stage in errors.
    mesh: of the user, if any. Raises LayoutError where this process cannot use it, or the mesh is on
    another."""
    found = torch.device(device)
    if found.type == "cuda":
        reason = own_obstacle(copies_only=False)
        if reason:
            raise LayoutError(f"{what}: device is {device}, but {reason}")
        count = torch.cuda.device_count()
        if found.index is None:
            found = torch.device("cuda", torch.cuda.current_device())
        elif found.index >= count:
            raise LayoutError(f"{what}: device is {device}, but this process sees {count} GPUs, cuda:0 first")
    if mesh is not None and mesh.device_type != found.type and "cuda" in (mesh.device_type, found.type):
        raise LayoutError(
            f"{what}: device is {found}, but mesh= is on {mesh.device_type}: make both the same"
        )
    return found


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one: what a transfer finds where a rank has no shard that names it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
