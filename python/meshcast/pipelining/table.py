"""The reports of the ranks of a pipeline, and the decisions that follow from them: the table of all stages,
and what every step is.

Pure functions: `PipelineBoard` carries the reports.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from ..errors import Caller, LayoutError
from ..layout import Layout
from .board import PipelineBoard
from .edge import Edge, RankStage

__all__ = [
    "Claim",
    "Dealt",
    "GivenValues",
    "OpaqueValue",
    "RankReport",
    "StageTable",
    "StepAnswer",
    "StepReport",
    "agree_on_stages",
    "agree_on_step",
    "check_fit",
    "describe_stages",
]


class _StageReport(NamedTuple):
    """The description of one stage by one of its ranks: the same on all of them."""

    ranks: list[int]  # in mesh order
    inputs: list[Layout]  # layout templates of the inputs: one for all, or one each
    data_dims: list[int]  # of the mesh, those over which samples are split
    summed: list[int]  # of these, those over which the gradients of inputs are pending sums
    shared: dict[str, str]  # dtype and shape of each shared parameter
    alone: bool  # it is one rank, as in torch: it has no mesh


class RankReport(NamedTuple):
    """The description of a rank's part of a pipeline. All but `trains` and `mine` is the same on all of
    them."""

    stages: int
    device: str
    edges: tuple[Edge, ...] | None
    schedule: str
    microbatches: int
    trains: bool
    mine: dict[int, _StageReport]  # by stage


@dataclass(frozen=True, slots=True)
class StageTable:
    """The properties of all stages that every rank knows after the ranks agreed."""

    stages: list[_StageReport]
    rows: list[list[int]]  # the stages of each row of the schedule; rows in the order of their first stage
    edges: tuple[Edge, ...] | None
    trains: bool
    shared: dict[str, list[int]]  # stages of each shared parameter, ascending

    @property
    def ranks(self) -> list[list[int]]:
        """The ranks of each stage, in mesh order."""
        return [stage.ranks for stage in self.stages]

    @property
    def as_torch(self) -> bool:
        """``True`` where gradients are scaled as torch does it: once, when all is summed."""
        return all(stage.alone for stage in self.stages)

    def row_of(self, stage: int) -> int:
        return next(row for row, stages in enumerate(self.rows) if stage in stages)

    def input_layout(self, stage: int, index: int) -> Layout:
        listed = self.stages[stage].inputs
        if len(listed) > 1 and index >= len(listed):
            raise LayoutError(
                f"stage {stage}: input_placements lists {len(listed)} inputs, but an edge feeds input {index}"
            )
        return listed[0] if len(listed) == 1 else listed[index]


def describe_stages(
    stages: Sequence[RankStage], schedule: str, microbatches: int, trains: bool
) -> RankReport:
    """The description that a rank publishes of itself."""
    first = stages[0]
    mine = {
        stage.stage_index: _StageReport(
            stage.mesh.ranks,
            [stage.mesh.layout(placements) for placements in stage.input_placements.listed()],
            stage.data_dims,
            stage.summed_dims,
            {key: f"{each.dtype} {tuple(each.shape)}" for key, each in stage.shared.items()},
            stage.alone,
        )
        for stage in stages
    }
    return RankReport(first.num_stages, first.device.type, first.edges, schedule, microbatches, trains, mine)


def agree_on_stages(board: PipelineBoard) -> StageTable:
    """Reads what all ranks published. Raises LayoutError, the same on every rank, where they contradict each
    other."""
    reports = board.collect("stage", RankReport)
    first_rank = board.ranks[0]
    first = reports[first_rank]
    for rank, report in reports.items():
        for field in ("stages", "device", "edges", "schedule", "microbatches"):
            if getattr(report, field) != getattr(first, field):
                raise LayoutError(
                    f"the ranks of a pipeline disagree on {field}: rank {first_rank} has "
                    f"{getattr(first, field)}, rank {rank} has {getattr(report, field)}"
                )
    stages: list[_StageReport] = []
    members: list[int] = []
    for stage in range(first.stages):
        members = [rank for rank, report in reports.items() if stage in report.mine]
        if not members:
            raise LayoutError(
                f"stage {stage} is on no rank; ranks {board.ranks} hold stages "
                f"{[', '.join(map(str, report.mine)) for report in reports.values()]}"
            )
        stages.append(_same_on({rank: reports[rank].mine[stage] for rank in members}, stage))
    trains = any(reports[rank].trains for rank in members)  # of the last stage, which has the loss
    return StageTable(stages, _rows(stages), first.edges, trains, _sharing(stages))


def _same_on(reports: Mapping[int, _StageReport], stage: int) -> _StageReport:
    """The description of a stage by its ranks. Raises LayoutError where it is not the same."""
    first_rank, first = next(iter(reports.items()))
    if sorted(first.ranks) != sorted(reports):
        raise LayoutError(
            f"stage {stage} is on a mesh of ranks {first.ranks}, but ranks {list(reports)} made this stage"
        )
    for rank, report in reports.items():
        for field, mine, other in zip(_StageReport._fields, first, report, strict=True):
            if mine != other:
                raise LayoutError(
                    f"the ranks of stage {stage} disagree on {field}: rank {first_rank} has {mine}, "
                    f"rank {rank} has {other}"
                )
    return first


def _sharing(stages: Sequence[_StageReport]) -> dict[str, list[int]]:
    """The stages of each shared parameter. Raises LayoutError where their copies differ in type or shape."""
    sharing: dict[str, list[int]] = {}
    for number, stage in enumerate(stages):
        for key, kind in stage.shared.items():
            first = sharing.setdefault(key, [number])[0]
            if first == number:
                continue
            if kind != stages[first].shared[key]:
                raise LayoutError(
                    f"shared parameter {key!r}: stage {first} has {stages[first].shared[key]}, "
                    f"stage {number} has {kind}"
                )
            sharing[key].append(number)
    for key, found in sharing.items():
        if len(found) < 2:
            raise LayoutError(f"shared parameter {key!r}: only stage {found[0]} names it")
    return sharing


def _rows(stages: Sequence[_StageReport]) -> list[list[int]]:
    """Stages on the same ranks are one row of the schedule. A rank cannot be in two rows: each makes one
    schedule, whose stages share their ranks."""
    rows: dict[frozenset[int], list[int]] = {}
    for number, stage in enumerate(stages):
        rows.setdefault(frozenset(stage.ranks), []).append(number)
    return list(rows.values())


# ---- a step ----------------------------------------------------------------------------------------------


class Claim(NamedTuple):
    """A value that is cut by samples, by its number of them. piece: of a micro-batch; -1: of the batch."""

    piece: int
    kind: str
    samples: int
    name: str
    shape: tuple[int, ...]
    remedy: str


class OpaqueValue(NamedTuple):
    """An object that pytree does not see into, with samples under `path`. piece: as for `Claim`."""

    piece: int
    samples: int
    name: str
    path: str
    kind: str
    remedy: str


class GivenValues(NamedTuple):
    """The values that one rank was given for one of its stages.

    grid: over how many ranks of the stage samples are split, in each of these dimensions. part: which part
    of them the rank has. local: it gives its own samples only (local_batch). batch: the samples of each
    micro-batch, None where no value shows them. own: these are of this rank only. digests: by kind of value,
    a name for those that all ranks of the stage have in common, and one for those of ranks with this part.
    """

    grid: list[int]
    part: int
    local: bool
    batch: list[int] | None
    own: bool
    claims: list[Claim]
    opaque: list[OpaqueValue]
    digests: dict[str, tuple[str, str]]


class StepReport(NamedTuple):
    """The description of one call of ``step`` by one rank.

    refused: why this rank cannot take part, in which case nothing else counts. mode: train or eval. shapes: a
    name for those of each micro-batch. order: a name for actions that were given, not built. samples: of each
    micro-batch, on the first stage. alike: all micro-batches count the same. weighted: the loss function
    returns pairs, if that is known; weight: this rank's part of their weight, on the last stage, where that
    is known. as_torch: no stage has a mesh. given: by stage.
    """

    refused: str = ""
    mode: str = "step"
    shapes: Sequence[str] = ()
    order: str = ""
    samples: list[int] | None = None
    alike: bool = False
    weighted: bool | None = None
    weight: float | None = None
    as_torch: bool = False
    given: Mapping[int, GivenValues] = {}


class Dealt(NamedTuple):
    """The samples that ranks of the first stage give of their own: how many each part of the batch has in
    each micro-batch, and over how many ranks in each dimension the parts are."""

    rows: list[list[int]]
    grid: list[int]


class StepAnswer(NamedTuple):
    """The decision on a step: what it is for all ranks, or which ranks cannot take part, and why."""

    refused: Sequence[tuple[int, str]] = ()
    keys: Sequence[str] = ()  # of each micro-batch, a name for its shapes on all ranks
    samples: Sequence[int] = ()  # of each micro-batch, on all ranks
    rows: Sequence[int] | None = None  # the same, where values show it
    dealt: Dealt | None = None
    alike: bool = False
    weighted: bool | None = None
    weight: float | None = None


class _RefusedBy(Exception):  # noqa: N818  it never leaves the module
    def __init__(self, texts: Mapping[int, str]) -> None:
        self.texts = texts


_NAMES = {"args": "arguments", "kwargs": "keyword arguments", "target": "targets"}


def agree_on_step(reports: Mapping[int, StepReport]) -> StepAnswer:
    """Returns the first rank's answer to what all ranks report of a step."""
    try:
        return _answer(reports)
    except _RefusedBy as refused:
        return StepAnswer(refused=sorted(refused.texts.items()))


