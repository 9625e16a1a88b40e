"""The end of a step: what the ranks of a stage do together once all actions have run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import Any

import torch
from torch.distributed.pipelining import schedules as torch_schedules

from meshcast.errors import LayoutError
from meshcast.pipelining.board import PipelineBoard
from meshcast.pipelining.data_parallel import kept_apart
from meshcast.pipelining.stage import PipelineStage
from meshcast.pipelining.step import GivenOrder, StepFeed, functions_of
from meshcast.pipelining.table import StageTable
from meshcast.pipelining.varying import Wirings

__all__ = ["StepEnd"]

_TOLERANCE = 1e-4  # of a weight: its sum is rounded in the type of the function's results


class StepEnd:
    """Base of `PipelineSchedule`."""

    _mine: Mapping[int, PipelineStage]
    _board: PipelineBoard
    _rank: int
    _steps: int
    _wirings: Wirings
    _given: GivenOrder | None
    _samples: Sequence[int]
    _sync_gradients: bool
    scale_grads: bool
    _agreed: Callable[[], StageTable]
    _weighings: int  # steps at whose end the ranks learnt a weight
    _typical: float  # mean weight of a micro-batch, by the last step of pairs
    _ahead: float | None  # weight of the step, where weight_fn says it
    _weighted: bool | None  # whether the loss function returns (sum, weight), once known

    def _accumulating(self, train: bool) -> AbstractContextManager[None]:
        """Keeps gradients of earlier steps out of what multiplies and sums those of this one."""
        return kept_apart(
            stage.submod
            for stage in self._mine.values()
            if train
            and (
                not self._agreed().as_torch
                or (self._sync_gradients and ((stage.reduces and not stage.alone) or stage.shared))
                or self._weighted is not False
            )
        )

    def _weigh(self, feeds: Mapping[int, StepFeed]) -> None:
        """Before the actions of a step: what it counts among those of joined pipelines, where micro-batches
        count by samples; and the weight of pairs, as far as it is known."""
        if not self.scale_grads:
            return
        for index, stage in self._mine.items():
            feed, scale = feeds[index], feeds[index].scale
            if stage.joins_pipelines and not self._agreed().as_torch:
                samples = sum(self._samples)
                every, count = map(Fraction, stage.over_columns(samples, scale.counts).tolist())
                scale.column = samples / every
                scale.sums = scale.column * count / scale.counts
            feed.loss.typical = self._typical
            if stage.is_last and self._ahead is not None:
                weight, number = stage.over_columns(self._ahead, scale.counts).tolist()
                feed.loss.typical = weight / number or 1.0

    def _finish(
        self, feeds: Mapping[int, StepFeed], train: bool, losses: list[Any] | None, finalize: bool
    ) -> None:
        for stage in self._mine.values() if train and not finalize else ():
            stage.free_parameters()  # what is left gathered has gradients that FSDP2 is still to reduce
        members = next(iter(self._mine.values())).mesh.ranks
        if len(members) > 1:
            # The collectives below are those of the user's mesh and cannot be aborted: nobody enters them
            # unless all got here.
            self._board.publish(f"step/{self._steps}", {})
            self._board.collect(f"step/{self._steps}", members)
            if self._steps:
                self._board.forget(f"step/{self._steps - 1}")
        weight: float | None = None
        for stage in self._mine.values() if train else ():
            stage.drop_stand_ins()
        for index, stage in self._mine.items():
            if stage.is_last:
                means, weight = feeds[index].loss.finish()
                if losses is not None:
                    losses[:] = means
        if train and weight is not None and self._weighted is False:
            raise LayoutError("loss_fn returned a pair (sum, weight), but a mean in the steps before")
        typical = 1.0
        if train and self._weighted is not False:
            weight, typical = self._learn_weight(weight, feeds)
        if train and self._ahead is not None:
            self._check_weight(weight)
        if train and self._weighted and not finalize:
            raise LayoutError(pairs_are_final())
        for index, stage in self._mine.items() if train else ():
            if self._sync_gradients:
                stage.reduce_gradients()
            scale = feeds[index].scale
            # Divided, not multiplied by the inverse: to the last bit as torch does it.
            divisor = float(1 / (scale.end or 1))
            if weight is not None and self.scale_grads:
                every, count = stage.over_columns(weight, scale.counts).tolist()
                if every:
                    divisor *= every / typical / (1 if scale.end is None else count)
                    self._typical = every / count
                    stage.tell_added(typical / self._typical)
            stage.scale_grads(divisor)
        if train and self._wirings.shared is not None:
            self._wirings.shared.sum()

    def _call_hooks(self, call: Callable[[Iterable[torch.nn.Parameter]], None], finalize: bool) -> None:
        """Calls the hooks that users have put on parameters, where gradients are final."""
        for stage in self._mine.values():
            if (self._sync_gradients or not stage.reduces) and (finalize or not stage.accumulates):
                call(stage.own_parameters())

    def _check_weight(self, weight: float | None) -> None:
        """Raises LayoutError, on all ranks, where weight_fn said something else than the pairs."""
        if weight is None:
            raise LayoutError("weight_fn= is given, but loss_fn returns no pairs (sum, weight): leave it out")
        if self._ahead is not None and abs(weight - self._ahead) > _TOLERANCE * abs(weight):
            raise LayoutError(
                f"weight_fn gave {self._ahead} as the weight of the step, loss_fn's pairs have {weight}: "
                "weight_fn(target) must be the weight that loss_fn(output, target) returns"
            )

    def _learn_weight(self, own: float | None, feeds: Mapping[int, StepFeed]) -> tuple[float | None, float]:
        """The weight of the step, None where its losses are means; and what sums were divided by. The last
        stage knows both."""
        last = self._agreed().ranks[-1]
        topic = f"weight/{self._weighings}"
        if self._rank == last[0]:
            typical = next(feeds[index].loss.typical for index, stage in self._mine.items() if stage.is_last)
            self._board.publish(topic, {"weight": own, "typical": typical})
            if self._weighings:  # all have read that one, or they would not have begun this step
                self._board.forget(f"weight/{self._weighings - 1}")
        self._weighings += 1
        found = self._board.collect(topic, last[:1])[last[0]]
        self._weighted = found["weight"] is not None
        return found["weight"], found["typical"]

    def _scale_as_torch(self, finalize: bool) -> None:
        """Divides all that is in ``grad``, also by earlier steps, by the number of micro-batches; or calls
        what the user registered for it. finalize: else a stage under FSDP2 is left to a later step."""
        if not self._agreed().as_torch or self._weighted:
            return
        count = sum(min(1, each) for each in self._samples)
        reduced = self._mine if self._given is None else self._given.reduced(self._mine)
        registered = functions_of(self).get(torch_schedules.REDUCE_GRAD)
        schedule: Any = self
        for index in reduced:
            if not finalize and self._mine[index].accumulates:
                continue
            if registered is None:
                stage = self._mine[index]
                if not self.scale_grads:
                    continue
                # Pipelines side by side may have different numbers of micro-batches with samples.
                stage.scale_grads(stage.over_columns(count)[0] if stage.joins_pipelines else count)
            else:
                action = torch_schedules._Action(index, torch_schedules.REDUCE_GRAD, None)
                registered(action, torch_schedules._PipelineContext(schedule))


def pairs_are_final() -> str:
    """The error message for a step of pairs that does not finalize its gradients."""
    return (
        "finalize_gradients=False needs a loss_fn that returns means: gradients of sums are divided by the "
        "weight of their own step, which FSDP2 cannot do to those that it has not reduced. Return means, or "
        "finalize every step"
    )
