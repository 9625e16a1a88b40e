"""Wiring: the ranks agree on edges and shapes, then compile each link into its forward and its backward
transfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Placement

from meshcast.errors import DeadlineExceededError, LayoutError, MeshcastError
from meshcast.layout import Layout
from meshcast.pipelining.board import PipelineBoard, Refused
from meshcast.pipelining.deliveries import Bundle, Delivery, bundles, returns
from meshcast.pipelining.devices import make_transfer
from meshcast.pipelining.edge import Edge, check_edges, links_of
from meshcast.pipelining.edge_transfers import EdgeTransfers, LocalShape
from meshcast.pipelining.inference import DataUse, Inferred, Way
from meshcast.pipelining.layouts import gradient_placements
from meshcast.pipelining.lower import Link
from meshcast.pipelining.pipeline_stage import PipelineStage
from meshcast.pipelining.sample_split import check_split
from meshcast.pipelining.shapes import LocalValue, SentDTensor, global_shape, with_empty
from meshcast.pipelining.shared import SharedGradients
from meshcast.pipelining.table import StageTable
from meshcast.pipelining.wire import decode_value, encode_value
from meshcast.planning.plan import Problem
from meshcast.transfers.transfer import PersistentTransfer, PlanOptions

__all__ = ["StageValue", "Wiring", "connect", "gradient_layout"]

_FIRST_LANE = 2  # below are the lanes of ordinary calls and their backward


@dataclass(frozen=True, slots=True)
class StageValue:
    """One value that leaves a stage in each micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    layout: Layout
    sent: SentDTensor | None = None  # of a stage without mesh=: the DTensor that it is the local part of


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
    shared: SharedGradients

    def edge_transfers(self) -> list[EdgeTransfers]:
        """Each once, by number: those of several ranks come in one order on all of them."""
        found = [*(each for several in self.forward.values() for each in several), *self.backward.values()]
        return sorted({id(each): each for each in found}.values(), key=lambda each: each.number)

    def transfers(self) -> list[PersistentTransfer]:
        own = [each.transfer for each in self.edge_transfers() if each.transfer is not None]
        return [*own, *self.shared.transfers()]

    def is_local(self, link: Link) -> bool:
        """Returns whether both stages of the link are on this rank."""
        return link[0] in self.inputs and link[1] in self.inputs


_Agreed = tuple[
    list[list[StageValue]],
    tuple[Edge, ...],
    dict[int, dict[int, StageValue]],
    dict[int, Inferred],
    list[Bundle],
    dict[Link, list[tuple[Delivery, Problem]]],
]


def connect(
    stages: Mapping[int, PipelineStage],
    table: StageTable,
    board: PipelineBoard,
    args: Sequence[Any],
    kwargs: Mapping[int, Mapping[str, Any]],
    again: tuple[Sequence[Any], Mapping[int, Mapping[str, Any]]] | None,
    timeout: float,
    topic: str = "",
    shared: SharedGradients | None = None,
    everywhere_empty: bool = False,
    looked: Inferred | None = None,
) -> Wiring:
    """Finds the shapes of all values, stage after stage, and compiles the transfers of this rank.

    Args:
        stages: those of this rank, by number.
        args: this rank's local arguments of one micro-batch, first stage only.
        kwargs: local keyword arguments of one micro-batch, of each stage.
        again: both of another micro-batch of these shapes, if there is one.
        topic: begins the names of what the ranks tell each other here; another for each call.
        shared: of an earlier call for micro-batches of another shape. Lanes have the same numbers in all of
            them: between two steps nothing is on its way.
        everywhere_empty: the micro-batch has no samples on any rank.
        looked: what the first stage's module returns here, if that is known.

    Raises:
        Refused: on all ranks, before a transfer was made: a shape, layout or module that does not fit.
    """
    try:
        agreed = _agree(
            stages, table, board, args, kwargs, again, topic, shared is None, everywhere_empty, looked
        )
    except MeshcastError as error:
        if isinstance(error, DeadlineExceededError):  # who is missing knows of nothing
            raise
        raise Refused(error) from error
    values, edges, inputs_of, inferred, found_bundles, returned = agreed
    links = links_of(edges)
    # A lane of its own for each bundle and for the way back of each link: a receive posted ahead never delays
    # another one.
    back = _FIRST_LANE + len(found_bundles)
    if shared is None:
        shared = SharedGradients(stages, table, back + len(links), timeout)
    ways = {}
    for index, stage in stages.items():
        own = [] if stage.is_last else values[index]
        sums = [
            number
            for number, value in enumerate(own)
            if any(isinstance(value.layout.placements[dim], Partial) for dim in stage.data_dims)
        ]
        given = [(value.shape, value.dtype, value.layout) for value in own]
        outputs = None if stage.is_last else _local(given, stage.rank)
        ways[index] = Way(outputs, inferred[index].stand_in, frozenset(sums))
    wiring = Wiring(edges, links, values, inputs_of, ways, {}, {}, shared)
    for number, bundle in enumerate(found_bundles):
        _compile_bundle(wiring, stages, bundle, _FIRST_LANE + number, timeout)
    for number, link in enumerate(links):
        if returned.get(link) and (link[0] in stages or link[1] in stages):
            _compile_return(wiring, stages, link, returned[link], back + number, timeout)
    # In one order on all ranks of an edge. All are on their way before one is waited for, so that ranks of
    # unlike edges do not wait for each other.
    for handle in [each.warm_up(timeout) for each in wiring.edge_transfers()]:
        if handle is not None:
            handle.wait()
    return wiring


