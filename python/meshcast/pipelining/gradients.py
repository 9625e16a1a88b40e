"""Gradients at the end of a step: summed over the ranks of a stage and over the stages that share a
parameter, divided by what the loss makes of a step, and given to the hooks of users.

Parameters that several stages share, tied embeddings for one: every stage has its copy, and after a step each
copy gets the sum of the gradients of all, in the order of the stages, so that the copies stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate

from ..errors import LayoutError
from ..layout import Layout
from ..planning.plan import Problem
from ..transfers.transfer import PersistentTransfer
from .board import PipelineBoard
from .data_parallel import kept_apart
from .edge import RankStage
from .loss import StepLoss
from .table import StageTable, StepAnswer
from .wiring import make_transfer

__all__ = ["PAIRS_ARE_FINAL", "Gradients"]

_TOLERANCE = 1e-4  # of a weight: its sum is rounded in the type of the function's results

# The error message for a step of pairs that does not finalize its gradients.
PAIRS_ARE_FINAL = (
    "finalize_gradients=False needs a loss_fn that returns means: gradients of sums are divided by the "
    "weight of their own step, which FSDP2 cannot do to those that it has not reduced. Return means, or "
    "finalize every step"
)


class _StepWeight(NamedTuple):
    """The weight of a step, None where its losses are means; and what sums were divided by."""

    weight: float | None
    typical: float


class Gradients:
    """The gradients of one rank's stages, from step to step.

    Args:
        stages: of this rank, by number.
        sync: a step sums them over the data-parallel ranks of a stage.

    Attributes:
        weighted: whether the loss function returns (sum, weight), once known.
    """

    def __init__(
        self, stages: Mapping[int, RankStage], board: PipelineBoard, timeout: float, *, sync: bool
    ) -> None:
        self._stages = stages
        self._board = board
        self._timeout = timeout
        self._sync = sync
        self._shared: _SharedGradients | None = None  # until the first step
        self._weighings = 0  # steps at whose end the ranks learnt a weight
        self._typical = 1.0  # mean weight of a micro-batch, by the last step of pairs
        self.weighted: bool | None = None
        # Of the current step:
        self._table: StageTable
        self._answer: StepAnswer
        self._losses: Mapping[int, StepLoss]
        self._train = self._finalize = self._scales = True

    def transfers(self) -> list[PersistentTransfer]:
        return [] if self._shared is None else self._shared.transfers()

    def fail(self, cause: str) -> None:
        """Makes ranks that wait for the weight of a step fail."""
        self._board.fail(f"weight/{self._weighings}", cause)

    def begin_step(
        self,
        table: StageTable,
        answer: StepAnswer,
        losses: Mapping[int, StepLoss],
        first_lane: int,
        *,
        train: bool,
        finalize: bool,
        scales: bool,
    ) -> None:
        """Learns what a step counts among those of joined pipelines, where micro-batches count by samples;
        and the weight of pairs, as far as it is known.

        Args:
            losses: by stage, with the scales of the stages.
            first_lane: lanes from here on are free.
            scales: gradients are those of the mean over micro-batches.
        """
        if self._shared is None:
            self._shared = _SharedGradients(self._stages, table, first_lane, self._timeout)
        self._table, self._answer, self._losses = table, answer, losses
        self._train, self._finalize, self._scales = train, finalize, scales
        self.weighted = answer.weighted
        for index, stage in self._stages.items() if train and scales else ():
            scale, loss = stage.scale, losses[index]
            if stage.joins_pipelines and not table.as_torch:
                samples = sum(answer.samples)
                every, count = map(Fraction, stage.over_columns(samples, scale.counts).tolist())
                scale.column = samples / every
                scale.sums = scale.column * count / scale.counts
            loss.typical = self._typical
            if stage.is_last and answer.weight is not None:
                weight, number = stage.over_columns(answer.weight, scale.counts).tolist()
                loss.typical = weight / number or 1.0

    def apart(self) -> AbstractContextManager[None]:
        """Keeps gradients of earlier steps out of what multiplies and sums those of this one."""
        return kept_apart(
            stage.submod
            for stage in self._stages.values()
            if self._train
            and (
                not self._table.as_torch
                or (self._sync and ((stage.reduces and not stage.alone) or stage.shared))
                or self.weighted is not False
            )
        )

    def finish(self, losses: list[Any] | None) -> None:
        """Reduces and divides the gradients of the step, and fills `losses`. All actions have run, on all
        ranks of the stages."""
        weight: float | None = None
        for stage in self._stages.values() if self._train else ():
            if not self._finalize:
                stage.free_parameters()  # FSDP2 still has to reduce gradients of gathered parameters
            stage.drop_stand_ins()
        for index, stage in self._stages.items():
            if stage.is_last:
                means, weight = self._losses[index].finish()
                if losses is not None:
                    losses[:] = means
        if not self._train:
            return
        if weight is not None and self.weighted is False:
            raise LayoutError("loss_fn returned a pair (sum, weight), but a mean in the steps before")
        typical = 1.0
        if self.weighted is not False:
            weight, typical = self._learn_weight(weight)
        self._check_weight(weight)
        for stage in self._stages.values():
            if self._sync:
                stage.reduce_gradients()
            scale = stage.scale
            # Divided, not multiplied by the inverse: to the last bit as torch does it.
            divisor = float(1 / (scale.end or 1))
            if weight is not None and self._scales:
                every, count = stage.over_columns(weight, scale.counts).tolist()
                if every:
                    divisor *= every / typical / (1 if scale.end is None else count)
                    self._typical = every / count
                    stage.tell_added(typical / self._typical)
            stage.scale_grads(divisor)
        assert self._shared is not None
        self._shared.sum()

    def _learn_weight(self, own: float | None) -> _StepWeight:
        """The last stage knows both."""
        topic = f"weight/{self._weighings}"
        teller = self._table.ranks[-1][0]
        for index, stage in self._stages.items():
            if stage.is_last and stage.rank == teller:
                self._board.publish(topic, _StepWeight(own, self._losses[index].typical))
                if self._weighings:  # all have read that one, or they would not have begun this step
                    self._board.forget(f"weight/{self._weighings - 1}")
        self._weighings += 1
        found = self._board.collect(topic, _StepWeight, [teller])[teller]
        self.weighted = found.weight is not None
        return found

    def _check_weight(self, weight: float | None) -> None:
        """Raises LayoutError, on all ranks, where weight_fn said something else than the pairs, or the
        gradients of pairs are not to be final."""
        ahead = self._answer.weight
        if ahead is not None and weight is None:
            raise LayoutError("weight_fn= is given, but loss_fn returns no pairs (sum, weight): leave it out")
        if ahead is not None and weight is not None and abs(weight - ahead) > _TOLERANCE * abs(weight):
            raise LayoutError(
                f"weight_fn gave {ahead} as the weight of the step, loss_fn's pairs have {weight}: "
                "weight_fn(target) must be the weight that loss_fn(output, target) returns"
            )
        if self.weighted and not self._finalize:
            raise LayoutError(PAIRS_ARE_FINAL)

    def scale_as_torch(self, stages: Iterable[int], reduce: Callable[[int], None] | None) -> None:
        """Divides all that is in ``grad``, also by earlier steps, by the number of micro-batches; or calls
        what the user registered for it.

        Args:
            stages: those that are scaled.
            reduce: what the user registered, by stage.
        """
        if not self._table.as_torch or self.weighted:
            return
        count = sum(min(1, each) for each in self._answer.samples)
        for index in stages:
            stage = self._stages[index]
            if not self._finalize and stage.accumulates:
                continue  # left to a later step
            if reduce is not None:
                reduce(index)
            elif self._scales:
                # Pipelines side by side may have different numbers of micro-batches with samples.
                stage.scale_grads(stage.over_columns(count)[0] if stage.joins_pipelines else count)

    def call_hooks(self, call: Callable[[Iterable[torch.nn.Parameter]], None]) -> None:
        """Calls the hooks that users have put on parameters, where gradients are final."""
        for stage in self._stages.values() if self._train else ():
            if (self._sync or not stage.reduces) and (self._finalize or not stage.accumulates):
                call(stage.own_parameters())


@dataclass(slots=True)
class _SharedParameter:
    """One parameter: the stages with a copy on this rank, and a transfer from each row of the schedule that
    has some to the others."""

    key: str
    stages: list[RankStage]
    own_row: int
    transfers: dict[int, PersistentTransfer]  # by the row that sends; none if there is one row only

    def copies(self) -> list[torch.nn.Parameter]:
        """Each once, as the modules have them now: load_state_dict(assign=True) makes others."""
        found = (stage.shared[self.key] for stage in self.stages)
        return list({id(copy): copy for copy in found}.values())


class _SharedGradients:
    """The shared parameters of one rank. Every rank of the pipeline makes one, in the same order."""

    def __init__(
        self, stages: Mapping[int, RankStage], table: StageTable, first_lane: int, timeout: float
    ) -> None:
        self._timeout = timeout
        self._parameters: list[_SharedParameter] = []
        own_row = table.row_of(next(iter(stages)))
        lane = first_lane
        for key, sharing in sorted(table.shared.items()):
            rows = sorted({table.row_of(stage) for stage in sharing})
            here = [stages[stage] for stage in sharing if stage in stages]
            transfers = {}
            for row in rows if len(rows) > 1 else []:
                if own_row in rows:
                    ranks = {each: sorted(table.ranks[table.rows[each][0]]) for each in rows}
                    others = sorted(rank for each in rows if each != row for rank in ranks[each])
                    copy = here[0].shared[key]
                    source, target = (Layout(each, [Replicate()]) for each in (ranks[row], others))
                    problem = Problem(tuple(copy.shape), copy.dtype, source, target)
                    op = f"pipeline shared parameter {key}"
                    transfers[row] = make_transfer(here[0], [problem], lane, op, timeout)
                lane += 1
            if here:
                self._parameters.append(_SharedParameter(key, here, own_row, transfers))

    def transfers(self) -> list[PersistentTransfer]:
        return [transfer for each in self._parameters for transfer in each.transfers.values()]

    def sum(self) -> None:
        """After the gradients of each stage have been summed over its ranks."""
        started = []
        for each in self._parameters:
            copies = each.copies()
            own = _sum([_gradient(copy) for copy in copies])
            parts, handles = {each.own_row: own}, []
            for row, transfer in each.transfers.items():
                if row == each.own_row:
                    handles.append(transfer.start([own], [None], timeout=self._timeout))
                else:
                    parts[row] = torch.empty_like(own)
                    handles.append(transfer.start([None], [parts[row]], timeout=self._timeout))
            started.append((copies, parts, handles))
        for copies, parts, handles in started:
            for handle in handles:
                handle.wait()
            total = _sum([parts[row] for row in sorted(parts)])
            for copy in copies:
                copy.grad = total.clone() if copy is not copies[0] else total


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