def _refuse(rank: int, text: str) -> NoReturn:
    raise _RefusedBy({rank: f"{Caller('pipeline', rank)}: {text}"})


def _answer(reports: Mapping[int, StepReport]) -> StepAnswer:
    refused = {rank: each.refused for rank, each in reports.items() if each.refused}
    if refused:
        raise _RefusedBy(refused)
    ranks = sorted(reports)
    first = reports[ranks[0]]
    for rank in ranks:
        for mine, other, what, verb in (
            (first.mode, reports[rank].mode, "make different calls", "calls"),
            (first.order, reports[rank].order, "disagree on the order of actions", "has"),
        ):
            if mine != other:
                _refuse(
                    ranks[0],
                    f"the ranks of a pipeline {what}: rank {ranks[0]} {verb} {mine}, "
                    f"rank {rank} {verb} {other}",
                )
    given: dict[int, dict[int, GivenValues]] = {}
    for rank in ranks:
        for stage, values in reports[rank].given.items():
            given.setdefault(stage, {})[rank] = values
    rows, dealt = _batch(given.get(0, {}))
    as_torch = all(each.as_torch for each in reports.values())
    for stage, entries in sorted(given.items()):
        _check_stage(stage, entries, rows, dealt, as_torch=as_torch)
    keys = []
    for number, names in enumerate(zip(*(reports[rank].shapes for rank in ranks), strict=True)):
        name = " ".join(names)
        if dealt is not None:  # by which all others are cut too
            name += f" {[each[number] for each in dealt.rows]}"
        keys.append(hashlib.blake2b(name.encode(), digest_size=8).hexdigest())
    known = [each.samples for each in reports.values() if each.samples is not None]
    weights = [each.weight for each in reports.values() if each.weight is not None]
    return StepAnswer(
        keys=keys,
        samples=known[0] if dealt is None or rows is None else rows,
        rows=rows,
        dealt=dealt,
        alike=any(each.alike for each in reports.values()),
        weighted=next((each.weighted for each in reports.values() if each.weighted is not None), None),
        weight=sum(weights) if weights else None,
    )