def _agree(
    stages: Mapping[int, PipelineStage],
    table: StageTable,
    board: PipelineBoard,
    args: Sequence[Any],
    kwargs: Mapping[int, Mapping[str, Any]],
    again: tuple[Sequence[Any], Mapping[int, Mapping[str, Any]]] | None,
    topic: str,
    first: bool,
    everywhere_empty: bool,
    looked: Inferred | None,
) -> _Agreed:
    """The agreement of all ranks before a transfer is made. Afterwards none of them has anything to
    refuse."""
    values: list[list[StageValue]] = []
    inferred: dict[int, Inferred] = {}
    num_stages = len(table.ranks)
    for index in range(num_stages):
        where = f"{topic}shapes/{index}"
        data: DataUse = "alone" if len(table.ranks[index]) > 1 else "if needed"
        while True:
            if index in stages:
                stage = stages[index]
                inputs = _inputs(stage, table, table.edges, values)
                given = _examples(stage, inputs) if index else list(args)
                known = None if index or data == "always" else looked
                more = None if again is None else (given if index else again[0], again[1][index])
                inferred[index] = known or stage.infer(
                    given, kwargs[index], table.trains, everywhere_empty, data, more
                )
                _publish_shapes(stage, board, where, inferred[index])
            # The last stage only tells whether it came this far: nobody must wait for it in vain.
            found = board.collect(where, table.ranks[index])
            if data != "alone" or not any(published["needs_data"] for published in found.values()):
                break
            data, where = "always", f"{where}/data"  # all of its ranks, since modules communicate
        values.append(_values(index, found, table))
    del values[-1]
    edges = table.edges
    edges = check_edges(_default_edges(values), num_stages) if edges is None else edges
    for edge in edges:
        _value_of(edge, values)
    inputs_of = {index: _inputs(stage, table, edges, values) for index, stage in stages.items()}
    for index, stage in stages.items():
        _check_examples(stage, inputs_of[index], sizes=first)
        if table.trains:
            outputs = values[index] if index < len(values) else []
            check_split(stage, inputs_of[index], outputs, inferred[index].outputs if stage.is_last else None)
    found_bundles = bundles(
        edges, table.input_layout, {stage: table.row_of(stage) for stage in range(num_stages)}
    )
    returned = {
        link: _returned(link, values, returns(found_bundles, *link, table.input_layout), table)
        for link in (links_of(edges) if table.trains else [])
    }
    # A rank whose own checks failed stays away from the transfers, which the others would wait for.
    board.publish(f"{topic}checked", {})
    board.collect(f"{topic}checked")
    return values, edges, inputs_of, inferred, found_bundles, returned


def _publish_shapes(stage: PipelineStage, board: PipelineBoard, topic: str, inferred: Inferred) -> None:
    outputs = [] if stage.is_last else inferred.outputs
    encoded = None
    if outputs is not None:
        encoded = [
            encode_value(local, stage.mesh.layout(stage.output_layout(index, local)))
            for index, local in enumerate(outputs)
        ]
    board.publish(topic, {"outputs": encoded, "needs_data": inferred.needs_data})


def _values(index: int, found: Mapping[int, Mapping[str, Any]], table: StageTable) -> list[StageValue]:
    """Outputs of a stage from what its ranks published."""
    locals_of: dict[int, list[tuple[LocalValue, Layout]]] = {
        rank: [decode_value(each) for each in published["outputs"]]
        for rank, published in found.items()
        if published["outputs"] is not None  # it has no samples, so others tell
    }
    if not locals_of:
        raise LayoutError(f"stage {index}: no rank of {table.ranks[index]} has samples to find shapes from")
    first_rank = next(rank for rank in table.ranks[index] if rank in locals_of)
    first = locals_of[first_rank]
    values = []
    for rank, outputs in locals_of.items():
        if len(outputs) != len(first):
            raise LayoutError(
                f"stage {index}: rank {first_rank} has {len(first)} outputs, rank {rank} has {len(outputs)}"
            )
    for output, (local, layout) in enumerate(first):
        what = f"stage {index}, output {output}"
        for rank, outputs in locals_of.items():
            if (outputs[output][0].dtype, outputs[output][1]) != (local.dtype, layout):
                raise LayoutError(
                    f"{what}: rank {first_rank} has {local.dtype} in {layout}, rank {rank} has "
                    f"{outputs[output][0].dtype} in {outputs[output][1]}"
                )
        shapes = {rank: outputs[output][0].shape for rank, outputs in locals_of.items()}
        shape = global_shape(layout, with_empty(shapes, layout, table.data_dims[index]), what)
        values.append(
            StageValue(
                shape,
                local.dtype,
                any(outputs[output][0].requires_grad for outputs in locals_of.values()),
                layout,
                local.sent if table.alone[index] else None,
            )
        )
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
    stage: PipelineStage,
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


