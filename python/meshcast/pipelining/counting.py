"""The gradients of this rank's stages, and which of them it counts, so that a quantity of all gradients of
the pipeline has each element once.

Who counts what is decided by the ranks of the meshes, not by the names of their dimensions: a parameter may
lie on a part of the stage's mesh, or on a mesh that joins several pipelines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from meshcast.errors import LayoutError, MeshcastError
from meshcast.pipelining.pipeline_stage import PipelineStage
from meshcast.pipelining.shapes import local_values

__all__ = ["Counted", "all_reduce_over", "counted", "outside_mesh", "own_stages", "parameters"]


@dataclass(slots=True)
class Counted:
    """Local gradients that this rank counts: those to be added up in the pipeline's group, and those to be
    added up over a mesh that is larger than the stage's first, after which `leads` adds the sum here."""

    inside: list[torch.Tensor]
    outside: dict[DeviceMesh, list[torch.Tensor]]  # the same meshes, in the same order, on all their ranks
    leads: bool


def own_stages(stages: Any, op: str) -> list[PipelineStage]:
    """This rank's stages, ascending. Raises LayoutError unless they can be one rank's. op: names the
    operation in errors."""
    # A module may be iterable as well; it is named as a whole.
    several = isinstance(stages, Iterable) and not isinstance(stages, torch.nn.Module)
    listed = [*stages] if several else [stages]
    where = f"rank {dist.get_rank()}, {op}" if dist.is_initialized() else op
    for stage in listed:
        if not isinstance(stage, PipelineStage):
            raise LayoutError(
                f"{where}: expected a meshcast.pipelining.PipelineStage or a list of this rank's stages, "
                f"found {type(stage).__name__}: give the stages that the schedule was made with"
            )
    if not listed:
        raise LayoutError(f"{where}: expected at least one stage, found none: give all stages of this rank")
    for stage in listed[1:]:
        if stage.group is not listed[0].group:
            raise LayoutError(
                f"{where}: expected stages of one pipeline, found unlike groups: stage "
                f"{listed[0].stage_index} has {listed[0].group}, stage {stage.stage_index} has "
                f"{stage.group}: call it once for each pipeline"
            )
    return sorted(listed, key=lambda stage: stage.stage_index)


def parameters(stages: Sequence[PipelineStage]) -> list[torch.nn.Parameter]:
    """The parameters that are trained, each once, also where two stages have the same one."""
    found = (p for stage in stages for p in stage.submod.parameters())
    return list({id(p): p for p in found if p.requires_grad or p.grad is not None}.values())


def counted(stages: Sequence[PipelineStage], op: str) -> Counted:
    """The gradients that this rank counts. Collective over the mesh of a gradient that is a pending sum.

    Raises LayoutError before the first step, when the stages do not know yet who shares parameters.
    """
    copies, first_copies = set(), set()
    for stage in stages:
        if stage.sharing is None:
            # On every rank, also where nothing is shared: the others would wait for those that raise.
            raise LayoutError(
                f"rank {stage.rank}, {op}: expected stages whose schedule has run, found stage "
                f"{stage.stage_index} before its first step: call step, on every rank, before {op}",
                rank=stage.rank,
                op=op,
            )
        for key, parameter in stage.shared.items():
            copies.add(id(parameter))
            if stage.stage_index == stage.sharing[key][0]:
                first_copies.add(id(parameter))
    # Stages of a rank have the same ranks, if in unlike shapes: one of them leads in all.
    members = set(stages[0].mesh.ranks)
    leader = min(members)
    found = Counted([], {}, stages[0].rank == leader)
    for parameter in parameters(stages):
        if id(parameter) in copies and id(parameter) not in first_copies:
            continue
        mesh = outside_mesh(parameter, members)
        # Also without a gradient here: other ranks of that mesh may have one.
        into = found.inside if mesh is None else found.outside.setdefault(mesh, [])
        if parameter.grad is not None:
            gradient = _reduced(parameter)  # by all ranks of its mesh, whoever counts the result
            if _counts(parameter, stages[0].rank, leader, outside=mesh is not None):
                into.append(local_values(gradient))
    return found


def outside_mesh(parameter: torch.nn.Parameter, members: set[int]) -> DeviceMesh | None:
    """The parameter's mesh if it has other ranks than those of the stage: FSDP2 over the same stage of
    several pipelines."""
    if not isinstance(parameter.data, DTensor):
        return None
    mesh = parameter.data.device_mesh
    return None if members.issuperset(mesh.mesh.flatten().tolist()) else mesh


def all_reduce_over(
    mesh: DeviceMesh | None, values: torch.Tensor, reduction: Any, stage: PipelineStage, op: str
) -> None:
    """All-reduces over all dimensions of a mesh, one after the other; None: over the pipeline's group.

    Raises MeshcastError where that fails, as when another rank dies.
    """
    groups = [stage.group]
    if mesh is not None:
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    try:
        for group in groups:
            dist.all_reduce(values, op=reduction, group=group)
    except RuntimeError as error:
        raise MeshcastError(
            f"rank {stage.rank}, {op}: an all-reduce with the other ranks of the pipeline failed: "
            f"{(str(error).splitlines() or [''])[0]}. One of them may have ended: look at its own output",
            rank=stage.rank,
            op=op,
            phase="transfer",
        ) from error


def _counts(parameter: torch.nn.Parameter, rank: int, leader: int, *, outside: bool) -> bool:
    """Returns whether this rank is the first that has its part of the parameter."""
    if not isinstance(parameter.data, DTensor):
        return rank == leader  # all ranks of the stage have it
    ranks = parameter.data.device_mesh.mesh
    # A mesh that is a part of the stage's is one of several, each with the whole parameter: the leader's one
    # counts. A larger one is added up as a whole.
    if not outside and leader not in ranks.flatten().tolist():
        return False
    place = (ranks == rank).nonzero().tolist()
    if not place:
        return False
    placements = parameter.data.placements
    return all(at == 0 or not isinstance(p, Replicate) for at, p in zip(place[0], placements, strict=True))


def _reduced(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient laid out as the parameter is: pending sums are carried out."""
    gradient: Any = parameter.grad
    placed: Any = parameter.data
    assert gradient is not None
    if not isinstance(gradient, DTensor) or gradient.placements == placed.placements:
        return gradient
    return gradient.redistribute(placements=placed.placements)
