"""torch.distributed.pipelining.schedules under the same name here: our schedules, called as torch's, of which
they are subclasses, and the rest of its names.

The number of activations that a rank of a schedule holds at once, and a numbered place for each, are found by
analyze_pipeline_activation_liveness.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.pipelining import _utils
from torch.distributed.pipelining import schedules as torch_schedules
from typing_extensions import Unpack

from ..base.checks import typed_arguments
from ..errors import LayoutError, MeshcastError
from ._utils import names_of_torch
from .board import refusals_reported
from .compat import (
    FSDP_DEFAULTS,
    WAIT_REDUCE_GRAD,
    Gathering,
    PipelineStageInfo,
    accepted,
    load_order,
    lowered,
    lowers_by_itself,
    torch_order,
)
from .edge import check_kinds, group_of
from .orders import build
from .schedule import PipelineSchedule, ScheduleOptions
from .stage import PipelineStage
from .step import StepCall

if TYPE_CHECKING:
    from ..tuning.choose import ScheduleAuto

__all__ = [
    "CLASSES",
    "PipelineActivationLiveness",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "PipelineStageInfo",
    "Schedule1F1B",
    "ScheduleAuto",
    "ScheduleDualPipeV",
    "ScheduleEager1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBV",
    "ScheduleZBVZeroBubble",
    "WAIT_REDUCE_GRAD",
    "_PipelineScheduleRuntime",
    "_ScheduleForwardOnly",
    "analyze_pipeline_activation_liveness",
    "get_schedule_class",
]


class MultiScheduleOptions(ScheduleOptions, total=False):
    """Keyword arguments of schedules with several stages on each rank: those of `ScheduleOptions`, and
    ``max_active_stages``, ``unshard_lookahead`` and ``defer_reduce_grad_wait``, which `PipelineScheduleMulti`
    explains."""

    max_active_stages: int
    unshard_lookahead: str | tuple[int, ...]
    defer_reduce_grad_wait: bool


_logger = logging.getLogger(__name__)
_THEIRS = torch_schedules.__name__


class PipelineScheduleSingle(PipelineSchedule, torch_schedules.PipelineScheduleSingle):
    """Base of the schedules of one stage on each rank.

    Args:
        stage: this rank's stage.
        n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads, options:
            see `PipelineSchedule`.

    Raises:
        LayoutError: bad arguments.
        ScheduleError: options that the schedule does not have.
    """

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any, ...] | None = None,
        scale_grads: bool = True,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        with refusals_reported(group_of(stage)):
            check_kinds([stage])
            torch_schedules.PipelineScheduleSingle.__init__(
                self,
                stage,
                n_microbatches,
                loss_fn,
                args_chunk_spec,
                kwargs_chunk_spec,
                output_merge_spec,
                scale_grads,
            )
            self._built_order = self.pipeline_order
            self._begin([stage], **options)

    def _get_pipeline_order(self) -> Any:
        """torch's for torch's schedules, unless there are too few micro-batches for it; else what runs,
        except for options that change it."""
        if self.name in _OF_TORCH and self._n_microbatches >= self._num_stages:
            return super()._get_pipeline_order()
        return self.name and torch_order(build(self.name, self._num_stages, max(1, self._n_microbatches)))


class PipelineScheduleMulti(PipelineSchedule, torch_schedules.PipelineScheduleMulti):
    """Base of the schedules of several stages on each rank. Arguments beyond these: see `PipelineSchedule`.

    A subclass gives the actions of every rank in ``pipeline_order``, as one of torch's does.

    Args:
        defer_pp_recv: only ``pipeline_order_with_comms`` shows it: receives are posted ahead anyway.
        max_active_stages: how many stages of a rank FSDP2 may hold gathered at once. A rank with more of them
            frees the one that it needs last, and gathers it again when it computes on it.
        unshard_lookahead: "full", "auto" or a number for each rank of the schedule: how many of the next
            stages torch gathers ahead. Only ``pipeline_order_with_comms`` shows it: FSDP2 gathers in its own
            hooks.
        defer_reduce_grad_wait: only ``pipeline_order_with_comms`` shows it, with WAIT_REDUCE_GRAD.
        use_full_backward: without effect, as in torch.

    Raises:
        LayoutError: bad arguments.
    """

    _orders_itself = False  # whether torch's constructor makes the order that runs
    _faster = ""  # schedules that are faster

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any, ...] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        *,
        max_active_stages: int = 3,
        unshard_lookahead: str | tuple[int, ...] = "full",
        defer_reduce_grad_wait: bool = False,
        use_full_backward: bool | None = None,  # noqa: ARG002  of no effect in torch either
        **options: Unpack[ScheduleOptions],
    ) -> None:
        with refusals_reported(group_of(stages)):
            check_kinds(stages)
            self._gathering = Gathering(max_active_stages, unshard_lookahead, defer_reduce_grad_wait)
            self._defer_pp_recv = defer_pp_recv
            first, each = stages[0], len(stages)
            known = self.name is not None or self._orders_itself
            if known and (first.num_stages % each or (self.name == "ZBV" and each != 2)):
                raise LayoutError(
                    f"{type(self).__name__} has equally many stages on each rank"
                    f"{', exactly 2' if self.name == 'ZBV' else ''}: found {each} of {first.num_stages} here"
                )
            for stage in stages:
                # torch counts ranks, here sets of them.
                if isinstance(stage, PipelineStage) and not stage.alone:
                    stage.group_size = max(1, first.num_stages // each)
                    stage.group_rank = min(one.stage_index for one in stages) % stage.group_size
            given = {
                "stages": stages,
                "n_microbatches": n_microbatches,
                "loss_fn": loss_fn,
                "args_chunk_spec": args_chunk_spec,
                "kwargs_chunk_spec": kwargs_chunk_spec,
                "output_merge_spec": output_merge_spec,
                "scale_grads": scale_grads,
                "backward_requires_autograd": backward_requires_autograd,
                "defer_pp_recv": defer_pp_recv,
                "max_active_stages": max_active_stages,
                "unshard_lookahead": unshard_lookahead,
                "defer_reduce_grad_wait": defer_reduce_grad_wait,
            }
            theirs: Any = torch_schedules.PipelineScheduleMulti
            if self._orders_itself:
                theirs = next(each for each in type(self).__mro__ if each.__module__ == _THEIRS)
            elif isinstance(self, torch_schedules._PipelineScheduleRuntime):
                theirs = torch_schedules._PipelineScheduleRuntime
            theirs.__init__(self, **accepted(theirs, given))
            if self.name == "ZBV":
                self.stage_index_to_group_rank = _utils.generate_stage_to_rank_mapping(
                    first.group_size, first.num_stages, style="v"
                )
                for stage in stages:
                    stage.stage_index_to_group_rank = self.stage_index_to_group_rank
            if self.name is not None:
                ranks = first.num_stages // each
                self.pipeline_order = torch_order(
                    build(
                        self.name,
                        first.num_stages,
                        max(1, n_microbatches),
                        ranks=ranks if self.name != "ZBV" else None,
                    )
                )
            self._built_order = self.pipeline_order
            if self._faster:
                _logger.info("%s runs; %s", type(self).__name__, self._faster)
            self._begin(stages, **options)


class _PipelineScheduleRuntime(PipelineScheduleMulti, torch_schedules._PipelineScheduleRuntime):
    """A schedule of actions loaded from a file or given as a list, with transfers or without, as in torch."""

    def __getattr__(self, name: str) -> Any:
        """The order with transfers as torch would lower it, made when it is first read."""
        if name != "pipeline_order_with_comms" or not self.__dict__.get("pipeline_order"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._gathering.ahead(0, len(self.pipeline_order))  # raises where torch 2.15 would, with our names
        super()._prepare_schedule_with_comms(self.pipeline_order)
        self._lower_as_later(self.pipeline_order)
        return self.pipeline_order_with_comms

    def _load_csv(self, filename: str, format: Any = "compute_only") -> None:  # noqa: A002
        order = load_order(filename, waits=format != "compute_only")
        if format == "compute_only":
            self.pipeline_order = order
        self._prepare_schedule_with_comms(order, format)

    def _prepare_schedule_with_comms(self, actions: Any, format: Any = "compute_only") -> None:  # noqa: A002
        with_transfers = format == "compute_comms"
        if with_transfers and self._gathering.lookahead != "full":
            raise LayoutError(
                f"unshard_lookahead={self._gathering.lookahead!r} does not change an order that holds its "
                "transfers already: give it with the compute actions alone, or write UNSHARD where it belongs"
            )
        self._gathering.ahead(0, len(actions))
        super()._prepare_schedule_with_comms(actions, format)
        self._lower_as_later(actions, format)
        self._given_order = (self.pipeline_order_with_comms if with_transfers else actions), with_transfers

    def _lower_as_later(self, actions: Any, format: Any = "compute_only") -> None:  # noqa: A002
        """Lowers an order under an older torch as torch 2.15 does by itself."""
        if format == "compute_only" and self._gathering != FSDP_DEFAULTS and not lowers_by_itself():
            self.pipeline_order_with_comms = lowered(self, actions, self._gathering)


class _ScheduleForwardOnly(PipelineScheduleSingle, torch_schedules._ScheduleForwardOnly):
    """Forwards alone; losses are refused."""

    name = "ForwardOnly"

    def _check_call(self, call: StepCall) -> None:
        if call.target is not None or call.losses is not None or call.pieces.targets is not None:
            raise MeshcastError("a forward-only schedule computes no losses")
        super()._check_call(call)


class ScheduleGPipe(PipelineScheduleSingle, torch_schedules.ScheduleGPipe):
    """All forwards, then all backwards; see `meshcast.pipelining.orders.gpipe`.

    Arguments: those of `PipelineScheduleSingle`; of the options it has no ``warmup``.
    """

    name = "GPipe"


class Schedule1F1B(PipelineScheduleSingle, torch_schedules.Schedule1F1B):
    """One backward and one forward in turn; see `meshcast.pipelining.orders.one_f_one_b`.

    Arguments: those of `PipelineScheduleSingle`. ``warmup`` is "1f1b" unless it is given.
    """

    name = "1F1B"


class ScheduleEager1F1B(PipelineScheduleSingle):
    """1F1B with a longer warm-up, which hides forward transfers; see
    `meshcast.pipelining.orders.eager_1f1b`.

    Arguments: those of `PipelineScheduleSingle`. ``warmup`` is "eager" unless it is given.
    """

    name = "Eager1F1B"


class ScheduleZBH1(PipelineScheduleSingle):
    """Weight gradients fill bubbles, with the memory of 1F1B; see
    `meshcast.pipelining.orders.zb_h1`.

    Arguments: those of `PipelineScheduleSingle`; of the options it has no ``warmup``. Its backward is always
    split.
    """

    name = "ZBH1"


class ScheduleZBH2(PipelineScheduleSingle):
    """Weight gradients fill all bubbles, with about twice the memory of 1F1B; see
    `meshcast.pipelining.orders.zb_h2`.

    Arguments: those of `PipelineScheduleSingle`; of the options it has no ``warmup``. Its backward is always
    split.
    """

    name = "ZBH2"


class ScheduleZBVZeroBubble(_PipelineScheduleRuntime, torch_schedules.ScheduleZBVZeroBubble):
    """Two stages on each rank, down the ranks and up again; see `meshcast.pipelining.orders.zb_v`.

    Arguments: those of `PipelineScheduleMulti`; of the options it has no ``warmup``.
    """

    name = "ZBV"


ScheduleZBV = ScheduleZBVZeroBubble


class ScheduleInterleaved1F1B(_PipelineScheduleRuntime, torch_schedules.ScheduleInterleaved1F1B):
    """Several stages on each rank, stage s on rank s mod p; see
    `meshcast.pipelining.orders.interleaved_1f1b`.

    Arguments: those of `PipelineScheduleMulti`. ``warmup`` is "1f1b" or "eager", the latter unless it is
    given.
    """

    name = "Interleaved1F1B"


class _OrderOfTorch(_PipelineScheduleRuntime):
    """Base of schedules whose order is torch's."""

    _orders_itself = True


