"""The schedules a user makes: cut a batch into micro-batches, run them through the pipeline, return losses
and outputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import torch

from meshcast.base import checks
from meshcast.errors import AbortedError, DeadlineExceededError, LayoutError, MeshcastError, typed
from meshcast.groups.parent import parent_group, seconds
from meshcast.pipelining.action import Action, Actions
from meshcast.pipelining.auto_warmup import AutoWarmup, Budget
from meshcast.pipelining.board import PipelineBoard, Refused
from meshcast.pipelining.devices import current
from meshcast.pipelining.draw import draw_panels, panel_of
from meshcast.pipelining.edge import links_of
from meshcast.pipelining.estimate import transfer_times
from meshcast.pipelining.lower import Link
from meshcast.pipelining.measured import Event, exposed_seconds
from meshcast.pipelining.microbatches import Pieces
from meshcast.pipelining.own_stages import check_options, checked, divide_gradients, reduce_once
from meshcast.pipelining.recipe import Recipe
from meshcast.pipelining.runtime import Runtime
from meshcast.pipelining.stage import PipelineStage
from meshcast.pipelining.step import StepFeed
from meshcast.pipelining.table import StageTable, agree_on_stages, describe_stages
from meshcast.pipelining.varying import Wirings, agree_on_step
from meshcast.pipelining.wiring import Wiring
from meshcast.topology import Topology

__all__ = ["Options", "PipelineSchedule"]


class Options(TypedDict, total=False):
    """Keyword arguments of all schedules, beyond torch's; see `PipelineSchedule`."""

    sync_gradients: bool
    warmup: AutoWarmup | None
    memory_budget: Budget
    times: Mapping[str, Any] | None
    delay_weight_grad: bool
    overlap: bool
    varying_shapes: bool
    seed: int | None
    timeout: float | timedelta | None


