"""The stages of one rank: whether they can run in one schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.distributed.pipelining.stage import _PipelineStage as _TracedStage

from meshcast.base.checks import integer, shown
from meshcast.errors import LayoutError
from meshcast.pipelining.orders import check_size
from meshcast.pipelining.refused import TRACED
from meshcast.pipelining.stage import PipelineStage

__all__ = ["check_options", "checked", "divide_gradients", "reduce_once"]


def check_options(stages: Any, loss_fn: Any, times: Any, seed: Any) -> None:
    """Of a schedule. Raises LayoutError."""
    if not isinstance(stages, Iterable):
        raise LayoutError(f"stages must be a list of this rank's stages, found {shown(stages)}")
    if loss_fn is not None and not callable(loss_fn):
        raise LayoutError(f"loss_fn must be a function, found {shown(loss_fn)}")
    if times is not None and not isinstance(times, Mapping):
        raise LayoutError(f"times must be a mapping, found {shown(times)}")
    if seed is not None:
        integer("seed", seed, -(1 << 63), (1 << 64) - 1)


def checked(
    stages: Sequence[PipelineStage], microbatches: int, sync_gradients: bool
) -> dict[int, PipelineStage]:
    """The stages by number, ascending. Raises LayoutError unless they can be one rank's."""
    for stage in stages:
        if not isinstance(stage, PipelineStage):
            hint = f": {TRACED}" if isinstance(stage, _TracedStage) else ""
            raise LayoutError(
                f"stage must be a meshcast.pipelining.PipelineStage, found {type(stage).__name__}{hint}"
            )
    if not stages:
        raise LayoutError("a schedule needs at least one stage on this rank, found none")
    if isinstance(microbatches, bool) or not isinstance(microbatches, int):
        raise LayoutError(f"n_microbatches must be an integer, found {shown(microbatches)}")
    if microbatches < 1:
        raise LayoutError(f"n_microbatches must be at least 1, found {microbatches}")
    first = stages[0]
    check_size(first.num_stages, microbatches)
    for stage in stages[1:]:
        for what, mine, theirs in (
            ("num_stages", first.num_stages, stage.num_stages),
            ("edges", first.edges, stage.edges),
            ("group", first.group, stage.group),
            ("mesh", sorted(first.mesh.ranks), sorted(stage.mesh.ranks)),
            ("device", first.device, stage.device),
        ):
            if mine != theirs:
                raise LayoutError(
                    f"stages {first.stage_index} and {stage.stage_index} of rank {first.rank} have unlike "
                    f"{what}: {mine} and {theirs}"
                )
    by_index = {stage.stage_index: stage for stage in stages}
    if len(by_index) != len(stages):
        raise LayoutError(f"rank {first.rank} makes a stage twice: {[s.stage_index for s in stages]}")
    if not sync_gradients and any(stage.shared for stage in stages):
        raise LayoutError("shared_parameters need sync_gradients=True: their gradients are summed by step")
    return dict(sorted(by_index.items()))


def reduce_once(stages: Iterable[PipelineStage]) -> None:
    """A parameter that several stages of this rank hold is left to the first. Raises LayoutError where they
    would reduce its gradient over unlike ranks."""
    owners: dict[int, PipelineStage] = {}
    for stage in stages:
        stage.reduced_elsewhere.clear()
        for name, parameter in stage.submod.named_parameters():
            first = owners.setdefault(id(parameter), stage)
            if first is stage:
                continue
            mine, other = (each.mesh.along(each.data_dims) for each in (stage, first))
            if sorted(mine) != sorted(other):
                raise LayoutError(
                    f"stages {first.stage_index} and {stage.stage_index} of rank {stage.rank} hold one "
                    f"parameter, {name!r} of the latter, but split their samples over unlike ranks, {other} "
                    f"and {mine}: give them the same mesh= and data_dims=, or copies and shared_parameters="
                )
            stage.reduced_elsewhere.add(id(parameter))


def divide_gradients(stages: Iterable[PipelineStage], weight: float) -> None:
    parameters = {id(each): each for stage in stages for each in stage.submod.parameters()}
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad.div_(weight)
