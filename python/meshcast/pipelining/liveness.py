"""The number of activations that a rank of a schedule holds at once, and a numbered place for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from meshcast.base.checks import typed_arguments
from meshcast.errors import LayoutError

__all__ = ["PipelineActivationLiveness", "analyze_pipeline_activation_liveness"]

Span = tuple[int, int]


@dataclass(frozen=True)
class PipelineActivationLiveness:
    """The places of a rank's activations, as torch.distributed.pipelining 2.15 has them.

    Attributes:
        pp_rank: the rank of the schedule.
        stage_indices: the stages that were looked at, ascending.
        granularity: "stage_microbatch": an activation of one stage and micro-batch has a place of its own;
            "microbatch": those of all these stages share one for each micro-batch.
        num_microbatches: of a step.
        num_slots: how many places are enough.
        slot_by_stage_and_microbatch: the place of each, from 0.
        lifetimes: first and last position in the rank's order at which it is held, both included.
    """

    pp_rank: int
    stage_indices: tuple[int, ...]
    granularity: str
    num_microbatches: int
    num_slots: int
    slot_by_stage_and_microbatch: Mapping[tuple[int, int], int]
    lifetimes: Mapping[tuple[int, int], Span]

    def slot_for(self, stage_index: int, microbatch_index: int) -> int:
        """Raises LayoutError, a ValueError, for a stage or micro-batch that was not looked at."""
        return self._of(self.slot_by_stage_and_microbatch, "slot", stage_index, microbatch_index)

    def get_activation_lifetime(self, stage_index: int, microbatch_index: int) -> Span:
        """Raises LayoutError, a ValueError, for a stage or micro-batch that was not looked at."""
        return self._of(self.lifetimes, "lifetime", stage_index, microbatch_index)

    def _of(self, found: Mapping[tuple[int, int], Any], what: str, stage: int, microbatch: int) -> Any:
        if (stage, microbatch) not in found:
            raise LayoutError(
                f"No activation {what} exists for stage {stage}, micro-batch {microbatch}: rank "
                f"{self.pp_rank} was looked at for stages {list(self.stage_indices)} and "
                f"{self.num_microbatches} micro-batches"
            )
        return found[stage, microbatch]


@typed_arguments()
def analyze_pipeline_activation_liveness(
    schedule: Any,
    *,
    pp_rank: int,
    stage_indices: Iterable[int] | None = None,
    granularity: Literal["stage_microbatch", "microbatch"] = "stage_microbatch",
) -> PipelineActivationLiveness:
    """A place for each activation that a rank holds from its forward to its backward (of the weights, where
    the backward is split), such that no two that are held at once share one.

    Args:
        schedule: a schedule with a ``pipeline_order``; only that is looked at.
        pp_rank: the rank of the schedule, not of the process group.
        stage_indices: stages of that rank; default: all.
        granularity: see `PipelineActivationLiveness`.

    Raises:
        LayoutError: there is no such rank or stage, or an activation is never released.

    Example, on every rank::

        from meshcast.pipelining import (
            PipelineStage,
            ScheduleInterleaved1F1B,
            analyze_pipeline_activation_liveness,
        )

        rank, ranks = dist.get_rank(), dist.get_world_size()
        stages = [
            PipelineStage(torch.nn.Linear(8, 8), number, 2 * ranks, torch.device("cpu"))
            for number in (rank, rank + ranks)
        ]
        schedule = ScheduleInterleaved1F1B(stages, 8, loss_fn=torch.nn.functional.mse_loss)
        places = analyze_pipeline_activation_liveness(schedule, pp_rank=rank)
        assert places.num_slots < 2 * 8  # fewer than there are activations
        assert places.slot_for(rank, 0) == 0
    """
    if granularity not in ("stage_microbatch", "microbatch"):
        raise LayoutError(f'granularity is "stage_microbatch" or "microbatch", found {granularity!r}')
    order = schedule.pipeline_order or {}
    if pp_rank not in order:
        raise LayoutError(f"the schedule has actions for ranks {sorted(order)}, not for pp_rank={pp_rank}")
    spans = _lifetimes(order[pp_rank])
    there = sorted({stage for stage, _ in spans})
    wanted = there if stage_indices is None else sorted(set(stage_indices))
    if not set(wanted) <= set(there):
        raise LayoutError(f"rank {pp_rank} of the schedule runs stages {there}, stage_indices are {wanted}")
    spans = {key: span for key, span in spans.items() if key[0] in wanted}
    if granularity == "microbatch":
        whole: dict[int, Span] = {}
        for (_, microbatch), (first, last) in spans.items():
            begin, end = whole.get(microbatch, (first, last))
            whole[microbatch] = min(begin, first), max(end, last)
        spans = {key: whole[key[1]] for key in spans}
        shared = _placed(whole)
        slots = {key: shared[key[1]] for key in spans}
    else:
        slots = _placed(spans)
    return PipelineActivationLiveness(
        pp_rank=pp_rank,
        stage_indices=tuple(wanted),
        granularity=granularity,
        num_microbatches=1 + max((microbatch for _, microbatch in spans), default=-1),
        num_slots=1 + max(slots.values(), default=-1),
        slot_by_stage_and_microbatch=MappingProxyType(dict(sorted(slots.items()))),
        lifetimes=MappingProxyType(dict(sorted(spans.items()))),
    )


def _lifetimes(row: Iterable[Any]) -> dict[tuple[int, int], Span]:
    begun: dict[tuple[int, int], int] = {}
    spans: dict[tuple[int, int], Span] = {}
    for position, whole in enumerate(row):
        for action in () if whole is None else whole.sub_actions or (whole,):
            key, kind = (action.stage_index, action.microbatch_index), action.computation_type.value
            if kind == "F":
                begun[key] = position
            elif kind in ("B", "W"):
                if key not in begun:
                    raise LayoutError(f"position {position}: {action} without its forward before it")
                spans[key] = begun.pop(key), position
    if begun:
        raise LayoutError(f"activations of (stage, micro-batch) {sorted(begun)} are never released")
    return spans


def _placed(spans: Mapping[Any, Span]) -> dict[Any, int]:
    """The lowest free place for each, by the time that it is taken: as few places as are held at once."""
    places: dict[Any, int] = {}
    free_from: list[int] = []  # of each place, the first position at which it is free
    for key, (first, last) in sorted(spans.items(), key=lambda item: (item[1], item[0])):
        place = next((place for place, free in enumerate(free_from) if free <= first), len(free_from))
        if place == len(free_from):
            free_from.append(0)
        places[key], free_from[place] = place, last + 1
    return places
