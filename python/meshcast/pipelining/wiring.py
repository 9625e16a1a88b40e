"""Wiring: the ranks agree on edges and shapes, then compile each link into its forward and its backward
transfer.

Checks that a stage can know which of its mesh dimensions split samples or tokens, before anything moves.

Over such a dimension every rank computes a part of the loss, so gradients are sums over its ranks. Over the
others (tensor parallelism) all ranks compute the same loss, and modules see to it that gradients are whole. A
wrong guess would be a wrong gradient, silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ..errors import DeadlineExceededError, LayoutError, MeshcastError
from ..groups.parent import parent_group
from ..layout import Layout
from ..planning.plan import Problem, plan_many
from ..topology import Topology
from ..transfers.handle import Handle
from ..transfers.medium import fresh
from ..transfers.transfer import DEFAULT_OPTIONS, PersistentTransfer, PlanOptions
from .action import Link
from .board import PipelineBoard, Refused
from .edge import Delivery, Edge, RankStage, bundles, check_edges, links_of, returns
from .parallel import (
    DataUse,
    Inferred,
    LocalValue,
    SentDTensor,
    Way,
    global_shape,
    gradient_placements,
    with_empty,
)
from .table import StageTable

__all__ = [
    "Arrival",
    "EdgeTransfers",
    "Example",
    "LocalShape",
    "ShapesReport",
    "StageValue",
    "Wiring",
    "as_input",
    "check_split",
    "connect",
    "gradient_layout",
    "make_transfer",
    "report_outputs",
    "transfer_times",
]


@dataclass(frozen=True, slots=True)
class StageValue:
    """One value that leaves a stage in each micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    layout: Layout
    sent: SentDTensor | None = None  # of a stage without mesh=: the DTensor that it is the local part of


def check_split(
    stage: RankStage,
    inputs: Mapping[int, StageValue],
    outputs: Sequence[StageValue],
    last_outputs: Sequence[LocalValue] | None,
) -> None:
    """Raises LayoutError naming ``data_dims`` or ``loss_dims`` where the stage cannot know.

    Args:
        inputs: those that other stages send.
        outputs: what leaves the stage; empty for the last.
        last_outputs: of the last stage, where they could be inferred.
    """
    for dim, size in enumerate(stage.mesh.shape):
        if size == 1:
            continue
        cut = [index for index, value in inputs.items() if _is_cut(value.layout.placements[dim])]
        if not stage.data_dims_given and dim not in stage.data_dims:
            _check_data_dim(stage, dim, cut, inputs, outputs)
        if not stage.loss_dims_given and dim not in stage.loss_dims:
            for index in cut or inputs:
                _check_loss_dim(stage, dim, inputs[index], index, last_outputs or ())


def _check_data_dim(
    stage: RankStage,
    dim: int,
    cut: Sequence[int],
    inputs: Mapping[int, StageValue],
    outputs: Sequence[StageValue],
) -> None:
    where = f"stage {stage.stage_index}"
    whole = [
        index
        for index, value in inputs.items()
        if value.requires_grad and isinstance(value.layout.placements[dim], Replicate)
    ]
    if cut and whole and not _has_tensor_parallel_parameters_only(stage, dim):
        raise LayoutError(
            f"{where}: over dimension {dim} of its mesh input {cut[0]} is cut, input {whole[0]} whole. The "
            f"gradient of input {whole[0]} is a sum over these ranks if they compute different parts of the "
            "loss, and whole on each if they are tensor parallel: name the dimensions over which samples or "
            f"tokens are split, data_dims={[*stage.data_dims, dim]}, or data_dims={stage.data_dims}"
        )
    split = [index for index, value in enumerate(outputs) if value.layout.placements[dim] == Shard(0)]
    if (
        split
        and all(isinstance(each[dim], Replicate) for each in stage.input_placements.listed())
        and not stage.use_dtensor
        and not _has_tensor_parallel_parameters_only(stage, dim)
    ):
        raise LayoutError(
            f"{where}: over dimension {dim} of its mesh all inputs are whole, output {split[0]} is split by "
            "samples: name the dimensions over which samples are split, "
            f"data_dims={[*stage.data_dims, dim]}, or data_dims={stage.data_dims} if every rank "
            "computes the gradients of all samples"
        )