class PipelineSchedule:
    """Base of all schedules. Every rank of every stage makes its own, in the same order.

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
        seed: each forward begins from a random state of its own, made of this number, the number of the step,
            the stage and the micro-batch (see `microbatch_seed`), and leaves the random state of the process
            as it was: dropout is then the same under every schedule. An integer, the same on every rank.
        timeout: limit for each transfer and each agreement, seconds or timedelta; default: the group's.

    Raises:
        LayoutError: bad arguments.
    """

    name: ClassVar[str]
    _refused = ""  # why, where a subclass has refused an argument of its own

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any, ...] | None = None,
        scale_grads: bool = True,
        *,
        sync_gradients: bool = True,
        warmup: AutoWarmup | None = None,
        memory_budget: Budget = None,
        times: Mapping[str, Any] | None = None,
        delay_weight_grad: bool = False,
        overlap: bool = True,
        varying_shapes: bool = False,
        seed: int | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        # Whatever is wrong here, the conversation comes first: the other ranks read in it that this one
        # raised.
        given = list(stages) if isinstance(stages, Iterable) else []
        group = next((stage.group for stage in given if isinstance(stage, PipelineStage)), None)
        self._board = PipelineBoard(group, parent_group(group, "pipeline").timeout)
        self._microbatches = n_microbatches
        self._overlap = overlap
        try:
            if self._refused:
                raise LayoutError(self._refused)
            self._timeout = self._board.timeout = seconds(timeout, self._board.timeout)
            check_options(stages, loss_fn, times, seed)
            self._stages = checked(given, n_microbatches, sync_gradients)
            first = next(iter(self._stages.values()))
            self._recipe = Recipe(
                self.name,
                first.num_stages,
                n_microbatches,
                None if first.edges is None else links_of(first.edges),
                warmup,
                memory_budget,
                times or {},
                delay_weight_grad,
            )
            self._recipe.check_options()
            reduce_once(self._stages.values())
        except Exception as cause:
            error = typed(cause, f"{self.name}()", self._board.rank)
            self._board.fail("stage", str(error))
            if error is cause:
                raise
            raise error from cause
        self._rank = first.rank
        self._device = first.device
        self._loss_fn = loss_fn
        self._chunk_specs = (args_chunk_spec, kwargs_chunk_spec)
        self._merge_spec = output_merge_spec
        self._scale_grads = scale_grads
        self._sync_gradients = sync_gradients
        self._table: StageTable | None = None
        self._wirings = Wirings(self._stages, self._board, self._timeout, varying_shapes)
        self._runtime: Runtime | None = None
        self._rows: dict[bool, list[Action]] = {}  # this rank's lowered actions; key: training
        self._seed = seed
        self._steps = 0  # that were run
        self._calls = 0  # of step and eval, those that were refused too
        self._weighings = 0  # steps at whose end the ranks learnt a weight
        self._weighted: bool | None = None  # whether the loss function returns (sum, weight), once known
        self._summaries = 0
        self._failed: str | None = None
        options = f"{self.name}, warm-up {warmup}, budget {memory_budget}, delayed {delay_weight_grad}"
        options += f", varying shapes {varying_shapes}, seed {seed}"
        self._board.publish(
            "stage",
            describe_stages(list(self._stages.values()), options, n_microbatches, loss_fn is not None),
        )

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
        **kwargs: Any,
    ) -> Any:
        """Runs one batch through the pipeline, forward and backward. Every rank of every stage calls it.

        Args:
            args: the batch, first stage only (ignored elsewhere): whole, the same on each of its ranks. The
                runtime takes each rank's shard of each micro-batch.
            target: the whole batch's targets, last stage only, cut like the arguments.
            losses: filled on every rank of the last stage with the loss of each micro-batch: the mean over
                its samples, or sum over weight; 0 where it has no samples.
            return_outputs: return the outputs on the last stage.
            loss_kwargs: more arguments for ``loss_fn``.
            arg_mbs, kwarg_mbs, target_mbs: arguments (a tuple each), keyword arguments and targets that are
                micro-batches already, in place of whole ones; of unlike shapes with ``varying_shapes``.
                However many samples it has, every micro-batch counts the same.
            kwargs: keyword arguments of this stage's module; tensors are cut like the arguments.

        Returns:
            On the last stage this rank's local outputs, micro-batches joined along dimension 0 (a list where
            they differ in another dimension); None elsewhere and without ``return_outputs``.

        Raises:
            LayoutError: the batch has no samples, another shape than the first one, or one that no stage
                takes; targets are missing; outputs do not match their layout. The other ranks raise
                AbortedError with the same text. Nothing was sent: the next step runs.
            MeshcastError: a module raised; names rank, stage and micro-batch. The other ranks raise
                AbortedError with this first cause; one that had finished its part does so in its next step.
                The transfers of the pipeline have ended.
        """
        pieces = Pieces(arg_mbs, kwarg_mbs, target_mbs)
        return self._step(args, kwargs, target, losses, return_outputs, loss_kwargs, True, pieces)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """`step` without gradients: forward only, losses where there are targets. The batch may have another
        size than those of training."""
        pieces = Pieces(arg_mbs, kwarg_mbs, target_mbs)
        with torch.no_grad():
            return self._step(args, kwargs, target, losses, True, None, False, pieces)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes this rank's part of the last step as a Chrome trace."""
        if self._runtime is None:
            raise MeshcastError("there is no step to trace yet", op="pipeline")
        self._runtime.trace.write(path, self._rank)

    def summary(self, *, together: bool = False) -> str:
        """One line about this rank's last step: its time, the parts that went into computing and into waiting
        for values, the bubble (all that is not computing), micro-batches held, memory and bytes sent.

        together: every rank of the pipeline calls it; the line then also says how long this rank waited for
            values that were on their way, by the clocks of the hosts: communication that was not hidden.
        """
        if self._runtime is None:
            raise MeshcastError("there is no step to sum up yet", op="pipeline")
        trace = self._runtime.trace
        if not together:
            return trace.summary(self._rank)
        mine = trace.on_the_clock(self._rank)
        sends = [[each.name, each.begin, each.end] for each in mine if "SEND" in each.name]
        topic = f"sends/{self._summaries}"
        self._board.publish(topic, {"sends": sends})
        found = self._board.collect(topic)
        if self._summaries:  # all have read that one, or they would not be here
            self._board.forget(f"sends/{self._summaries - 1}")
        self._summaries += 1
        others = [
            Event(rank, *send) for rank, said in found.items() if rank != self._rank for send in said["sends"]
        ]
        return trace.summary(self._rank, exposed_seconds([*mine, *others]).get(self._rank, 0.0))

    def draw(self, path: str | os.PathLike[str], **times: Any) -> None:
        """Writes the simulated timeline of a step; the suffix of `path` tells the format.

        Args:
            times: forward, backward, weight and transfer as `simulate` takes them; default: those that the
                schedule was made with.
        """
        table = self._agreed()
        report = self._recipe.simulated(len(table.rows), train=table.trains, **times)
        title = f"{self.name}, {self._recipe.stages} stages, {self._microbatches} micro-batches, simulated"
        draw_panels([panel_of(title, report)], Path(path))

    def transfer_times(self, topology: Topology | None = None) -> dict[Link, float]:
        """Seconds that a micro-batch of the last step takes over each link by the planner's cost model: what
        ``draw`` and ``times`` take as ``transfer``, beside seconds of compute. topology: as `plan` takes
        it; default: that of the stages."""
        wiring = self._wirings.last
        if wiring is None:
            raise MeshcastError("there is no step yet, so no shapes of values", op="pipeline")
        stage = next(iter(self._stages.values()))
        return transfer_times(wiring, self._agreed(), topology or stage.topology, stage.strategy)

    def close(self) -> None:
        """Drops the transfers. Later steps raise AbortedError."""
        self._failed = self._failed or "the schedule was closed"
        self._wirings.close()

    def _step(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_kwargs: dict[str, Any] | None,
        train: bool,
        pieces: Pieces,
    ) -> Any:
        self._board.check_process()
        if self._failed is not None:
            raise AbortedError(f"the pipeline failed before: {self._failed}", rank=self._rank, op="pipeline")
        try:
            train = self._agreed().trains and train
        except DeadlineExceededError as error:
            self._fail(error)
            raise
        try:
            with current(self._device):
                runtime, feeds, wirings = self._prepared(
                    train,
                    lambda stage: StepFeed(
                        stage,
                        self._microbatches,
                        args if stage.is_first else (),
                        kwargs,
                        target if stage.is_last else None,
                        self._chunk_specs,
                        self._loss_fn,
                        loss_kwargs or {},
                        self._scale_grads,
                        return_outputs,
                        pieces,
                        train,
                    ),
                    pieces,
                    losses,
                )
                if train:
                    for stage in self._stages.values():
                        stage.begin_step(self._microbatches)
                with self._accumulating(train):
                    runtime.run(self._row(train), feeds, wirings, train=train, seed=self._step_seed())
                    self._finish(feeds, train, losses)
                if not train:
                    for stage in self._stages.values():
                        stage.end_evaluation()
        except Refused as refused:
            raise refused.error from refused.error.__cause__
        except BaseException as error:
            self._fail(error)
            raise
        self._steps += 1
        last = [feeds[index] for index, stage in self._stages.items() if stage.is_last]
        return last[0].merged(self._merge_spec) if return_outputs and last else None

    def _agreed(self) -> StageTable:
        """Raises the same LayoutError on every rank where the ranks contradict each other."""
        if self._table is None:
            table = agree_on_stages(self._board)
            self._recipe.check_placement(table.rows, self._rank)
            self._table = table
            for stage in self._stages.values():
                stage.sharing = table.shared
        return self._table

    def _prepared(
        self, train: bool, feed_of: Callable[[PipelineStage], StepFeed], pieces: Pieces, losses: Any
    ) -> tuple[Runtime, dict[int, StepFeed], list[Wiring]]:
        """All that can be refused, before data moves. Raises Refused on every rank if one has a reason."""
        feeds: dict[int, StepFeed] = {}
        mine: Exception | None = None
        try:
            if losses is not None and not isinstance(losses, list):
                raise LayoutError(f"losses must be a list, which is filled, found {checks.shown(losses)}")
            if train and not torch.is_grad_enabled():
                raise MeshcastError(
                    "step trains and needs gradients enabled; use eval under torch.no_grad", op="pipeline"
                )
            feeds = {index: feed_of(stage) for index, stage in self._stages.items()}
            self._wirings.check_shapes(feeds, cut=not pieces.given)
        except Exception as error:
            mine = typed(error, "step" if train else "eval", self._rank)
        if mine is None:
            said: dict[str, Any] = {
                "mode": "step" if train or not self._agreed().trains else "eval",
                "shapes": [
                    " ".join(names) for names in zip(*(feeds[i].digests() for i in feeds), strict=True)
                ],
                "alike": pieces.given,
                "samples": feeds[0].samples() if 0 in feeds else None,
                "weighted": self._weighted,
            }
        else:
            said = {"refused": str(mine) or type(mine).__name__}
        answer = self._board.agree(f"call/{self._calls}", said, agree_on_step)
        if self._calls:
            self._board.forget_agreement(f"call/{self._calls - 1}")
        self._calls += 1
        if "refused" in answer:
            rank, text = answer["refused"][0]
            raise Refused(
                mine or AbortedError(text, rank=self._rank, peer=rank, op="pipeline", phase="agree")
            ) from mine
        self._weighted = answer["weighted"]
        wirings = self._wirings.of_step(answer["keys"], answer["samples"], feeds, self._agreed())
        if self._runtime is None:
            self._runtime = Runtime(self._stages, wirings[0], self._timeout, overlap=self._overlap)
        for index, feed in feeds.items():
            inputs = [wiring.inputs[index] for wiring in wirings]
            feed.learn_shares(inputs, answer["samples"], answer["alike"])
        return self._runtime, feeds, wirings

    def _step_seed(self) -> tuple[int, int] | None:
        return None if self._seed is None else (self._seed, self._steps)

    def _row(self, train: bool) -> list[Action]:
        if train not in self._rows:
            table = self._agreed()
            lowered = self._recipe.lowered(len(table.rows), train=train)
            self._rows[train] = lowered[table.row_of(next(iter(self._stages)))]
        return self._rows[train]

    @contextmanager
    def _accumulating(self, train: bool) -> Iterator[None]:
        """Keeps gradients of earlier steps out of the sum over ranks: they have been summed already."""
        apart = [
            stage
            for stage in self._stages.values()
            if train
            and ((self._sync_gradients and (stage.reduces or stage.shared)) or self._weighted is not False)
        ]
        earlier = list(
            {
                id(parameter): (parameter, parameter.grad)
                for stage in apart
                for parameter in stage.submod.parameters()
                if parameter.grad is not None
            }.values()
        )
        for parameter, _ in earlier:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in earlier:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def _finish(self, feeds: Mapping[int, StepFeed], train: bool, losses: list[Any] | None) -> None:
        """Once all actions ran: what the ranks of a stage do together."""
        members = next(iter(self._stages.values())).mesh.ranks
        if len(members) > 1:
            # The collectives below are those of the user's mesh and cannot be aborted: nobody enters them
            # unless all got here.
            self._board.publish(f"step/{self._steps}", {})
            self._board.collect(f"step/{self._steps}", members)
            if self._steps:
                self._board.forget(f"step/{self._steps - 1}")
        weight: float | None = None
        for stage in self._stages.values() if train else ():
            stage.drop_stand_ins()
        for index, stage in self._stages.items():
            if stage.is_last:
                means, weight = feeds[index].loss.finish()
                if losses is not None:
                    losses[:] = means
        if train and weight is not None and self._weighted is False:
            raise LayoutError("loss_fn returned a pair (sum, weight), but a mean in the steps before")
        if train and self._weighted is not False:
            weight = self._learn_weight(weight)
        for stage in self._stages.values():
            if train and self._sync_gradients:
                stage.sync_gradients()
        if train and self._wirings.shared is not None:
            self._wirings.shared.sum()
        if weight and train and self._scale_grads:
            divide_gradients(self._stages.values(), weight)

    def _learn_weight(self, own: float | None) -> float | None:
        """The weight of the step, which the last stage knows; None where its losses are means."""
        last = self._agreed().ranks[-1]
        topic = f"weight/{self._weighings}"
        if self._rank == last[0]:
            self._board.publish(topic, {"weight": own})
            if self._weighings:  # all have read that one, or they would not have begun this step
                self._board.forget(f"weight/{self._weighings - 1}")
        self._weighings += 1
        found = self._board.collect(topic, last[:1])[last[0]]["weight"]
        self._weighted = found is not None
        return found

    def _fail(self, error: BaseException) -> None:
        """Takes the other ranks along, in bounded time, with the first cause."""
        cause = f"rank {self._rank}: {type(error).__name__}" if not str(error) else str(error)
        self._failed = cause
        self._board.fail_agreement(f"call/{self._calls}", cause)
        self._board.fail(f"weight/{self._weighings}", cause)
        self._wirings.abort(cause)
        if self._runtime is None:
            return
        self._runtime.clear()
        if next(iter(self._stages.values())).mesh.size > 1:
            self._board.fail(f"step/{self._steps}", cause)