class ScheduleLoopedBFS(_OrderOfTorch, torch_schedules.ScheduleLoopedBFS):
    """torch's: stage after stage, all micro-batches through each.

    Arguments: those of `PipelineScheduleMulti`, except for the chunk specs, which torch's does not have.
    """

    _faster = "ScheduleInterleaved1F1B takes as long and holds fewer activations"

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any, ...] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        **options: Unpack[MultiScheduleOptions],
    ) -> None:
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
            backward_requires_autograd=backward_requires_autograd,
            defer_pp_recv=defer_pp_recv,
            **options,
        )


class ScheduleInterleavedZeroBubble(_OrderOfTorch, torch_schedules.ScheduleInterleavedZeroBubble):
    """torch's: interleaved, weight gradients fill bubbles.

    Arguments: those of `PipelineScheduleMulti`.
    """

    _faster = "ScheduleInterleaved1F1B with delay_weight_grad=True is faster where transfers take time"


class ScheduleDualPipeV(_OrderOfTorch, torch_schedules.ScheduleDualPipeV):
    """torch's: two stages on each rank as in ZBV; a forward and a backward can be run as one action by a
    function that ``register_custom_function`` takes.

    Arguments: those of `PipelineScheduleMulti`.
    """

    _faster = "without a function that overlaps forward and backward, ScheduleZBVZeroBubble is faster"