def _check_loss_dim(
    stage: RankStage, dim: int, value: StageValue, index: int, outputs: Sequence[LocalValue]
) -> None:
    """Raises LayoutError where, by their sizes, the outputs that the loss is taken of are this rank's part
    of the input."""
    placement = value.layout.placements[dim]
    tokens = 1 if len(value.shape) > 2 else 0  # else dimension 1 is of features
    dims = [placement.dim % len(value.shape)] if isinstance(placement, Shard) else range(tokens + 1)
    # Other dimensions of the mesh may cut the value, too: a data-parallel rank has its samples in any case.
    whole = _local_shape(stage, value, dim, Replicate())
    for along in dims if value.shape else ():
        part = _local_shape(stage, value, dim, Shard(along))
        for output in outputs:
            if (
                output.placements is None
                and len(output.shape) > along
                and output.shape[along] == part[along] != whole[along]
            ):
                both = [*stage.loss_dims, dim]
                raise LayoutError(
                    f"stage {stage.stage_index}: over dimension {dim} of the mesh input "
                    f"{index} is {placement}, and the loss is taken of outputs that are this rank's part. "
                    f"If every rank's loss is that of its own part, give loss_dims={both}, and the same "
                    "data_dims= where parameters are whole on these ranks (context parallelism, modules that "
                    f"take their part by themselves); if all have the same loss, loss_dims={stage.loss_dims}"
                )


def _local_shape(stage: RankStage, value: StageValue, dim: int, placement: Placement) -> tuple[int, ...]:
    """The shape of the value on this rank, if `placement` were its placement over dimension `dim`."""
    others = value.layout.placements
    placements = (*others[:dim], placement, *others[dim + 1 :])
    return stage.mesh.layout(placements).local_shapes(value.shape)[stage.rank]


def _is_cut(placement: object) -> bool:
    return isinstance(placement, Shard) and placement.dim != 0


def _has_tensor_parallel_parameters_only(stage: RankStage, dim: int) -> bool:
    """Returns whether every trained parameter is a DTensor over the ranks along the dimension."""
    along = stage.mesh.along([dim])
    return all(
        isinstance(parameter.data, DTensor)
        and set(parameter.data.device_mesh.mesh.flatten().tolist()).issuperset(along)
        for parameter in stage.submod.parameters()
        if parameter.requires_grad
    )


class _SentReport(NamedTuple):
    """A `SentDTensor`. Its placements are those of a layout of one rank."""

    placements: Layout
    shape: tuple[int, ...]
    names: tuple[str, ...]
    mesh: tuple[Any, ...] | None


