"""Layouts of a stage: its mesh, the placements of its inputs and outputs, and the local shards they mean.

A stage's module: its data-parallel wrappers, DistributedDataParallel and FSDP2, and its shared parameters.

Two uses are told apart by the ranks that a wrapper reduces gradients over.

- The ranks that the stage splits its samples over (``mesh=``). The pipeline scales each rank's loss by its
  share of the samples and *sums* gradients, once per step. Both wrappers would average, and after every
  backward: DDP is looked through (the pipeline does its work), FSDP2 is told to sum, and to reduce in the
  last backward of a step only.
- Ranks of other pipelines, one for each data-parallel *column*, as in torch (``group=``): gradients are the
  mean over the columns. FSDP2 takes it in the last backward, the pipeline for DDP when the step ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from ..errors import LayoutError
from ..layout import Layout
from .microbatch import extent, is_mask, narrowed

__all__ = [
    "LastBackward",
    "StageMesh",
    "ValuePlacements",
    "Wrapped",
    "check_shard",
    "data_dims",
    "fsdp_groups",
    "fsdp_parts",
    "gradient_placements",
    "local_shard",
    "look_through",
    "numbered_dims",
    "shared_parameters_of",
    "stage_mesh",
    "trained_leaves",
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


@dataclass(frozen=True, slots=True)
class Wrapped:
    """module: the one that computes. columns: the group that gradients are averaged over, where DDP joins
    pipelines."""

    module: Any
    columns: dist.ProcessGroup | None = None


def look_through(
    module: torch.nn.Module,
    mesh: StageMesh,
    data_dims: Sequence[int],
    pipeline: Sequence[int],
    what: str,
) -> Wrapped:
    """Finds the wrappers, and tells FSDP2 to sum where it reduces inside the stage.

    pipeline: all ranks of the pipeline.

    Raises LayoutError if a DDP or FSDP2 module reduces over other ranks than those that the stage splits its
    samples over, unless these are of other pipelines.
    """
    if isinstance(module, DistributedDataParallel):
        ranks = dist.get_process_group_ranks(module.process_group)
        inside = _is_inside(ranks, mesh, data_dims, pipeline, f"{what}: DistributedDataParallel")
        return Wrapped(module.module, None if inside else module.process_group)
    for part in fsdp_parts(module):
        for group in fsdp_groups(part):
            ranks = group.mesh_info.mesh.mesh.flatten().tolist()
            if _is_inside(ranks, mesh, data_dims, pipeline, f"{what}: FSDP2"):
                group.gradient_divide_factor = 1.0
                # Else the factor would be multiplied inside the reduction, which gloo cannot.
                group.force_sum_reduction_for_comms = True
    return Wrapped(module)


def fsdp_parts(module: torch.nn.Module) -> Iterator[FSDPModule]:
    """The modules that fully_shard was applied to."""
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def fsdp_groups(part: FSDPModule) -> list[Any]:
    """FSDP2's groups of parameters; releases of torch differ in how many a module has."""
    state: Any = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def trained_leaves(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Returns where autograd adds up gradients: parameters, and what FSDP2 gathers them into."""
    leaves = list(module.parameters())
    for part in fsdp_parts(module):
        for group in fsdp_groups(part):
            gathered = (getattr(each, "_unsharded_param", None) for each in group.fsdp_params)
            leaves += [each for each in gathered if each is not None]
    return list({id(each): each for each in leaves}.values())


def _is_inside(
    ranks: Sequence[int], mesh: StageMesh, data_dims: Sequence[int], pipeline: Sequence[int], what: str
) -> bool:
    """Returns whether these are the ranks that the stage splits its samples over; False: they are of other
    pipelines."""
    expected = mesh.along(data_dims)
    if sorted(ranks) == sorted(expected):
        return True
    if len(set(ranks) & set(pipeline)) == 1 and len(ranks) > 1:
        return False
    raise LayoutError(
        f"{what} reduces gradients over ranks {sorted(ranks)}, but the stage splits its samples over "
        f"ranks {sorted(expected)}: give the stage the same mesh= and input_placements= (or data_dims=), or, "
        "for one pipeline in each data-parallel column, a group= without the other ranks; this one has ranks "
        f"{list(pipeline)}"
    )


class LastBackward:
    """Tells FSDP2 which backward of a step is the last. Does nothing for other modules."""

    def __init__(self, module: Any) -> None:
        self._parts = list(fsdp_parts(module))
        self._left = 0

    @property
    def active(self) -> bool:
        return bool(self._parts)

    def begin_step(self, microbatches: int, *, finalize: bool = True) -> None:
        """finalize: its last backward is the last; else a later step's is."""
        self._left = microbatches if finalize else microbatches + 1
        self.reshard()  # a forward outside may have left parameters gathered

    def reshard(self) -> None:
        """Makes the module hold its own shards again. A forward without a backward leaves some gathered, and
        gradients are those of the shards."""
        for part in self._parts:
            part.reshard()

    def before_backward(self) -> None:
        """Once per micro-batch."""
        self._left -= 1
        last = self._left == 0
        for part in self._parts:
            part.set_is_last_backward(last)
            part.set_requires_gradient_sync(last, recurse=False)
            # Gathered parameters stay between the micro-batches of a step.
            part.set_reshard_after_backward(last, recurse=False)


def shared_parameters_of(
    stage: int, named: Mapping[str, str], module: torch.nn.Module
) -> dict[str, torch.nn.Parameter]:
    """The parameters by key. Raises LayoutError naming the one that is missing or laid out over ranks."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    # torch.compile(module) puts "_orig_mod." before its parameters' names, which its user does not write.
    parameters |= {name.replace("_orig_mod.", ""): each for name, each in parameters.items()}
    for key, name in named.items():
        if name not in parameters:
            raise LayoutError(
                f"stage {stage}, shared parameter {key!r}: the module has no parameter {name!r}"
            )
        if isinstance(parameters[name].data, DTensor):
            raise LayoutError(
                f"stage {stage}, shared parameter {key!r}: {name!r} is a DTensor; a shared parameter must be "
                "whole on every rank of its stages"
            )
    return {key: parameters[name] for key, name in named.items()}
