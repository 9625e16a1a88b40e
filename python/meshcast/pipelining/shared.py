"""Parameters that several stages share, tied embeddings for one: every stage has its copy, and after a step
each copy gets the sum of the gradients of all, in the order of the stages, so that the copies stay equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Replicate

from meshcast.layout import Layout
from meshcast.pipelining.devices import make_transfer
from meshcast.pipelining.pipeline_stage import PipelineStage
from meshcast.pipelining.table import StageTable
from meshcast.planning.plan import Problem
from meshcast.transfers.transfer import PersistentTransfer

__all__ = ["SharedGradients"]


@dataclass(slots=True)
class _Shared:
    """One parameter: the stages with a copy on this rank, and a transfer from each row of the schedule that
    has some to the others."""

    key: str
    stages: list[PipelineStage]
    own_row: int
    transfers: dict[int, PersistentTransfer]  # by the row that sends; none if there is one row only

    def copies(self) -> list[torch.nn.Parameter]:
        """Each once, as the modules have them now: load_state_dict(assign=True) makes others."""
        found = (stage.shared[self.key] for stage in self.stages)
        return list({id(copy): copy for copy in found}.values())


class SharedGradients:
    """The shared parameters of one rank. Every rank of the pipeline makes one, in the same order.

    Args:
        stages: those of this rank, by number.
        first_lane: lanes from here on are free.
    """

    def __init__(
        self, stages: Mapping[int, PipelineStage], table: StageTable, first_lane: int, timeout: float
    ) -> None:
        self._timeout = timeout
        self._shared: list[_Shared] = []
        any_stage = next(iter(stages.values()))
        own_row = table.row_of(any_stage.stage_index)
        lane = first_lane
        for key, sharing in sorted(table.shared.items()):
            rows = sorted({table.row_of(stage) for stage in sharing})
            here = [stages[stage] for stage in sharing if stage in stages]
            transfers = {}
            for row in rows if len(rows) > 1 else []:
                if own_row in rows:
                    transfers[row] = _transfer(
                        key, row, rows, table, here[0].shared[key], any_stage, lane, timeout
                    )
                lane += 1
            if here:
                self._shared.append(_Shared(key, here, own_row, transfers))

    def transfers(self) -> list[PersistentTransfer]:
        return [transfer for each in self._shared for transfer in each.transfers.values()]

    def sum(self) -> None:
        """After the gradients of each stage have been summed over its ranks."""
        started = []
        for each in self._shared:
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


def _transfer(
    key: str,
    row: int,
    rows: list[int],
    table: StageTable,
    parameter: torch.nn.Parameter,
    stage: PipelineStage,
    lane: int,
    timeout: float,
) -> PersistentTransfer:
    """From one row to all others that share."""
    source = sorted(table.ranks[table.rows[row][0]])
    target = sorted(rank for other in rows if other != row for rank in table.ranks[table.rows[other][0]])
    problem = Problem(
        tuple(parameter.shape),
        parameter.dtype,
        Layout(source, [Replicate()]),
        Layout(target, [Replicate()]),
    )
    op = f"pipeline shared parameter {key}"
    return make_transfer(stage.device, stage.group, [problem], lane, op, timeout)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
