"""The schedules a user makes: cut a batch into micro-batches, run them through the pipeline, return losses
and outputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch

from meshcast.errors import AbortedError, LayoutError, MeshcastError
from meshcast.groups import parent_group, seconds
from meshcast.pipelining.action import Action, Actions
from meshcast.pipelining.edge import links_of
from meshcast.pipelining.exchange import Exchange
from meshcast.pipelining.lower import AHEAD, lower
from meshcast.pipelining.runtime import Runtime
from meshcast.pipelining.schedules import build, forward_only
from meshcast.pipelining.stage import PipelineStage
from meshcast.pipelining.step import StepFeed
from meshcast.pipelining.validate import validate
from meshcast.pipelining.wiring import StageTable, agree_on_stages, connect, describe_stage

__all__ = ["PipelineSchedule", "Schedule1F1B", "ScheduleEager1F1B", "ScheduleGPipe", "get_schedule_class"]


class PipelineSchedule:
    """Base of the schedules of one stage per rank. Every rank of every stage makes its own, in the same
    order.

    Args:
        stage: this rank's stage.
        n_microbatches: into how many parts ``step`` cuts the batch; must divide it.
        loss_fn: ``loss_fn(output, target)``, a mean over the samples it is given. Used on the last stage,
            which decides whether the pipeline trains; without it only forward runs.
        args_chunk_spec, kwargs_chunk_spec, output_merge_spec: as in torch.distributed.pipelining.
        scale_grads: gradients are those of the mean over micro-batches; else of the sum.
        sync_gradients: ``step`` sums the gradients of parameters over the data-parallel ranks of each stage.
            If False, call ``stage.sync_gradients()`` after it.
        timeout: limit for each transfer and each agreement, seconds or timedelta; default: the group's.

    Raises:
        LayoutError: bad arguments.
    """

    name: ClassVar[str]

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any, ...] | None = None,
        scale_grads: bool = True,
        *,
        sync_gradients: bool = True,
        timeout: float | timedelta | None = None,
    ) -> None:
        self._timeout = seconds(timeout, parent_group(stage.group, "pipeline").timeout)
        self._exchange = Exchange(stage.group, self._timeout)
        try:
            if not isinstance(stage, PipelineStage):
                raise LayoutError(
                    f"stage must be a meshcast.pipelining.PipelineStage, found {type(stage).__name__}"
                )
            if n_microbatches < 1:
                raise LayoutError(f"n_microbatches must be at least 1, found {n_microbatches}")
        except LayoutError as error:
            self._exchange.fail("stage", str(error))
            raise
        self._stage = stage
        self._microbatches = n_microbatches
        self._loss_fn = loss_fn
        self._chunk_specs = (args_chunk_spec, kwargs_chunk_spec)
        self._merge_spec = output_merge_spec
        self._scale_grads = scale_grads
        self._sync_gradients = sync_gradients
        self._table: StageTable | None = None
        self._runtime: Runtime | None = None
        self._rows: dict[bool, list[Action]] = {}  # this rank's lowered actions; key: training
        self._shapes: list[tuple[int, ...]] = []
        self._steps = 0
        self._failed: str | None = None
        self._exchange.publish("stage", describe_stage(stage, self.name, n_microbatches, loss_fn is not None))

    @property
    def actions(self) -> Actions:
        """Lowered actions of a step, by global rank. All ranks of a stage's mesh run the same ones."""
        table = self._agreed()
        rows = self._lower(table.trains)
        return {rank: list(rows[stage]) for stage, ranks in enumerate(table.ranks) for rank in sorted(ranks)}

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to other ranks over the edges of the pipeline, both directions, in all
        steps so far."""
        return 0 if self._runtime is None else self._runtime.bytes_sent

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs one batch through the pipeline, forward and backward. Every rank of every stage calls it.

        Args:
            args: the batch, first stage only (ignored elsewhere): whole, the same on each of its ranks. The
                runtime takes each rank's shard of each micro-batch.
            target: the whole batch's targets, last stage only, cut like the arguments.
            losses: filled on every rank of the last stage with the mean loss of each micro-batch over all its
                samples.
            return_outputs: return the outputs on the last stage.
            loss_kwargs: more arguments for ``loss_fn``.
            kwargs: keyword arguments of this stage's module; tensors are cut like the arguments.

        Returns:
            On the last stage this rank's local outputs, micro-batches joined along dimension 0; None
            elsewhere and without ``return_outputs``.

        Raises:
            LayoutError: the batch cannot be cut, its shape differs from the first step's, outputs do not
                match their layout.
            MeshcastError: a module raised; names rank, stage and micro-batch. The other ranks raise
                AbortedError with this first cause; one that had finished its part does so in its next step.
        """
        trains = self._agreed().trains
        if trains and not torch.is_grad_enabled():
            raise MeshcastError(
                "step trains and needs gradients enabled; use eval under torch.no_grad", op="pipeline"
            )
        return self._step(args, kwargs, target, losses, return_outputs, loss_kwargs, trains)

    def eval(self, *args: Any, target: Any = None, losses: list[Any] | None = None, **kwargs: Any) -> Any:
        """`step` without gradients: forward only, losses where there are targets."""
        with torch.no_grad():
            return self._step(args, kwargs, target, losses, True, None, False)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes this rank's part of the last step as a Chrome trace."""
        if self._runtime is None:
            raise MeshcastError("there is no step to trace yet", op="pipeline")
        self._runtime.trace.write(path, self._stage.rank)

    def close(self) -> None:
        """Drops the transfers. Later steps raise AbortedError."""
        self._failed = self._failed or "the schedule was closed"
        if self._runtime is not None:
            self._runtime.close()

    def _step(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
        train: bool,
    ) -> Any:
        if self._failed is not None:
            raise AbortedError(
                f"the pipeline failed before: {self._failed}", rank=self._stage.rank, op="pipeline"
            )
        try:
            feed = self._feed(args, kwargs, target, loss_kwargs, return_outputs)
            runtime = self._connected(feed)
            with self._accumulating(train):
                runtime.run(self._row(train), feed, train=train)
                self._finish(feed, train, losses)
        except BaseException as error:
            self._fail(error)
            raise
        self._steps += 1
        return feed.merged(self._merge_spec) if return_outputs and self._stage.is_last else None

    def _agreed(self) -> StageTable:
        if self._table is None:
            self._table = agree_on_stages(self._exchange)
        return self._table

    def _feed(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        loss_kwargs: dict[str, Any] | None,
        keep_outputs: bool,
    ) -> StepFeed:
        return StepFeed(
            self._stage,
            self._microbatches,
            args if self._stage.is_first else (),
            kwargs,
            target if self._stage.is_last else None,
            self._chunk_specs,
            self._loss_fn,
            loss_kwargs or {},
            self._scale_grads,
            keep_outputs,
        )

    def _connected(self, feed: StepFeed) -> Runtime:
        """The runtime, made by the first step. Later steps must bring the shapes of the first."""
        if self._runtime is None:
            wiring = connect(
                self._stage,
                self._agreed(),
                self._exchange,
                feed.arguments(0),
                feed.keywords(0),
                self._timeout,
            )
            self._runtime = Runtime(self._stage, wiring, self._timeout)
            self._shapes = feed.shapes
        elif feed.shapes != self._shapes:
            raise LayoutError(
                f"rank {self._stage.rank}, stage {self._stage.stage_index}: micro-batches have "
                f"shapes {feed.shapes}, those of the first step "
                f"had {self._shapes}; the transfers are compiled for one shape. Drop or pad a last, "
                "smaller batch",
                rank=self._stage.rank,
                op="pipeline",
            )
        feed.learn_share(self._runtime.inputs)
        return self._runtime

    def _row(self, train: bool) -> list[Action]:
        if train not in self._rows:
            self._rows[train] = self._lower(train)[self._stage.stage_index]
        return self._rows[train]

    def _lower(self, train: bool) -> Actions:
        """Lowered and validated actions, by stage."""
        stages, microbatches = self._stage.num_stages, self._microbatches
        built = build(self.name, stages, microbatches)
        if not train:
            built = forward_only(built)
        links = None if self._stage.edges is None else links_of(self._stage.edges)
        lowered = lower(built, links, AHEAD)
        validate(lowered, stages, microbatches, links=links, forward_only=not train)
        return lowered

    @contextmanager
    def _accumulating(self, train: bool) -> Iterator[None]:
        """Keeps gradients of earlier steps out of the sum over ranks: they have been summed already."""
        apart = train and self._sync_gradients and self._stage.batch_parts > 1
        earlier = (
            [(p, p.grad) for p in self._stage.submod.parameters() if p.grad is not None] if apart else []
        )
        for parameter, _ in earlier:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in earlier:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def _finish(self, feed: StepFeed, train: bool, losses: list[Any] | None) -> None:
        """Once all actions ran: what the ranks of the stage do together."""
        if self._stage.mesh.size > 1:
            # The collectives below are those of the user's mesh and cannot be aborted: nobody enters them
            # unless all got here.
            self._exchange.publish(f"step/{self._steps}", {})
            self._exchange.collect(f"step/{self._steps}", self._stage.mesh.ranks)
            if self._steps:
                self._exchange.forget(f"step/{self._steps - 1}")
        if train and self._sync_gradients:
            self._stage.sync_gradients()
        if self._stage.is_last:
            means = feed.mean_losses()
            if losses is not None:
                losses[:] = means

    def _fail(self, error: BaseException) -> None:
        """Takes the other ranks along, in bounded time, with the first cause."""
        cause = f"rank {self._stage.rank}: {type(error).__name__}" if not str(error) else str(error)
        self._failed = cause
        if self._runtime is None:
            for topic in (f"shapes/{self._stage.stage_index}", "checked"):
                self._exchange.fail(topic, cause)
            return
        self._runtime.abort(cause)
        self._runtime.clear()
        if self._stage.mesh.size > 1:
            self._exchange.fail(f"step/{self._steps}", cause)


class ScheduleGPipe(PipelineSchedule):
    """All forwards, then all backwards; see `meshcast.pipelining.schedules.gpipe`."""

    name = "GPipe"


class Schedule1F1B(PipelineSchedule):
    """One backward and one forward in turn; see `meshcast.pipelining.schedules.one_f_one_b`."""

    name = "1F1B"


class ScheduleEager1F1B(PipelineSchedule):
    """1F1B with a longer warm-up, which hides forward transfers; see
    `meshcast.pipelining.schedules.eager_1f1b`."""

    name = "Eager1F1B"


_CLASSES: dict[str, type[PipelineSchedule]] = {
    cls.name: cls for cls in (ScheduleGPipe, Schedule1F1B, ScheduleEager1F1B)
}


def get_schedule_class(name: str) -> type[PipelineSchedule]:
    """The class of a schedule: "GPipe", "1F1B" or "Eager1F1B", in any case, with or without "Schedule" before
    it.

    Raises LayoutError that lists the names there are.
    """
    wanted = name.lower().removeprefix("schedule")
    for known, cls in _CLASSES.items():
        if known.lower() == wanted:
            return cls
    raise LayoutError(f"there is no schedule {name!r}; choose one of {', '.join(_CLASSES)}")