class _OutputReport(NamedTuple):
    """A local output of a rank, and the layout that it is a shard of."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    layout: Layout
    sent: _SentReport | None

    def sent_dtensor(self) -> SentDTensor | None:
        if self.sent is None:
            return None
        return SentDTensor(self.sent.placements.placements, *self.sent[1:])


class ShapesReport(NamedTuple):
    """The outputs of a stage on one rank. None: it has no samples, so others report them. needs_data: see
    `Inferred`."""

    outputs: list[_OutputReport] | None
    needs_data: bool


def report_outputs(stage: RankStage, inferred: Inferred) -> ShapesReport:
    """The report of what a rank has inferred. The last stage only reports that it came this far: no rank may
    wait for it in vain."""
    if inferred.outputs is None and not stage.is_last:
        return ShapesReport(None, inferred.needs_data)
    outputs = []
    for index, value in enumerate(() if stage.is_last else inferred.outputs or ()):
        sent = None
        if value.sent is not None:
            one = torch.zeros([1] * len(value.sent.placements), dtype=torch.int64)
            placements = Layout(one, value.sent.placements)
            sent = _SentReport(placements, value.sent.shape, value.sent.names, value.sent.layout)
        layout = stage.mesh.layout(stage.output_layout(index, value))
        outputs.append(_OutputReport(value.shape, value.dtype, value.requires_grad, layout, sent))
    return ShapesReport(outputs, inferred.needs_data)


LocalShape = tuple[tuple[int, ...], torch.dtype]  # local shape and type

# A transfer to wait for, unless the value was here already, and a tensor for each delivery.
Arrival = tuple[Handle[Any] | None, list[torch.Tensor]]


class EdgeTransfers:
    """One transfer for each micro-batch: the values of a bundle, or the gradients of one link.

    transfer: None where both stages are on the same ranks and every rank keeps what it has: values are handed
    over as they are. number: of the lane they are
    ordered in, the same on all of its ranks.
    """

    def __init__(
        self,
        transfer: PersistentTransfer | None,
        consumers: Sequence[int],
        deliveries: Sequence[Delivery],
        sources: Sequence[LocalShape],
        buffers: Sequence[LocalShape],
        stage: RankStage,
        number: int,
    ) -> None:
        self.transfer = transfer
        self.number = number
        self.consumers = consumers
        self.deliveries = deliveries
        self._sources = sources  # of what this rank sends; empty on the receiving side
        self._buffers = buffers  # of what it receives; empty on the sending side
        self._device = stage.device
        self._rank = stage.rank
        # A transfer there need not be over when it has been waited for: wait() orders the compute stream.
        self.on_gpu = stage.device.type == "cuda"
        # True if a receiver may have to pass values on to another.
        self.relays = any(len(each.layout.ranks) > 1 for each in deliveries)

    def send(self, tensors: Sequence[torch.Tensor], timeout: float) -> Handle[Any]:
        """To other ranks, a tensor for each delivery."""
        assert self.transfer is not None
        return self.transfer.start(tensors, [None] * len(tensors), timeout=timeout)

    def receive(self, timeout: float) -> Arrival:
        """From other ranks."""
        assert self.transfer is not None
        buffers = self._empty()
        return self.transfer.start([None] * len(buffers), buffers, timeout=timeout), buffers

    def hand_over(self, tensors: Sequence[torch.Tensor], timeout: float) -> Arrival:
        """From one stage of these ranks to another."""
        if self.transfer is None:
            return None, list(tensors)
        buffers = self._empty()
        return self.transfer.start(tensors, buffers, timeout=timeout), buffers

    def bytes_sent(self, handle: Handle[Any]) -> int:
        """By this rank in a transfer of these that has been waited for."""
        if self.on_gpu and self.transfer is not None:  # which need not be over
            return self.transfer.plan.bytes_sent(self._rank)
        return int(handle.figures()["bytes_sent"])

    def warm_up(self, timeout: float) -> Handle[Any] | None:
        """On GPUs: a transfer of nothing in particular, started by all ranks of the edge. NCCL makes its
        connections in the first one and blocks the host for them, which in the middle of a step could
        be for a rank that waits for this one."""
        if self.transfer is None or not self.on_gpu:
            return None
        nothing = [None] * len(self.deliveries)
        given = [torch.zeros(shape, dtype=dtype, device=self._device) for shape, dtype in self._sources]
        return self.transfer.start(given or nothing, self._empty() or nothing, timeout=timeout)

    def _empty(self) -> list[torch.Tensor]:
        return [fresh(shape, dtype, self._device) for shape, dtype in self._buffers]


def make_transfer(
    stage: RankStage,
    problems: Sequence[Problem],
    lane: int,
    op: str,
    timeout: float,
    options: PlanOptions = DEFAULT_OPTIONS,
) -> PersistentTransfer:
    """A transfer of the pipeline's for tensors on the device of a stage. The ranks agree on it in the
    background, those on GPUs in its first call, which `EdgeTransfers.warm_up` makes."""
    kind = "cuda" if stage.device.type == "cuda" else "cpu"
    parent = parent_group(stage.group, op)
    transfer = PersistentTransfer(parent, problems, op, options, device_types=(kind, kind), lane=lane)
    if kind == "cpu":
        transfer.agree_ahead(timeout)
    return transfer


_FIRST_LANE = 2  # below are the lanes of ordinary calls and their backward


@dataclass(slots=True)
class Wiring:
    """The transfers this rank takes part in, for micro-batches of one shape, and what it must know of the
    values."""

    edges: tuple[Edge, ...]
    links: list[Link]
    values: list[list[StageValue]]  # outputs of every stage but the last
    inputs: dict[int, dict[int, StageValue]]  # of each of this rank's stages, in the layout they arrive in
    ways: dict[int, Way]  # in which each of this rank's stages runs
    forward: dict[Link, list[EdgeTransfers]]
    backward: dict[Link, EdgeTransfers]  # only links with a value that needs a gradient
    free_lane: int  # lanes from here on have no transfer

    def edge_transfers(self) -> list[EdgeTransfers]:
        """Each once, by number: those of several ranks come in one order on all of them."""
        found = [*(each for several in self.forward.values() for each in several), *self.backward.values()]
        return sorted({id(each): each for each in found}.values(), key=lambda each: each.number)

    def transfers(self) -> list[PersistentTransfer]:
        return [each.transfer for each in self.edge_transfers() if each.transfer is not None]


@dataclass(frozen=True, slots=True)
class Example:
    """A rank's part of one micro-batch, by which the ranks find the shapes of all values.

    args: local arguments of the first stage. kwargs: local keyword arguments of each stage. again: another
    micro-batch of these shapes, if there is one. everywhere_empty: it has no samples on any rank. looked:
    what the first stage's module returns here, if that is known.
    """

    args: Sequence[Any]
    kwargs: Mapping[int, Mapping[str, Any]]
    again: Example | None = None
    everywhere_empty: bool = False
    looked: Inferred | None = None


def connect(
    stages: Mapping[int, RankStage],
    table: StageTable,
    board: PipelineBoard,
    example: Example,
    timeout: float,
    topic: str,
    *,
    first: bool,
) -> Wiring:
    """Finds the shapes of all values, stage after stage, and compiles the transfers of this rank. Lanes have
    the same numbers for all shapes of micro-batches: between two steps nothing is in flight.

    Args:
        stages: those of this rank, by number.
        topic: begins the names of what the ranks report to each other here; another for each call.
        first: no other wiring was made before.

    Raises:
        Refused: on all ranks, before a transfer was made: a shape, layout or module that does not fit.
    """
    try:
        values, inferred = _agree_on_values(stages, table, board, example, topic)
        num_stages = len(table.ranks)
        edges = table.edges
        edges = check_edges(_default_edges(values), num_stages) if edges is None else edges
        for edge in edges:
            _value_of(edge, values)
        inputs = {index: _inputs(stage, table, edges, values) for index, stage in stages.items()}
        for index, stage in stages.items():
            _check_examples(stage, inputs[index], sizes=first)
            if table.trains:
                outputs = values[index] if index < len(values) else []
                last_outputs = inferred[index].outputs if stage.is_last else None
                check_split(stage, inputs[index], outputs, last_outputs)
        routes, free_lane = _routes(edges, values, table)
        # A rank whose own checks failed stays away from the transfers, which the others would wait for.
        board.publish(f"{topic}checked", True)
        board.collect(f"{topic}checked", bool)
    except MeshcastError as error:
        if isinstance(error, DeadlineExceededError):  # a missing rank knows of nothing
            raise
        raise Refused(error) from error
    ways = {index: _way(stage, inferred[index], values) for index, stage in stages.items()}
    wiring = Wiring(edges, links_of(edges), values, inputs, ways, {}, {}, free_lane)
    for route in routes:
        here = [stage for stage in (route.source, *route.consumers) if stage in stages]
        if not here:
            continue
        transfers = _edge_transfers(stages[here[0]], route, timeout)
        for consumer in route.consumers:
            link = route.source, consumer
            if route.backward:
                wiring.backward[link] = transfers
            elif route.source in stages or consumer in stages:
                wiring.forward.setdefault(link, []).append(transfers)
    # In one order on all ranks of an edge. All are in flight before one is waited for, so that ranks of
    # different edges do not wait for each other.
    for handle in [each.warm_up(timeout) for each in wiring.edge_transfers()]:
        if handle is not None:
            handle.wait()
    return wiring


def _agree_on_values(
    stages: Mapping[int, RankStage],
    table: StageTable,
    board: PipelineBoard,
    example: Example,
    topic: str,
) -> tuple[list[list[StageValue]], dict[int, Inferred]]:
    """The outputs of all stages but the last, and what this rank has inferred of its own."""
    values: list[list[StageValue]] = []
    inferred: dict[int, Inferred] = {}
    for index, ranks in enumerate(table.ranks):
        where = f"{topic}shapes/{index}"
        data: DataUse = "alone" if len(ranks) > 1 else "if needed"
        while True:
            if index in stages:
                inferred[index] = _inferred(stages[index], table, values, example, data)
                board.publish(where, report_outputs(stages[index], inferred[index]))
            found = board.collect(where, ShapesReport, ranks)
            if data != "alone" or not any(report.needs_data for report in found.values()):
                break
            data, where = "always", f"{where}/data"  # all of its ranks, since modules communicate
        if index < len(table.ranks) - 1:
            values.append(_values(index, found, table))
    return values, inferred


def _inferred(
    stage: RankStage,
    table: StageTable,
    values: Sequence[Sequence[StageValue]],
    example: Example,
    data: DataUse,
) -> Inferred:
    """values: the outputs of the stages before this one."""
    index, again = stage.stage_index, example.again
    if stage.is_first and data != "always" and example.looked is not None:
        return example.looked
    args, others = example.args, None if again is None else again.args
    if not stage.is_first:
        args = others = _examples(stage, _inputs(stage, table, table.edges, values))
    more = None if again is None or others is None else (others, again.kwargs[index])
    found: Inferred = stage.infer(
        list(args), example.kwargs[index], table.trains, example.everywhere_empty, data, more
    )
    return found


def _way(stage: RankStage, inferred: Inferred, values: Sequence[Sequence[StageValue]]) -> Way:
    if stage.is_last:
        return Way(None, inferred.stand_in)
    own = values[stage.stage_index]
    sums = [
        number
        for number, value in enumerate(own)
        if any(isinstance(value.layout.placements[dim], Partial) for dim in stage.data_dims)
    ]
    outputs = [(value.layout.local_shapes(value.shape)[stage.rank], value.dtype) for value in own]
    return Way(outputs, inferred.stand_in, frozenset(sums))


def _values(index: int, reports: Mapping[int, ShapesReport], table: StageTable) -> list[StageValue]:
    """Outputs of a stage from what its ranks published."""
    outputs_of = {rank: report.outputs for rank, report in reports.items() if report.outputs is not None}
    ranks = table.ranks[index]
    if not outputs_of:
        raise LayoutError(f"stage {index}: no rank of {ranks} has samples to find shapes from")
    first_rank = next(rank for rank in ranks if rank in outputs_of)
    first = outputs_of[first_rank]
    for rank, outputs in outputs_of.items():
        if len(outputs) != len(first):
            raise LayoutError(
                f"stage {index}: rank {first_rank} has {len(first)} outputs, rank {rank} has {len(outputs)}"
            )
    values = []
    for number, mine in enumerate(first):
        what = f"stage {index}, output {number}"
        found = {rank: outputs[number] for rank, outputs in outputs_of.items()}
        for rank, other in found.items():
            if (other.dtype, other.layout) != (mine.dtype, mine.layout):
                raise LayoutError(
                    f"{what}: rank {first_rank} has {mine.dtype} in {mine.layout}, rank {rank} has "
                    f"{other.dtype} in {other.layout}"
                )
        known = {rank: other.shape for rank, other in found.items()}
        stage = table.stages[index]
        shape = global_shape(mine.layout, with_empty(known, mine.layout, stage.data_dims), what)
        needs_grad = any(other.requires_grad for other in found.values())
        sent = mine.sent_dtensor() if stage.alone else None
        values.append(StageValue(shape, mine.dtype, needs_grad, mine.layout, sent))
    return values


def _default_edges(values: Sequence[Sequence[StageValue]]) -> list[Edge]:
    return [
        Edge(index, output, index + 1, output)
        for index, outputs in enumerate(values)
        for output in range(len(outputs))
    ]


def _value_of(edge: Edge, values: Sequence[Sequence[StageValue]]) -> StageValue:
    outputs = values[edge.from_stage]
    if edge.output >= len(outputs):
        raise LayoutError(f"edge {edge}: stage {edge.from_stage} has {len(outputs)} outputs")
    return outputs[edge.output]


def _inputs(
    stage: RankStage,
    table: StageTable,
    edges: Sequence[Edge] | None,
    values: Sequence[Sequence[StageValue]],
) -> dict[int, StageValue]:
    """Inputs of this rank's stage, all producers being known."""
    index = stage.stage_index
    if index == 0:
        return {}
    own = _default_edges(values[:index])[-len(values[index - 1]) :] if edges is None else edges
    inputs = {}
    for edge in own:
        if edge.to_stage == index:
            value = _value_of(edge, values)
            layout = table.input_layout(index, edge.input)
            inputs[edge.input] = replace(value, layout=layout, sent=value.sent if stage.alone else None)
    return dict(sorted(inputs.items()))


