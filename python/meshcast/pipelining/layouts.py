"""Layouts of a stage: its mesh, the placements of its inputs and outputs, and the local shards they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from meshcast.errors import LayoutError
from meshcast.layout import Layout
from meshcast.pipelining.microbatches import extent, is_mask, narrowed

__all__ = [
    "StageMesh",
    "ValuePlacements",
    "check_shard",
    "data_dims",
    "gradient_placements",
    "local_shard",
    "numbered_dims",
    "stage_mesh",
]

Placements = tuple[Placement, ...]


class StageMesh:
    """The ranks of a stage in their shape, with or without a DeviceMesh (none where the stage has one rank
    and none was given)."""

    def __init__(self, ranks: torch.Tensor, rank: int, device_mesh: Any = None) -> None:
        self.shape = tuple(ranks.shape)
        self.ranks = [int(value) for value in ranks.flatten()]
        self.device_mesh = device_mesh
        if rank not in self.ranks:
            raise LayoutError(
                f"rank {rank} makes a stage on a mesh of ranks {self.ranks}, which it is not in", rank=rank
            )
        self.coordinate = tuple(int(value) for value in (ranks == rank).nonzero()[0])
        self._nested = ranks.tolist()

    @property
    def size(self) -> int:
        return len(self.ranks)

    def along(self, dims: Sequence[int]) -> list[int]:
        """The ranks that differ from this one in these dimensions only, this one included."""
        index = tuple(slice(None) if dim in dims else at for dim, at in enumerate(self.coordinate))
        return [int(rank) for rank in torch.tensor(self._nested)[index].flatten()]

    def layout(self, placements: Placements) -> Layout:
        return Layout(self._nested, placements)


def stage_mesh(
    stage_index: int, num_stages: int, group: dist.ProcessGroup | None, mesh: DeviceMesh | None, rank: int
) -> StageMesh:
    """The user's mesh, or without one the rank of the group that has the stage."""
    if mesh is not None:
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


def data_dims(placements: ValuePlacements) -> list[int]:
    """The mesh dimensions over which the samples of an input are split: data parallelism."""
    found = {
        dim for each in placements.listed() for dim, placement in enumerate(each) if placement == Shard(0)
    }
    return sorted(found)


def numbered_dims(what: str, given: Sequence[int | str], mesh: StageMesh) -> list[int]:
    """Mesh dimensions given by number or name. Raises LayoutError for one that the mesh does not have."""
    names = getattr(mesh.device_mesh, "mesh_dim_names", None) or ()
    found = set()
    for each in [given] if isinstance(given, (int, str)) else given:
        number = names.index(each) if isinstance(each, str) and each in names else each
        if not isinstance(number, int) or not 0 <= number < len(mesh.shape):
            raise LayoutError(
                f"{what}: expected mesh dimensions 0..{len(mesh.shape) - 1}"
                f"{f' or their names {list(names)}' if names else ''}, found {each!r}"
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


def check_shard(shape: Sequence[int], placements: Placements) -> None:
    """Raises LayoutError for placements that an argument of step of this shape cannot have."""
    for placement in placements:
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard:
            raise LayoutError(f"an argument of step can be placed by Shard and Replicate, found {placement}")
        if not -len(shape) <= placement.dim < len(shape):
            raise LayoutError(
                f"{placement} of an argument of step with shape {tuple(shape)}: there is no such dimension"
            )


def local_shard(value: Any, mesh: StageMesh, placements: Placements) -> Any:
    """This rank's part of a tensor or BlockMask that every rank has whole: a view, no copy. Cuts follow
    torch.chunk; a shard may be empty. A BlockMask is cut by samples alone."""
    if not is_mask(value):
        check_shard(value.shape, placements)
    for mesh_dim, placement in enumerate(placements):
        if not isinstance(placement, Shard) or (is_mask(value) and placement.dim != 0):
            continue
        total = extent(value, placement.dim)
        parts, index = mesh.shape[mesh_dim], mesh.coordinate[mesh_dim]
        size, offset = Shard.local_shard_size_and_offset(total, parts, index)
        value = narrowed(value, placement.dim, min(offset, total), size)
    return value