def _batch(first: Mapping[int, GivenValues]) -> tuple[list[int] | None, Dealt | None]:
    """The number of samples of each micro-batch, None where no value shows it; and how they are dealt out
    where ranks of the first stage give their own."""
    if not first:
        return None, None
    leader = min(first)
    leading = first[leader]
    for rank, each in first.items():
        if (each.own, each.batch is None) != (leading.own, leading.batch is None):
            _refuse_different(0, leader, rank, "arguments")
    if not leading.own:
        return leading.batch, None
    dealt: dict[int, list[int]] = {}
    holders: dict[int, int] = {}
    for rank, each in sorted(first.items()):
        assert each.batch is not None
        if dealt.setdefault(each.part, each.batch) != each.batch:
            _refuse_different(0, holders[each.part], rank, "arguments")
        holders.setdefault(each.part, rank)
    matrix = [dealt[part] for part in sorted(dealt)]
    rows = [sum(each) for each in zip(*matrix, strict=True)]
    for number, total in enumerate(rows):
        for part, expected in enumerate(_chunked(total, leading.grid)):
            if matrix[part][number] != expected:
                _refuse(
                    holders[part],
                    f"stage 0: {sum(matrix[part])} samples of its own were given, {matrix[part][number]} of "
                    f"them for micro-batch {number}, where torch.chunk gives {expected} of all {total} to "
                    "this rank: give all ranks of the stage equally many, the last ones fewer or none",
                )
    if not sum(rows):
        _refuse(leader, "stage 0: the batch has no samples on any rank; give at least one")
    return rows, Dealt(matrix, leading.grid)