def _examples(stage: PipelineStage, inputs: Mapping[int, StageValue]) -> list[torch.Tensor]:
    """Stand-ins of this rank's inputs, for shape inference only."""
    examples = []
    for index, value in inputs.items():
        local = torch.empty(
            value.layout.local_shapes(value.shape)[stage.rank], dtype=value.dtype, device=stage.device
        )
        if stage.use_dtensor:
            local = stage.wrap(local, stage.input_placements[index], value.shape)
        elif value.sent is not None:
            local = stage.as_before(local, value.sent)
        examples.append(local.requires_grad_(value.requires_grad))
    return examples


def _check_examples(stage: PipelineStage, inputs: Mapping[int, StageValue], *, sizes: bool) -> None:
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
                f"rank {stage.rank}, stage {stage.stage_index}, input {index}: input_args says "
                f"{example.dtype} {tuple(local.shape)}, "
                f"its producer sends {value.dtype} {tuple(expected)}"
            )


def _compile_bundle(
    wiring: Wiring, stages: Mapping[int, PipelineStage], bundle: Bundle, number: int, timeout: float
) -> None:
    own = [stage for stage in (bundle.source, *bundle.consumers) if stage in stages]
    if not own:
        return
    problems: list[Problem] = []
    for each in bundle.deliveries:
        value = wiring.values[bundle.source][each.output]
        problems.append(Problem(value.shape, value.dtype, value.layout, each.layout))
    name = f"pipeline {bundle.source}->{','.join(map(str, bundle.consumers))} forward"
    transfers = _edge_transfers(
        stages[own[0]], problems, bundle.consumers, bundle.deliveries, number, name, timeout
    )
    for consumer in bundle.consumers:
        if bundle.source in stages or consumer in stages:
            wiring.forward.setdefault((bundle.source, consumer), []).append(transfers)


def _returned(
    link: Link, values: Sequence[Sequence[StageValue]], given: Sequence[Delivery], table: StageTable
) -> list[tuple[Delivery, Problem]]:
    """The deliveries whose gradients travel back over a link, and how they travel. Raises LayoutError for a
    value whose gradient has no layout."""
    source, consumer = link
    returned: list[tuple[Delivery, Problem]] = []
    for each in given:
        value = values[source][each.output]
        if value.requires_grad:
            layouts = gradient_layout(each.layout, table.summed[consumer]), gradient_layout(value.layout)
            returned.append((each, Problem(value.shape, value.dtype, *layouts)))
    return returned


def _compile_return(
    wiring: Wiring,
    stages: Mapping[int, PipelineStage],
    link: Link,
    returned: Sequence[tuple[Delivery, Problem]],
    number: int,
    timeout: float,
) -> None:
    source, consumer = link
    stage = stages[source] if source in stages else stages[consumer]
    name = f"pipeline {source}->{consumer} backward"
    deliveries, problems = [each for each, _ in returned], [problem for _, problem in returned]
    wiring.backward[link] = _edge_transfers(stage, problems, (consumer,), deliveries, number, name, timeout)


def _edge_transfers(
    stage: PipelineStage,
    problems: list[Problem],
    consumers: Sequence[int],
    deliveries: Sequence[Delivery],
    number: int,
    op: str,
    timeout: float,
) -> EdgeTransfers:
    if all(_stays(shape, source, target) for shape, _, source, target in problems):
        return EdgeTransfers(None, consumers, deliveries, [], [], stage, number)
    transfer = make_transfer(
        stage.device,
        stage.group,
        problems,
        number,
        op,
        timeout,
        PlanOptions(stage.strategy, stage.topology),
    )
    sources = [(shape, dtype, source) for shape, dtype, source, _ in problems]
    targets = [(shape, dtype, target) for shape, dtype, _, target in problems]
    return EdgeTransfers(
        transfer,
        consumers,
        deliveries,
        _local(sources, stage.rank),
        _local(targets, stage.rank),
        stage,
        number,
    )


def _stays(shape: Sequence[int], source: Layout, target: Layout) -> bool:
    """Returns whether every rank has the same values after a transfer as before it."""
    pending = any(isinstance(placement, Partial) for placement in source.placements)
    return not pending and source.shards(shape) == target.shards(shape)


def _local(values: Sequence[tuple[Sequence[int], torch.dtype, Layout]], rank: int) -> list[LocalShape]:
    return [
        (layout.local_shapes(shape)[rank], dtype) for shape, dtype, layout in values if rank in layout.ranks
    ]


def gradient_layout(layout: Layout, summed: Sequence[int] = ()) -> Layout:
    """In which the gradient of a value in this layout travels. summed: see `gradient_placements`."""
    over = [dim for dim in summed if layout.mesh_shape[dim] > 1]
    placements: tuple[Placement, ...] = gradient_placements(layout.placements, over)
    return Layout(torch.tensor(layout.ranks).reshape(layout.mesh_shape), placements)