_OF_TORCH = ("GPipe", "1F1B")
# By the names that `get_schedule_class` takes.
CLASSES: dict[str, type[PipelineSchedule]] = {
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "GPipe": ScheduleGPipe,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "PipelineScheduleSingle": PipelineScheduleSingle,
    "PipelineScheduleMulti": PipelineScheduleMulti,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
    "Eager1F1B": ScheduleEager1F1B,
    "ZBH1": ScheduleZBH1,
    "ZBH2": ScheduleZBH2,
    "ZBV": ScheduleZBV,
}


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


@typed_arguments()
def get_schedule_class(schedule_name: str) -> type[Any]:
    """The class of a schedule, in any case, with or without "Schedule" before its name. "auto":
    `ScheduleAuto`, which chooses at its first step.

    Raises LayoutError, which is a ValueError, that lists the names there are.

    Example::

        from meshcast.pipelining import ScheduleEager1F1B, get_schedule_class

        assert get_schedule_class("eager1f1b") is get_schedule_class("ScheduleEager1F1B") is ScheduleEager1F1B
    """
    found: dict[str, Any] = {name.lower(): cls for name, cls in CLASSES.items()}
    wanted = schedule_name.lower()
    if wanted.removeprefix("schedule") == "auto":
        return __getattr__("ScheduleAuto")
    if wanted.removeprefix("schedule") in found:
        return found[wanted.removeprefix("schedule")]
    raise LayoutError(f"there is no schedule {schedule_name!r}; choose one of {', '.join(CLASSES)}, auto")


__getattr__, __dir__ = names_of_torch("schedules", globals(), {"ScheduleAuto": "tuning.choose"})
