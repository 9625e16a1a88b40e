"""The table of stages: what every rank says about itself, and what all know after they agreed.

Parameters that several stages share, tied embeddings for one: every stage has its copy, and after a step each
copy gets the sum of the gradients of all, in the order of the stages, so that the copies stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from ..base.checks import Reader
from ..errors import LayoutError
from ..layout import Layout
from ..planning.plan import Problem
from ..transfers.transfer import PersistentTransfer
from .board import PipelineBoard
from .edge import Edge, RankStage, make_transfer

__all__ = ["SharedGradients", "StageTable", "agree_on_stages", "describe_stages"]


@dataclass(frozen=True, slots=True)
class StageTable:
    """The properties of all stages that every rank knows after the ranks agreed."""

    ranks: list[list[int]]  # of each stage, in mesh order
    rows: list[list[int]]  # the stages of each row of the schedule; rows in the order of their first stage
    inputs: list[list[Layout]]  # layout templates of the inputs of each stage: one for all, or one each
    data_dims: list[list[int]]  # of each stage's mesh, those over which its samples are split
    summed: list[list[int]]  # of these, those over which the gradients of its inputs are pending sums
    edges: tuple[Edge, ...] | None
    trains: bool
    shared: dict[str, list[int]]  # stages of each shared parameter, ascending
    alone: list[bool]  # of each stage, whether it is one rank, as in torch: it has no mesh

    @property
    def as_torch(self) -> bool:
        """``True`` where gradients are scaled as torch does it: once, when all is summed."""
        return all(self.alone)

    def row_of(self, stage: int) -> int:
        return next(row for row, stages in enumerate(self.rows) if stage in stages)

    def input_layout(self, stage: int, index: int) -> Layout:
        listed = self.inputs[stage]
        if len(listed) > 1 and index >= len(listed):
            raise LayoutError(
                f"stage {stage}: input_placements lists {len(listed)} inputs, but an edge feeds input {index}"
            )
        return listed[0] if len(listed) == 1 else listed[index]


def describe_stages(
    stages: Sequence[RankStage], schedule: str, microbatches: int, trains: bool
) -> dict[str, Any]:
    """The description that a rank publishes of itself. Everything but `trains` must be the same on all ranks
    of a stage."""
    first = stages[0]
    return {
        "stages": first.num_stages,
        "device": first.device.type,
        "mine": {
            str(stage.stage_index): {
                "ranks": stage.mesh.ranks,
                "inputs": [
                    stage.mesh.layout(placements).to_wire() for placements in stage.input_placements.listed()
                ],
                "data_dims": stage.data_dims,
                "summed": stage.summed_dims,
                "alone": stage.alone,
                "shared": {
                    key: [str(parameter.dtype), *parameter.shape] for key, parameter in stage.shared.items()
                },
            }
            for stage in stages
        },
        "edges": None
        if first.edges is None
        else [[e.from_stage, e.output, e.to_stage, e.input] for e in first.edges],
        "schedule": schedule,
        "microbatches": microbatches,
        "trains": trains,
    }


def agree_on_stages(board: PipelineBoard) -> StageTable:
    """Reads what all ranks published. Raises LayoutError, the same on every rank, where they contradict each
    other."""
    described = board.collect("stage")
    first_rank = board.ranks[0]
    first = described[first_rank]
    for rank, found in described.items():
        for field in ("stages", "device", "edges", "schedule", "microbatches"):
            if found[field] != first[field]:
                raise LayoutError(
                    f"the ranks of a pipeline disagree on {field}: rank {first_rank} has "
                    f"{first[field]}, rank {rank} has {found[field]}"
                )
    ranks: list[list[int]] = []
    inputs: list[list[Layout]] = []
    data_dims: list[list[int]] = []
    summed: list[list[int]] = []
    alone: list[bool] = []
    shared: dict[str, dict[int, Any]] = {}
    members: list[int] = []
    for stage in range(first["stages"]):
        members = [rank for rank, found in described.items() if str(stage) in found["mine"]]
        if not members:
            raise LayoutError(
                f"stage {stage} is on no rank; ranks {board.ranks} hold stages "
                f"{[', '.join(found['mine']) for found in described.values()]}"
            )
        chosen = _same_on(described, members, stage)
        ranks.append(chosen["ranks"])
        inputs.append([Layout.from_wire(Reader(each, "input")) for each in chosen["inputs"]])
        data_dims.append(chosen["data_dims"])
        summed.append(chosen["summed"])
        alone.append(chosen["alone"])
        for key, kind in chosen["shared"].items():
            shared.setdefault(key, {})[stage] = kind
    # Of the last stage, which has the loss.
    trains = any(described[rank]["trains"] for rank in members)
    edges = None if first["edges"] is None else tuple(Edge(*each) for each in first["edges"])
    _check_shared(shared)
    stages_of = {key: sorted(kinds) for key, kinds in shared.items()}
    return StageTable(ranks, _rows(ranks), inputs, data_dims, summed, edges, trains, stages_of, alone)


def _check_shared(shared: dict[str, dict[int, Any]]) -> None:
    for key, kinds in shared.items():
        if len(kinds) < 2:
            raise LayoutError(f"shared parameter {key!r}: only stage {next(iter(kinds))} names it")
        first = min(kinds)
        for stage, kind in kinds.items():
            if kind != kinds[first]:
                raise LayoutError(
                    f"shared parameter {key!r}: stage {first} has {kinds[first]}, stage {stage} has {kind}"
                )


def _same_on(described: dict[int, dict[str, Any]], members: list[int], stage: int) -> dict[str, Any]:
    """The description that the members give of their stage. Raises LayoutError where it is not the same."""
    chosen = described[members[0]]["mine"][str(stage)]
    if sorted(chosen["ranks"]) != sorted(members):
        raise LayoutError(
            f"stage {stage} is on a mesh of ranks {chosen['ranks']}, but ranks {members} made this stage"
        )
    for rank in members:
        said = described[rank]["mine"][str(stage)]
        for field in ("ranks", "inputs", "data_dims", "summed", "shared", "alone"):
            if said[field] != chosen[field]:
                raise LayoutError(
                    f"the ranks of stage {stage} disagree on {field}: rank {members[0]} has "
                    f"{chosen[field]}, rank {rank} has {said[field]}"
                )
    return chosen


def _rows(ranks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Stages on the same ranks are one row of the schedule. A rank cannot be in two rows: each makes one
    schedule, whose stages share their ranks."""
    rows: dict[frozenset[int], list[int]] = {}
    for stage, members in enumerate(ranks):
        rows.setdefault(frozenset(members), []).append(stage)
    return list(rows.values())


@dataclass(slots=True)
class _Shared:
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


class SharedGradients:
    """The shared parameters of one rank. Every rank of the pipeline makes one, in the same order.

    Args:
        stages: those of this rank, by number.
        first_lane: lanes from here on are free.
    """

    def __init__(
        self, stages: Mapping[int, RankStage], table: StageTable, first_lane: int, timeout: float
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
    stage: RankStage,
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
