"""ScheduleAuto: a schedule that is chosen at the first step, what ``get_schedule_class("auto")`` gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules

from ..errors import LayoutError, MeshcastError
from ..pipelining.board import refusals_told
from ..pipelining.microbatch import Pieces
from ..pipelining.schedule import PipelineSchedule, ScheduleOptions
from ..pipelining.schedules import ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from ..pipelining.stage import PipelineStage, check_kinds, group_of
from .choose import Choice, ExampleBatch, listed_stages, search

__all__ = ["ScheduleAuto"]


class ScheduleAuto(torch_schedules._PipelineSchedule):
    """Chooses as `choose` does, with the batch of the first step, and runs what was chosen from then on.

    Args:
        stages: this rank's stage, or a list of them.
        n_microbatches: of a step; None lets it be chosen too.
        loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads: as schedules take them.
        memory_budget: bytes of activations that this rank may hold at once; None: no limit.
        columns: as `choose` takes it.
        show: the first rank prints the table.
        options: of every schedule, see `PipelineSchedule`, but for those that are chosen: warmup and
            delay_weight_grad.

    Attributes:
        choice: what was chosen; None before the first step.

    Raises:
        LayoutError: bad arguments; at the first step as `choose`.

    Example, on every rank::

        from meshcast.pipelining import PipelineStage, get_schedule_class

        rank, ranks = dist.get_rank(), dist.get_world_size()
        stage = PipelineStage(torch.nn.Linear(8, 8), rank, ranks, torch.device("cpu"))
        schedule = get_schedule_class("auto")(stage, 8, loss_fn=torch.nn.functional.mse_loss)
        x, y = torch.randn(32, 8), torch.randn(32, 8)
        for _ in range(2):  # the first step chooses
            schedule.step(*([x] if stage.is_first else []), target=y if stage.is_last else None)
    """

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int | None = None,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any, ...] | None = None,
        scale_grads: bool = True,
        *,
        memory_budget: float | None = None,
        columns: dist.ProcessGroup | None = None,
        show: bool = True,
        **options: Any,
    ) -> None:
        with refusals_told(group_of(stages)):
            chosen_here = {"warmup", "times", "delay_weight_grad"}.intersection(options)
            if chosen_here:
                raise LayoutError(f"ScheduleAuto chooses {', '.join(sorted(chosen_here))}: leave it out")
            unknown = set(options) - set(ScheduleOptions.__annotations__)
            if unknown:
                raise TypeError(
                    f"ScheduleAuto got an unexpected keyword argument: {', '.join(sorted(unknown))}"
                )
            self._listed = listed_stages(stages)
            check_kinds(self._listed)
        self.choice: Choice | None = None
        self._schedule: PipelineSchedule | None = None
        self._early: PipelineSchedule | None = None  # that evaluates before the first step
        count: Any = n_microbatches  # None until it is chosen
        super().__init__(
            count,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
        )
        self._budget, self._columns, self._show = memory_budget, columns, show
        self._options = dict(options)

    def step(self, *args: Any, **named: Any) -> Any:
        """Runs a step as `PipelineSchedule.step` does; the first call chooses the schedule before that."""
        if self._schedule is None:
            bound = inspect.signature(PipelineSchedule.step).bind(self, *args, **named)
            bound.apply_defaults()
            given = bound.arguments
            batch = ExampleBatch(
                given["args"],
                given["kwargs"],
                given["target"],
                (self._args_chunk_spec, self._kwargs_chunk_spec),
                Pieces(given["arg_mbs"], given["kwarg_mbs"], given["target_mbs"], given["local_batch"]),
            )
            self._choose(batch, given["loss_kwargs"])
        return self._chosen.step(*args, **named)

    def eval(self, *args: Any, **named: Any) -> Any:
        """Runs an evaluation as `PipelineSchedule.eval` does. Before the first step forwards run in an order
        that fits every placement, in as many micro-batches as there are ranks in the pipeline, unless their
        number was given."""
        if self._schedule is not None:
            return self._schedule.eval(*args, **named)
        if self._early is None:
            self._early = self._made(self._plain(), self._n_microbatches or self._listed[0].num_stages, {})
        return self._early.eval(*args, **named)

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Runs a step on micro-batches, as in torch."""
        if self._schedule is None:
            pieces = Pieces(arg_mbs, kwarg_mbs, target_mbs)
            self._choose(ExampleBatch((), {}, None, (None, None), pieces), loss_kwargs)
        self._chosen._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs)

    def close(self) -> None:
        """Drops the transfers."""
        for each in (self._schedule, self._early):
            if each is not None:
                each.close()

    @property
    def _chosen(self) -> PipelineSchedule:
        assert self._schedule is not None
        return self._schedule

    def __getattr__(self, name: str) -> Any:
        """An attribute of the chosen schedule: ``trace``, ``summary``, ``draw``, ``pipeline_order``, ..."""
        chosen = self.__dict__.get("_schedule")
        if chosen is None or name.startswith("__"):
            raise AttributeError(f"ScheduleAuto has no {name!r} before its first step chooses a schedule")
        return getattr(chosen, name)

    def _choose(self, batch: ExampleBatch, loss_kwargs: Mapping[str, Any] | None) -> None:
        with refusals_told(group_of(self._listed) if self._columns is None else self._columns):
            if not torch.is_grad_enabled():
                raise MeshcastError(
                    "step trains and needs gradients enabled; use eval under torch.no_grad", op="pipeline"
                )
        self.choice = search(
            self._listed,
            self._loss_fn,
            batch,
            self._n_microbatches,
            self._budget,
            loss_kwargs=loss_kwargs,
            columns=self._columns,
            timeout=self._options.get("timeout"),
            show=self._show,
        )
        self._n_microbatches = self.choice.microbatches
        self._schedule = self._made(self.choice.schedule, self._n_microbatches, self.choice.options)
        if self._early is not None:
            self._early.close()
            self._early = None

    def _made(self, kind: Any, microbatches: int, options: Mapping[str, Any]) -> PipelineSchedule:
        single = issubclass(kind, torch_schedules.PipelineScheduleSingle)
        specs: dict[str, Any] = {
            "args_chunk_spec": self._args_chunk_spec,
            "kwargs_chunk_spec": self._kwargs_chunk_spec,
        }
        if issubclass(kind, torch_schedules.ScheduleLoopedBFS):  # which has none
            if any(each is not None for each in specs.values()):
                raise LayoutError("ScheduleLoopedBFS was chosen, which takes no chunk specs")
            specs = {}
        return kind(
            self._listed[0] if single else self._listed,
            microbatches,
            loss_fn=self._loss_fn,
            output_merge_spec=self._output_merge_spec,
            scale_grads=self.scale_grads,
            **specs,
            **{**self._options, **options},
        )

    def _plain(self) -> type[PipelineSchedule]:
        numbers, count = sorted(stage.stage_index for stage in self._listed), self._listed[0].num_stages
        if len(numbers) == 1:
            return ScheduleGPipe
        return ScheduleZBVZeroBubble if sum(numbers) == count - 1 else ScheduleInterleaved1F1B
