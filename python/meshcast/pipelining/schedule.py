"""The schedules a user makes: cut a batch into micro-batches, run them through the pipeline, return losses
and outputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypedDict

import torch
from torch.distributed.pipelining import schedules as torch_schedules
from typing_extensions import Self

from ..base.checks import shown
from ..errors import AbortedError, Caller, DeadlineExceededError, LayoutError, MeshcastError
from ..groups.parent import parent_group, seconds
from ..topology import Topology
from ..transfers.transfer import PersistentTransfer
from .action import Action, Actions, Link
from .board import PipelineBoard, Refused
from .compat import FSDP_DEFAULTS, Gathering, scales_without_loss
from .data_parallel import hooks_at_the_end
from .edge import checked, links_of, reduce_once
from .gradients import PAIRS_ARE_FINAL, Gradients
from .microbatch import Pieces
from .orders import check_size
from .parallel import current
from .recipe import GivenOrder, Recipe
from .runtime import Runtime, functions_for, functions_of
from .simulate import AutoWarmup, Budget, Span
from .stage import PipelineStage
from .step import StepCall, StepFeed, Wirings
from .table import (
    StageTable,
    StepAnswer,
    StepReport,
    agree_on_stages,
    agree_on_step,
    check_fit,
    describe_stages,
)
from .trace import RecentTimes, StageTimes, Timeline, draw_timelines, exposed_seconds
from .wiring import Wiring, transfer_times

__all__ = ["PipelineSchedule", "ScheduleOptions"]

_CHECKED_FIRST, _CHECKED_EVERY = 3, 64  # of the steps those whose batches are compared: see `_report`


class ScheduleOptions(TypedDict, total=False):
    """Keyword arguments of all schedules, beyond torch's: ``sync_gradients``, ``warmup``, ``memory_budget``,
    ``times``, ``delay_weight_grad``, ``overlap``, ``varying_shapes``, ``max_outstanding_sends``, ``seed``,
    ``timeout`` and ``weight_fn``. `PipelineSchedule` explains them."""

    sync_gradients: bool
    warmup: AutoWarmup | None
    memory_budget: Budget
    times: Mapping[str, Any] | None
    delay_weight_grad: bool
    overlap: bool
    varying_shapes: bool
    max_outstanding_sends: int | None
    seed: int | None
    timeout: float | timedelta | None
    weight_fn: Callable[..., Any] | None


class PipelineSchedule(torch_schedules._PipelineSchedule):
    """Base of all schedules. Every rank of every stage makes its own, in the same order.

    Its subclasses are schedules of torch.distributed.pipelining too. They differ in how a step runs. One
    that has no `name` runs the actions that it was given as torch's: ``pipeline_order``, or, with their
    transfers, ``pipeline_order_with_comms``. `PipelineStage` has an example. In a
    ``with`` statement a schedule is closed at the end; an error in the block ends it on all ranks: the others
    raise AbortedError with that cause in their next step. The group, the strategy and the
    topology of the transfers are those of the stages.

    Args:
        stages: this rank's stages.
        n_microbatches: into how many parts ``step`` cuts the batch, as torch.tensor_split does.
        loss_fn: ``loss_fn(output, target)``, a mean over the samples it is given, or a pair (sum, weight):
            gradients are then those of all sums over all weights. Used on the last stage, which decides
            whether the pipeline trains; without it only forward runs.
        args_chunk_spec, kwargs_chunk_spec, output_merge_spec: as in torch.distributed.pipelining.
        scale_grads: gradients are those of the mean over micro-batches; else of the sum.
        sync_gradients: ``step`` sums the gradients of parameters over the data-parallel ranks of each stage.
            If False, call ``stage.sync_gradients()`` after it.
        warmup: 1F1B and Eager1F1B: forwards of each stage before its first backward: "1f1b", "eager", the
            number of the first stage, one number for each stage, or "auto": those that make the simulated
            step shortest. Interleaved1F1B: "1f1b" or "eager".
        memory_budget: most micro-batches whose activations a stage may hold, one number or one per stage.
        times: for "auto": keyword arguments forward, backward, weight and transfer of `simulate`, the same on
            every rank.
        delay_weight_grad: gradients of inputs first, so that they leave early, those of weights after them.
        overlap: False: wait for each send where it is made, for comparison.
        varying_shapes: micro-batches may differ in more than the number of their samples, in a step
            (``arg_mbs``) and from step to step. Each new shape costs what the first step costs.
        max_outstanding_sends: how many sends of this rank may be in flight at once: of more, the oldest is
            waited for first. None: any number. It bounds the memory of values that others are slow to take.
        seed: each forward begins from a random state of its own, made of this number, the number of the step,
            the stage and the micro-batch (see `microbatch_seed`), and leaves the random state of the process
            as it was: dropout is then the same under every schedule. An integer, the same on every rank.
        timeout: limit for each transfer and each agreement, seconds or timedelta; default: the group's.
        weight_fn: ``weight_fn(target)``, for a ``loss_fn`` that returns pairs: their weight, which is then
            known before the step. Modules that add gradients by themselves (auxiliary losses) need it:
            without it what they add is scaled by the weight of the step before. Gets ``loss_kwargs`` too.

    Raises:
        LayoutError: bad arguments.
    """

    name: ClassVar[str | None] = None
    pipeline_order: Any
    _built_order: Any = None  # that order when it was made
    _given_order: tuple[Any, bool] | None = None  # of actions that came later; whether with their transfers
    _backward_requires_autograd = True
    _gathering: Gathering = FSDP_DEFAULTS
    _size = "no stages"
    _recent: RecentTimes | None = None  # where measure() was called

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._size}>"

    def _begin(
        self,
        stages: Sequence[PipelineStage],
        *,
        sync_gradients: bool = True,
        warmup: AutoWarmup | None = None,
        memory_budget: Budget = None,
        times: Mapping[str, Any] | None = None,
        delay_weight_grad: bool = False,
        overlap: bool = True,
        varying_shapes: bool = False,
        max_outstanding_sends: int | None = None,
        seed: int | None = None,
        timeout: float | timedelta | None = None,
        weight_fn: Callable[..., Any] | None = None,
    ) -> None:
        """Initializes what torch does not have, after torch's constructor."""
        self._size = f"{stages[0].num_stages} stages, {self._n_microbatches} micro-batches"
        self._runs = all(isinstance(stage, PipelineStage) for stage in stages)
        if not self._runs:  # stages of another kind, which can only be looked at
            return
        group = stages[0].group
        self._timeout = seconds(timeout, parent_group(group, "pipeline").timeout)
        self._overlap = overlap
        self._mine = checked(stages, self._n_microbatches)
        self._outstanding = _outstanding(max_outstanding_sends)
        if not sync_gradients and any(stage.shared for stage in stages):
            raise LayoutError(
                "shared_parameters need sync_gradients=True: their gradients are summed by step"
            )
        first = next(iter(self._mine.values()))
        check_size(first.num_stages, self._n_microbatches)
        self._recipe = Recipe(
            self.name or "",
            first.num_stages,
            self._n_microbatches,
            None if first.edges is None else links_of(first.edges),
            warmup,
            memory_budget,
            times or {},
            delay_weight_grad,
        )
        if self.name is not None:
            self._recipe.check_options()
        reduce_once(self._mine.values())
        self._board = PipelineBoard(
            group, self._timeout
        )  # behind all that is refused: see `refusals_reported`
        self._rank = first.rank
        self._caller = Caller("pipeline", self._rank)
        self._device = first.device
        self._wirings = Wirings(self._mine, self._board, self._timeout, varying_shapes)
        self._gradients = Gradients(self._mine, self._board, self._timeout, sync=sync_gradients)
        self._seed = seed
        self._weight_fn = weight_fn
        self._table: StageTable | None = None
        self._given: GivenOrder | None = None  # torch's actions, if those run
        self._runtime: Runtime | None = None
        self._rows: dict[bool, list[Action]] = {}  # this rank's lowered actions; key: training
        self._feeds: Mapping[int, StepFeed] = {}  # of the last step
        self._steps = 0  # that were run
        self._calls = 0  # of step and eval, those that were refused too
        self._recuts = 0  # agreements about other cuts
        self._summaries = 0
        self._failed: str | None = None
        kind = self.name or type(self).__name__
        options = f"{kind}, warm-up {warmup}, budget {memory_budget}, delayed {delay_weight_grad}"
        options += f", varying shapes {varying_shapes}, seed {seed}"
        if self._gathering.max_active_stages != FSDP_DEFAULTS.max_active_stages:
            options += f", {self._gathering.max_active_stages} stages gathered"
        trains = self._loss_fn is not None
        self._board.publish(
            "stage", describe_stages(list(self._mine.values()), options, self._n_microbatches, trains)
        )

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        finalize_gradients: bool = True,
        local_batch: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Runs one batch through the pipeline, forward and backward. Every rank of every stage calls it.

        Args:
            args: the batch, first stage only (ignored elsewhere): whole, the same on each of its ranks. The
                runtime takes each rank's shard of each micro-batch. Tensors inside dicts, lists and other
                pytrees are cut too. Those that all samples share are declared whole by ``args_chunk_spec``;
                all others have as many samples as the batch.
            target: the whole batch's targets, last stage only, cut like the arguments.
            losses: filled on every rank of the last stage with the loss of each micro-batch: the mean over
                its samples, or sum over weight; 0 where it has no samples.
            return_outputs: return the outputs on the last stage.
            loss_kwargs: more arguments for ``loss_fn``, never cut.
            arg_mbs, kwarg_mbs, target_mbs: arguments (a tuple each), keyword arguments and targets that are
                micro-batches already, instead of whole ones; of different shapes with ``varying_shapes``.
                However many samples it has, every micro-batch counts the same.
            finalize_gradients: False: stages under FSDP2 keep their gradients as they are, neither reduced
                over ranks nor divided, until a step with True: one reduction for several steps. Stages
                without FSDP2 do as always. The same on every rank; ``loss_fn`` returns means.
            local_batch: each rank gives its own samples only: arguments, keyword arguments and targets, on
                each stage of more than one data-parallel rank. All ranks of a stage give equally many, the
                last ones fewer or none. The same on every rank.
            kwargs: keyword arguments of this stage's module; tensors are cut like the arguments.

        Returns:
            On the last stage this rank's local outputs, micro-batches joined along dimension 0 (a list where
            they differ in another dimension); None elsewhere and without ``return_outputs``.

        Raises:
            LayoutError: the batch has no samples, another shape than the first one, or one that no stage
                takes; an argument or target has another number of samples than the batch; ranks of a stage
                were given different batches; targets are missing; outputs do not match their layout. The
                other ranks raise AbortedError with the same text. Nothing was sent: the next step runs.
            MeshcastError: a module raised; names rank, stage and micro-batch. The other ranks raise
                AbortedError with this first cause; one that had finished its part does so in its next step.
                The transfers of the pipeline have ended.
        """
        pieces = Pieces(arg_mbs, kwarg_mbs, target_mbs, local_batch)
        return self._run_step(
            StepCall(
                args, kwargs, target, losses, return_outputs, loss_kwargs, pieces, True, finalize_gradients
            )
        )

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        local_batch: bool = False,
        **kwargs: Any,
    ) -> Any:
        """`step` without gradients: forward only, losses where there are targets. The batch may have another
        size than those of training."""
        pieces = Pieces(arg_mbs, kwarg_mbs, target_mbs, local_batch)
        with torch.no_grad():
            return self._run_step(
                StepCall(args, kwargs, target, losses, return_outputs, loss_kwargs, pieces, False)
            )

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Runs a step on given micro-batches, as torch does. It trains if the stages have a backward."""
        train = any(stage.has_backward for stage in self._mine.values())
        pieces = Pieces(arg_mbs, kwarg_mbs, target_mbs)
        self._run_step(
            StepCall((), {}, None, losses, return_outputs, loss_kwargs, pieces, train, merge=False)
        )

    def _run_step(self, call: StepCall) -> Any:
        """A whole step, in order."""
        self._check_open()
        with self._failing_together(), current(self._device):
            with self._refusing():
                feeds = self._feeds_of(call)
            table = self._agreed_or_refused()
            with self._refusing():
                report = self._report(call, feeds, table)
            answer = self._agree_on(report)
            wirings = self._distribute(answer, feeds, table)
            train = call.train and table.trains
            finalize = call.finalize or not train
            self._begin_stages(feeds, answer, table, wirings[0].free_lane, train=train, finalize=finalize)
            runtime, row = self._runtime_for(wirings[0], feeds, table, train=train)
            with hooks_at_the_end(stage.submod for stage in self._mine.values() if train) as call_hooks:
                with self._gradients.apart():
                    seed = None if self._seed is None else (self._seed, self._steps)
                    runtime.run(row, feeds, wirings, train=train, seed=seed)
                    self._meet()
                    self._gradients.finish(call.losses)
                self._scale_as_torch(call, train=train)
                self._gradients.call_hooks(call_hooks)
            self._end_step(runtime, train=train)
        return self._outputs(call)

    def _check_open(self) -> None:
        """Raises LayoutError or AbortedError where no step can run any longer."""
        if not self._runs:
            raise LayoutError("the stages are none of meshcast.pipelining: they cannot run here")
        self._board.check_process()
        if self._failed is not None:
            error = self._caller.error(AbortedError, f"the pipeline failed before: {self._failed}")
            self._board.fail(f"call/{self._calls}", str(error), agreement=True)  # of others that have not
            raise error

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """An error inside is one of the pipeline, and every rank raises it; a refused call is no failure."""
        try:
            with self._caller:
                yield
        except Refused as refused:
            with self._caller:
                raise refused.error from refused.error.__cause__
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Takes the other ranks along, in bounded time, with the first cause."""
        cause = self._board.text_of(error)
        self._failed = cause
        self._board.fail(f"call/{self._calls}", cause, agreement=True)
        self._gradients.fail(cause)
        for transfer in self._transfers():
            transfer.abort(cause)
        if self._runtime is None:
            return
        self._runtime.clear()
        if next(iter(self._mine.values())).mesh.size > 1:
            self._board.fail(f"step/{self._steps}", cause)

    def close(self) -> None:
        """Drops the transfers. Later steps raise AbortedError."""
        self._failed = self._failed or f"rank {self._rank}: the schedule was closed"
        for transfer in self._transfers():
            transfer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._runs:
            return
        if error is not None and self._failed is None:
            self._fail(error)
        self.close()

    def _transfers(self) -> list[PersistentTransfer]:
        return [*self._wirings.transfers(), *self._gradients.transfers()]

    # ---- before data moves -------------------------------------------------------------------------------

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """An error inside refuses the call, before data moves: this rank raises it at once, the others when
        they come, and all may continue."""
        try:
            yield
        except Exception as error:
            report = StepReport(refused=self._board.text_of(error))
            self._board.refuse(f"call/{self._calls}", report, agree_on_step, error)
            self._calls += 1
            raise Refused(error) from error

    def _feeds_of(self, call: StepCall) -> dict[int, StepFeed]:
        """The data of each stage. Raises what this rank refuses by itself."""
        self._check_call(call)
        feeds = {}
        for index, stage in self._mine.items():
            feed = feeds[index] = StepFeed(
                stage,
                self._n_microbatches,
                call,
                (self._args_chunk_spec, self._kwargs_chunk_spec),
                self._loss_fn,
                self._weight_fn,
                scale_grads=self.scale_grads,
            )
            wired = self._wirings.last
            sent = None if wired is None else len(wired.inputs[index])
            for count, names in feed.calls():
                stage.check_arguments(count if stage.is_first else sent, names)
        self._wirings.check_shapes(feeds, cut=not call.pieces.given)
        return feeds

    def _check_call(self, call: StepCall) -> None:
        """Raises TypeError or LayoutError for arguments that are wrong by themselves."""
        if not isinstance(call.finalize, bool):
            raise TypeError(f"finalize_gradients must be a bool, found {type(call.finalize).__name__}")
        if call.losses is not None and not isinstance(call.losses, list):
            raise TypeError(f"losses must be a list, found {type(call.losses).__name__}")
        if not call.merge:
            pieces: Any = call.pieces
            self._check_inputs(pieces.args, pieces.kwargs, pieces.targets, call.losses)

    def _agreed_or_refused(self) -> StageTable:
        try:
            return self._agreed()  # in the first call it waits for the schedules of the other ranks
        except DeadlineExceededError:
            raise
        except Exception as error:  # on all ranks
            raise Refused(error) from error

    def _agreed(self) -> StageTable:
        """Raises the same LayoutError on every rank where the ranks contradict each other."""
        if self._table is None:
            with self._caller:
                table = agree_on_stages(self._board)
                self._given = GivenOrder.of(self)
                if self._given is not None:
                    rows = self._given.rows(table.row_of)
                    self._recipe = replace(self._recipe, given=rows, lowered_already=self._given.lowered)
                self._recipe.check_placement(table.rows)
            self._table = table
            for stage in self._mine.values():
                stage.sharing = table.shared
        return self._table

    def _report(self, call: StepCall, feeds: Mapping[int, StepFeed], table: StageTable) -> StepReport:
        """The description of a call, for `agree_on_step`. Raises what this rank refuses for."""
        train = call.train and table.trains
        if train and self._backward_requires_autograd and not torch.is_grad_enabled():
            raise MeshcastError("step trains and needs gradients enabled; use eval under torch.no_grad")
        if train and self._gradients.weighted and not call.finalize:
            raise LayoutError(PAIRS_ARE_FINAL)
        mode = "step" if train or not table.trains else "eval"
        mode += "" if call.finalize else " with finalize_gradients=False"
        ahead = [feed.weight_ahead() for feed in feeds.values()]
        # To compare values, each rank of a stage reads its own once.
        compared = self._steps < _CHECKED_FIRST or self._steps % _CHECKED_EVERY == 0
        given = {index: feed.report(checked=compared) for index, feed in feeds.items()}
        shapes = zip(*(feed.digests() for feed in feeds.values()), strict=True)
        report = StepReport(
            mode=f"{mode} with local_batch=True" if call.pieces.local else mode,
            shapes=[" ".join(names) for names in shapes],
            order="" if self._given is None else self._given.digest,
            samples=feeds[0].samples() if 0 in feeds else None,
            alike=call.pieces.given,
            weighted=self._gradients.weighted,
            weight=next((each for each in ahead if each is not None), None),
            as_torch=table.as_torch,
            given={index: values for index, values in given.items() if values is not None},
        )
        check_fit(report.given, as_torch=table.as_torch)
        self._wirings.look(feeds, table)
        return report

    def _agree_on(self, report: StepReport) -> StepAnswer:
        """Returns what the step is, for all ranks. Raises Refused on all of them where one cannot take
        part."""
        answer = self._board.agree(f"call/{self._calls}", report, agree_on_step, StepAnswer)
        self._calls += 1
        if answer.refused:
            own = dict(answer.refused).get(self._rank)
            rank, text = answer.refused[0]
            if own is not None:
                raise Refused(LayoutError(own))
            raise Refused(AbortedError(text, peer=rank, phase="agree"))
        self._board.forget_past()
        return answer

    def _distribute(
        self, answer: StepAnswer, feeds: Mapping[int, StepFeed], table: StageTable
    ) -> list[Wiring]:
        """Cuts the batch, and returns the wiring of each micro-batch. Raises Refused on all ranks where one
        cannot take a shape."""
        for feed in feeds.values():
            feed.take(answer)
        wirings = self._wirings.of_step(answer, feeds, table)
        for index, feed in feeds.items():
            inputs = [wiring.inputs[index] for wiring in wirings]
            feed.learn_shares(inputs, answer, as_torch=table.as_torch)
        return wirings

    # ---- the step ----------------------------------------------------------------------------------------

    def _begin_stages(
        self,
        feeds: Mapping[int, StepFeed],
        answer: StepAnswer,
        table: StageTable,
        lane: int,
        *,
        train: bool,
        finalize: bool,
    ) -> None:
        """lane: those from here on are free."""
        self._feeds = feeds
        if len(self._mine) > 1:  # load_state_dict(assign=True) makes other parameters
            reduce_once(self._mine.values())
        for index, stage in self._mine.items():
            stage.clear_runtime_states()
            stage.chunks, stage.has_backward = self._n_microbatches, train
            stage.seed_of, stage.scale = feeds[index].loss.seed, feeds[index].scale
            if train:
                stage.learn_loss(self._loss_fn if stage.is_last else None)
                stage.begin_step(self._n_microbatches, finalize=finalize)
        losses = {index: feed.loss for index, feed in feeds.items()}
        scales = self.scale_grads
        self._gradients.begin_step(table, answer, losses, lane, train=train, finalize=finalize, scales=scales)

    def _runtime_for(
        self, wiring: Wiring, feeds: Mapping[int, StepFeed], table: StageTable, *, train: bool
    ) -> tuple[Runtime, list[Action]]:
        """The runtime, and the actions that it runs, by functions of the user where there are some."""
        if self._runtime is None:
            self._runtime = Runtime(
                self,
                self._mine,
                wiring,
                self._timeout,
                overlap=self._overlap,
                outstanding=self._outstanding,
                max_active_stages=self._gathering.max_active_stages,
            )
        place = table.row_of(next(iter(self._mine))), len(table.rows)
        if train not in self._rows:
            row = self._recipe.lowered(len(table.rows), train=train)[place[0]]
            if train and self._given is not None and torch_schedules.OVERLAP_F_B in functions_of(self):
                row = self._given.side_by_side(row)
            self._rows[train] = row
        row = self._rows[train]
        self._runtime.use(functions_for(self, self._given, feeds, row, place, train=train))
        return self._runtime, row

    def _maybe_compute_loss(
        self,
        stage: Any,
        output: Any,
        target_mbs: Any,  # noqa: ARG002  those of the step are known
        mb_index: int,
        loss_kwargs: Any = None,  # noqa: ARG002
    ) -> None:
        """Computes the loss of a micro-batch on the last stage, as torch does."""
        loss = self._feeds[stage.stage_index].loss.take(mb_index, output) if stage.is_last else None
        if loss is not None and stage.has_backward:
            stage.loss_taken(mb_index)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Any:
        return self._feeds[stage.stage_index].loss.losses.pop(mb_index, None) if stage.is_last else None

    def _meet(self) -> None:
        """Waits until all ranks of the stages have run their actions: the collectives that follow are those
        of the user's mesh and cannot be aborted, so no rank enters them unless all got here."""
        members = next(iter(self._mine.values())).mesh.ranks
        if len(members) > 1:
            self._board.publish(f"step/{self._steps}", True)
            self._board.collect(f"step/{self._steps}", bool, members)
            if self._steps:
                self._board.forget(f"step/{self._steps - 1}")

    def _scale_as_torch(self, call: StepCall, *, train: bool) -> None:
        """Scales gradients where all stages are as torch's, or has it done by what the user registered."""
        if not call.train or self.name == "ForwardOnly" or not (train or scales_without_loss(self)):
            return
        stages = self._mine if self._given is None else self._given.reduced(self._mine)
        registered = functions_of(self).get(torch_schedules.REDUCE_GRAD)
        reduce = None
        if registered is not None:
            schedule: Any = self
            context = torch_schedules._PipelineContext(schedule)

            def reduce(stage: int) -> None:
                registered(torch_schedules._Action(stage, torch_schedules.REDUCE_GRAD, None), context)

        self._gradients.scale_as_torch(stages, reduce)

    def _end_step(self, runtime: Runtime, *, train: bool) -> None:
        for stage in self._mine.values() if not train else ():
            stage.free_parameters()
        self._steps += 1
        if train and self._recent is not None:
            self._recent.add(runtime.trace)

    def _outputs(self, call: StepCall) -> Any:
        last = [self._feeds[index] for index, stage in self._mine.items() if stage.is_last]
        returns = call.merge and call.return_outputs and last
        return last[0].merged(self._output_merge_spec) if returns else None

    # ---- views -------------------------------------------------------------------------------------------

    @property
    def actions(self) -> Actions:
        """Lowered actions of a step, by global rank. All ranks of a stage's mesh run the same ones."""
        table = self._agreed()
        rows = self._recipe.lowered(len(table.rows), train=table.trains)
        return {
            rank: list(rows[row])
            for row, stages in enumerate(table.rows)
            for rank in sorted(table.ranks[stages[0]])
        }

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to other ranks over the edges of the pipeline, both directions, in all
        steps so far."""
        return 0 if self._runtime is None else self._runtime.bytes_sent

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes this rank's part of the last step as a Chrome trace."""
        if self._runtime is None:
            raise self._caller.error(MeshcastError, "there is no step to trace yet")
        self._runtime.trace.write(path, self._rank)

    def summary(self, *, together: bool = False) -> str:
        """One line about this rank's last step: its time, the parts that went into computing and into waiting
        for values, the bubble (all that is not computing), micro-batches held, memory and bytes sent.

        Args:
            together: every rank of the pipeline calls it; the line then also says how long this rank waited
                for values that were in flight, by the clocks of the hosts: communication that was not
                hidden.
        """
        if self._runtime is None:
            raise self._caller.error(MeshcastError, "there is no step to sum up yet")
        trace = self._runtime.trace
        if not together:
            return trace.summary(self._rank)
        mine = trace.on_the_clock(self._rank)
        sends = [(str(each.action), each.start, each.end) for each in mine if each.action.kind.is_send]
        topic = f"sends/{self._summaries}"
        self._board.publish(topic, sends)
        found = self._board.collect(topic, list[tuple[str, float, float]])
        if self._summaries:  # all have read that one, or they would not be here
            self._board.forget(f"sends/{self._summaries - 1}")
        self._summaries += 1
        others = [
            Span(rank, Action.parse(action), start, end)
            for rank, theirs in found.items()
            if rank != self._rank
            for action, start, end in theirs
        ]
        return trace.summary(self._rank, exposed_seconds([*mine, *others]).get(self._rank, 0.0))

    def measure(self, last: int = 10) -> None:
        """From now on keeps how long this rank's stages compute in the last so many training steps, for
        `stage_times` and `meshcast.elastic.rebalance`. 0: keeps none, as at first.

        The first step of a schedule is left out, as it gets memory and connections. A step that is measured
        costs a look through its trace, and on a GPU a wait for its end.

        Raises LayoutError for what is no number of steps.
        """
        recent = RecentTimes(last, skip=self._runtime is None)
        self._recent = recent if recent.last else None

    def stage_times(self) -> dict[int, StageTimes]:
        """{stage: seconds of a micro-batch} of this rank's stages, medians of the steps that `measure` keeps;
        empty before the first of them.

        Raises LayoutError where `measure` was not called.

        Example, on every rank::

            from meshcast.pipelining import PipelineStage, ScheduleGPipe

            rank, ranks = dist.get_rank(), dist.get_world_size()
            stage = PipelineStage(torch.nn.Linear(8, 8), rank, ranks, torch.device("cpu"))
            schedule = ScheduleGPipe(stage, 4, loss_fn=torch.nn.functional.mse_loss)
            schedule.measure(last=5)
            for _ in range(3):  # the first one is left out
                schedule.step(torch.randn(32, 8), target=torch.randn(32, 8))
            assert schedule.stage_times()[rank].backward > 0
        """
        if self._recent is None:
            raise self._caller.error(
                LayoutError,
                "no steps were measured: call measure() on the schedule, on every rank, before the steps",
            )
        return self._recent.times()

    def draw(self, path: str | os.PathLike[str], **times: Any) -> None:
        """Writes the simulated timeline of a step; the suffix of `path` decides the format.

        Args:
            times: forward, backward, weight and transfer as `simulate` takes them; default: those that the
                schedule was made with.
        """
        table = self._agreed()
        report = self._recipe.simulated(len(table.rows), train=table.trains, **times)
        name = type(self).__name__.removeprefix("Schedule")
        title = f"{name}, {self._recipe.stages} stages, {self._n_microbatches} micro-batches, simulated"
        draw_timelines([Timeline.simulated(title, report)], Path(path))

    def transfer_times(self, topology: Topology | None = None) -> dict[Link, float]:
        """Seconds that a micro-batch of the last step takes over each link by the planner's cost model: what
        ``draw`` and ``times`` take as ``transfer``, with seconds of compute. topology: as `plan` takes
        it; default: that of the stages."""
        wiring = self._wirings.last
        if wiring is None:
            raise self._caller.error(MeshcastError, "there is no step yet, so no shapes of values")
        stage = next(iter(self._mine.values()))
        return transfer_times(wiring, self._agreed(), topology or stage.topology, stage.strategy)


def _outstanding(limit: Any) -> int | None:
    """The limit of sends in flight. Raises LayoutError for what is none."""
    if limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1):
        return limit
    raise LayoutError(f"max_outstanding_sends must be None or an integer of at least 1, found {shown(limit)}")