def _examples(stage: RankStage, inputs: Mapping[int, StageValue]) -> list[torch.Tensor]:
    """Stand-ins of this rank's inputs, for shape inference only."""
    examples = []
    for index, value in inputs.items():
        shape = value.layout.local_shapes(value.shape)[stage.rank]
        local = torch.empty(shape, dtype=value.dtype, device=stage.device)
        examples.append(as_input(stage, index, local, value).requires_grad_(value.requires_grad))
    return examples


def as_input(stage: RankStage, index: int, local: torch.Tensor, value: StageValue) -> torch.Tensor:
    """This rank's part of a value, as the module of a stage gets it."""
    found: torch.Tensor = local
    if stage.use_dtensor:
        found = stage.wrap(local, stage.input_placements[index], value.shape)
    elif value.sent is not None:
        found = stage.as_before(local, value.sent)
    return found


def _check_examples(stage: RankStage, inputs: Mapping[int, StageValue], *, sizes: bool) -> None:
    """sizes: of the first dimension as well, which later micro-batches may have another of."""
    if stage.input_examples is None or not inputs:
        return
    if len(stage.input_examples) != len(inputs):
        raise LayoutError(
            f"stage {stage.stage_index}: input_args has {len(stage.input_examples)} tensors, edges "
            f"feed {len(inputs)} inputs"
        )
    for (index, value), example in zip(inputs.items(), stage.input_examples, strict=True):
        local = example.to_local() if hasattr(example, "to_local") else example
        expected = value.layout.local_shapes(value.shape)[stage.rank]
        begin = 0 if sizes else 1
        if tuple(local.shape)[begin:] != tuple(expected)[begin:] or example.dtype != value.dtype:
            raise LayoutError(
                f"stage {stage.stage_index}, input {index}: input_args says "
                f"{example.dtype} {tuple(local.shape)}, "
                f"its producer sends {value.dtype} {tuple(expected)}"
            )


