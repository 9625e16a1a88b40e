"""The stages of one rank: whether they can run in one schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.distributed.pipelining import stage as torch_stage

from meshcast.base.checks import shown
from meshcast.errors import LayoutError
from meshcast.pipelining.orders import check_size
from meshcast.pipelining.pipeline_stage import PipelineStage

__all__ = ["check_kinds", "checked", "group_of", "reduce_once"]


def group_of(stages: object) -> Any:
    """The process group of the pipeline that a stage, or several, are of, whatever was given for them."""
    first = stages[0] if isinstance(stages, Sequence) and stages else stages
    return getattr(first, "group", None)


def check_kinds(stages: object) -> None:
    """Raises LayoutError for what are no stages, or torch's own. Other subclasses of torch's base may be
    looked at, but not run."""
    if not isinstance(stages, Sequence) or not stages:
        raise LayoutError(f"a schedule needs at least one stage on this rank, found {stages!r}")
    for stage in stages:
        if type(stage) in (torch_stage.PipelineStage, torch_stage._PipelineStage) or not isinstance(
            stage, torch_stage._PipelineStageBase
        ):
            raise LayoutError(
                f"stage must be a meshcast.pipelining.PipelineStage, found {type(stage).__name__} of "
                f"{type(stage).__module__}: import it, pipeline and build_stage from meshcast.pipelining"
            )


def checked(stages: Sequence[PipelineStage], microbatches: int) -> dict[int, PipelineStage]:
    """The stages by number, ascending. Raises LayoutError unless they can be one rank's."""
    if isinstance(microbatches, bool) or not isinstance(microbatches, int):
        raise LayoutError(f"n_microbatches must be an integer, found {shown(microbatches)}")
    check_size(stages[0].num_stages, microbatches)
    if microbatches < 1:
        raise LayoutError(f"n_microbatches must be at least 1, found {microbatches}")
    first = stages[0]
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
    for stage in stages:
        stage.learn_wrappers()
    by_index = {stage.stage_index: stage for stage in stages}
    if len(by_index) != len(stages):
        raise LayoutError(f"rank {first.rank} makes a stage twice: {[s.stage_index for s in stages]}")
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
