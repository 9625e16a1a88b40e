"""A stage's module: its data-parallel wrappers, DistributedDataParallel and FSDP2, and its shared parameters.

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
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshcast.errors import LayoutError
from meshcast.pipelining.layouts import StageMesh

__all__ = [
    "LastBackward",
    "Wrapped",
    "fsdp_groups",
    "fsdp_parts",
    "look_through",
    "shared_parameters_of",
    "trained_leaves",
]


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