@dataclass(frozen=True, slots=True)
class _Route:
    """The values that travel in one transfer for each micro-batch, or their gradients, which go back."""

    source: int
    consumers: tuple[int, ...]
    deliveries: Sequence[Delivery]
    problems: Sequence[Problem]
    lane: int
    backward: bool = False

    def __str__(self) -> str:
        consumers = ",".join(map(str, self.consumers))
        return f"pipeline {self.source}->{consumers} {'backward' if self.backward else 'forward'}"


def _routes(
    edges: Sequence[Edge], values: Sequence[Sequence[StageValue]], table: StageTable
) -> tuple[list[_Route], int]:
    """All routes of the pipeline, and the first free lane. Each has a lane of its own: a receive posted ahead
    never delays another one. Raises LayoutError for a value whose gradient has no layout."""
    rows = {stage: table.row_of(stage) for stage in range(len(table.ranks))}
    found, links = bundles(edges, table.input_layout, rows), links_of(edges)
    routes = []
    for lane, bundle in enumerate(found, _FIRST_LANE):
        own = [(values[bundle.source][each.output], each.layout) for each in bundle.deliveries]
        problems = [Problem(value.shape, value.dtype, value.layout, layout) for value, layout in own]
        routes.append(_Route(bundle.source, bundle.consumers, bundle.deliveries, problems, lane))
    free = _FIRST_LANE + len(found)
    for lane, (source, consumer) in enumerate(links if table.trains else (), free):
        deliveries = [
            each
            for each in returns(found, source, consumer, table.input_layout)
            if values[source][each.output].requires_grad
        ]
        problems = []
        for each in deliveries:
            value = values[source][each.output]
            given = gradient_layout(each.layout, table.stages[consumer].summed)
            problems.append(Problem(value.shape, value.dtype, given, gradient_layout(value.layout)))
        if deliveries:
            routes.append(_Route(source, (consumer,), deliveries, problems, lane, backward=True))
    return routes, free + len(links)