def _check_stage(
    stage: int,
    entries: Mapping[int, GivenValues],
    rows: list[int] | None,
    dealt: Dealt | None,
    *,
    as_torch: bool,
) -> None:
    """Refuses what the ranks of a stage were given that does not fit the batch, or differs between them."""
    misfits = {}
    groups: dict[int | None, list[int]] = {}  # ranks that must have the same values
    for rank, each in entries.items():
        expected = rows
        if each.local:
            if dealt is None:
                _refuse(
                    rank, f"stage {stage}: local_batch=True, but no rank of stage 0 gives samples of its own"
                )
            if each.grid != dealt.grid:
                _refuse(
                    rank,
                    f"stage {stage} splits samples over {math.prod(each.grid)} ranks, stage 0 over "
                    f"{math.prod(dealt.grid)} ranks: with local_batch both must be the same. Give them as "
                    "DTensors, or whole",
                )
            expected = dealt.rows[each.part]
        groups.setdefault(each.part if each.local else None, []).append(rank)
        text = None if expected is None else _misfit(stage, each, expected, as_torch=as_torch)
        if text is not None:
            misfits[rank] = f"{Caller('pipeline', rank)}: {text}"
    # A misfit on some ranks only: then the ranks were given different values.
    shapes = {rank: [claim._replace(remedy="") for claim in each.claims] for rank, each in entries.items()}
    for ranks in groups.values():
        for rank in ranks[1:]:
            if shapes[rank] != shapes[ranks[0]]:
                _refuse_different(stage, ranks[0], rank, "values")
    if misfits:
        raise _RefusedBy(misfits)
    for own in (0, 1):
        firsts: dict[Any, int] = {}
        for rank, each in entries.items():
            for kind, digests in each.digests.items():
                first = firsts.setdefault((kind, each.part if own else None), rank)
                if digests[own] != entries[first].digests[kind][own]:
                    _refuse_different(stage, first, rank, _NAMES[kind])


def check_fit(given: Mapping[int, GivenValues], *, as_torch: bool) -> None:
    """Raises LayoutError for a value of the first stage that does not fit the batch of its own rank: its
    module would fail on it in a way that says less. given: by stage."""
    first = given.get(0)
    if first is None or first.batch is None or (first.own and not first.local):
        return
    text = _misfit(0, first, first.batch, as_torch=as_torch)
    if text is not None:
        raise LayoutError(text)


def _misfit(stage: int, given: GivenValues, rows: Sequence[int], *, as_torch: bool) -> str | None:
    total = sum(rows)
    for claim in given.claims:
        expected = total if claim.piece < 0 else rows[claim.piece]
        found = claim.samples
        if as_torch and (claim.kind != "target" or (expected and found % expected == 0)):
            continue  # as in torch each is cut by its own size
        if found != expected:
            whose = "the batch" if claim.piece < 0 else f"micro-batch {claim.piece}"
            return (
                f"stage {stage}: {claim.name} has {found} samples (its shape is {tuple(claim.shape)}), "
                f"{whose} has {expected}. Everything without a chunk spec is cut by samples. {claim.remedy}"
            )
    for each in given.opaque:
        if each.samples > 1 and each.samples == (total if each.piece < 0 else rows[each.piece]):
            return (
                f"stage {stage}: {each.name} is of type {each.kind}, whose {each.path} has {each.samples} "
                f"samples, as many as the batch. pytree does not see into {each.kind}, so nothing of it is "
                "cut: register it, by torch.utils._pytree.register_dataclass or register_pytree_node. "
                f"{each.remedy}"
            )
    return None


def _refuse_different(stage: int, first: int, second: int, what: str) -> NoReturn:
    _refuse(
        second,
        f"ranks {first} and {second} of stage {stage} were given different {what}: each takes its part of "
        "the whole, which must be the same on both. If each rank has samples of its own, say so: "
        "step(..., local_batch=True), or give a DTensor that is Shard(0) on the mesh of the stage",
    )


def _chunked(total: int, grid: Sequence[int]) -> list[int]:
    """Sizes of all parts, cut as torch.chunk does along each dimension of the grid in turn."""
    if not grid:
        return [total]
    each = -(-total // grid[0])
    sizes = [min(each, max(0, total - each * index)) for index in range(grid[0])]
    return [part for size in sizes for part in _chunked(size, grid[1:])]