def _edge_transfers(stage: RankStage, route: _Route, timeout: float) -> EdgeTransfers:
    transfer = None
    sources: list[LocalShape] = []
    targets: list[LocalShape] = []
    if not all(_stays(shape, source, target) for shape, _, source, target in route.problems):
        options = PlanOptions(stage.strategy, stage.topology)
        transfer = make_transfer(stage, route.problems, route.lane, str(route), timeout, options)
        for shape, dtype, source, target in route.problems:
            sources += _local(shape, dtype, source, stage.rank)
            targets += _local(shape, dtype, target, stage.rank)
    return EdgeTransfers(transfer, route.consumers, route.deliveries, sources, targets, stage, route.lane)


def _stays(shape: Sequence[int], source: Layout, target: Layout) -> bool:
    """Returns whether every rank has the same values after a transfer as before it."""
    pending = any(isinstance(placement, Partial) for placement in source.placements)
    return not pending and source.shards(shape) == target.shards(shape)


def _local(shape: Sequence[int], dtype: torch.dtype, layout: Layout, rank: int) -> list[LocalShape]:
    return [(layout.local_shapes(shape)[rank], dtype)] if rank in layout.ranks else []


def gradient_layout(layout: Layout, summed: Sequence[int] = ()) -> Layout:
    """In which the gradient of a value in this layout travels. summed: see `gradient_placements`."""
    over = [dim for dim in summed if layout.mesh_shape[dim] > 1]
    placements: tuple[Placement, ...] = gradient_placements(layout.placements, over)
    return Layout(torch.tensor(layout.ranks).reshape(layout.mesh_shape), placements)


def transfer_times(
    wiring: Wiring, table: StageTable, topology: Topology | None, strategy: str = "auto"
) -> dict[Link, float]:
    """Seconds of one micro-batch over each link, what `simulate` takes as ``transfer``: the longer of values
    and gradients. A value for several stages counts for each of them."""
    times = dict.fromkeys(wiring.links, 0.0)
    for route in _routes(wiring.edges, wiring.values, table)[0]:  # those of gradients come last
        seconds = plan_many(route.problems, topology=topology, strategy=strategy).makespan
        for consumer in route.consumers:
            link = route.source, consumer
            times[link] = max(times[link], seconds) if route.backward else times[link] + seconds
    return times
