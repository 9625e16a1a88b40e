"""Wiring: the ranks agree on stages, edges and shapes, then compile each link into its forward and its
backward transfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement

from meshcast.errors import LayoutError
from meshcast.handle import Handle
from meshcast.layout import Layout
from meshcast.pipelining.edge import Edge, check_edges, links_of
from meshcast.pipelining.exchange import Exchange
from meshcast.pipelining.layouts import gradient_placements
from meshcast.pipelining.lower import Link
from meshcast.pipelining.shapes import LocalValue, global_shape
from meshcast.pipelining.stage import PipelineStage
from meshcast.pipelining.wire import decode_layout, decode_value, encode_layout, encode_value
from meshcast.transfer import Transfer

__all__ = ["Lane", "StageTable", "Value", "Wiring", "agree_on_stages", "connect", "describe_stage"]

_FIRST_LANE = 2  # below are the lanes of ordinary calls and their backward


@dataclass(frozen=True, slots=True)
class Value:
    """One value that leaves a stage in each micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    layout: Layout


@dataclass(frozen=True, slots=True)
class StageTable:
    """What every rank knows of all stages after they agreed."""

    ranks: list[list[int]]  # of each stage, in mesh order
    inputs: list[list[Layout]]  # layout templates of the inputs of each stage: one for all, or one each
    edges: tuple[Edge, ...] | None
    trains: bool

    def input_layout(self, stage: int, index: int) -> Layout:
        listed = self.inputs[stage]
        if len(listed) > 1 and index >= len(listed):
            raise LayoutError(
                f"stage {stage}: input_placements lists {len(listed)} inputs, but an edge feeds input {index}"
            )
        return listed[0] if len(listed) == 1 else listed[index]


class Lane:
    """One direction of a link: all its values of a micro-batch travel in one transfer."""

    def __init__(
        self,
        transfer: Transfer,
        edges: Sequence[Edge],
        buffers: Sequence[tuple[tuple[int, ...], torch.dtype]],
        device: Any,
    ) -> None:
        self.transfer = transfer
        self.edges = edges
        self._buffers = buffers  # local shape and dtype of what this rank receives; empty on the sending side
        self._device = device

    def send(self, tensors: Sequence[torch.Tensor], timeout: float) -> Handle[Any]:
        return self.transfer.start(tensors, [None] * len(tensors), timeout=timeout)

    def receive(self, timeout: float) -> tuple[Handle[Any], list[torch.Tensor]]:
        buffers = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._buffers]
        return self.transfer.start([None] * len(buffers), buffers, timeout=timeout), buffers


@dataclass(slots=True)
class Wiring:
    """The lanes this rank takes part in, and what it must know of the values."""

    links: list[Link]
    values: list[list[Value]]  # outputs of every stage but the last
    inputs: dict[int, Value]  # of this rank's stage, in the layout they arrive in
    forward: dict[Link, Lane]
    backward: dict[Link, Lane]  # only links with a value that needs a gradient

    def transfers(self) -> list[Transfer]:
        return [lane.transfer for lanes in (self.forward, self.backward) for lane in lanes.values()]


def describe_stage(stage: PipelineStage, schedule: str, microbatches: int, trains: bool) -> dict[str, Any]:
    """What a rank publishes about itself. Everything but `trains` must be the same on all ranks of a
    stage."""
    return {
        "stage": stage.stage_index,
        "stages": stage.num_stages,
        "ranks": stage.mesh.ranks,
        "inputs": [
            encode_layout(stage.mesh.layout(placements)) for placements in stage.input_placements.listed()
        ],
        "edges": None
        if stage.edges is None
        else [[e.from_stage, e.output, e.to_stage, e.input] for e in stage.edges],
        "schedule": schedule,
        "microbatches": microbatches,
        "trains": trains,
    }


def agree_on_stages(exchange: Exchange) -> StageTable:
    """Reads what all ranks published. Raises LayoutError, the same on every rank, where they contradict each
    other."""
    described = exchange.collect("stage")
    first_rank = exchange.ranks[0]
    first = described[first_rank]
    for rank, found in described.items():
        for field in ("stages", "edges", "schedule", "microbatches"):
            if found[field] != first[field]:
                raise LayoutError(
                    f"the ranks of a pipeline disagree on {field}: rank {first_rank} has "
                    f"{first[field]}, rank {rank} has {found[field]}"
                )
    ranks: list[list[int]] = []
    inputs: list[list[Layout]] = []
    trains = False
    for stage in range(first["stages"]):
        members = [rank for rank, found in described.items() if found["stage"] == stage]
        if not members:
            raise LayoutError(
                f"stage {stage} is on no rank; ranks {exchange.ranks} hold stages "
                f"{[f['stage'] for f in described.values()]}"
            )
        chosen = described[members[0]]
        if sorted(chosen["ranks"]) != sorted(members):
            raise LayoutError(
                f"stage {stage} is on a mesh of ranks {chosen['ranks']}, but ranks {members} made this stage"
            )
        for rank in members:
            for field in ("ranks", "inputs"):
                if described[rank][field] != chosen[field]:
                    raise LayoutError(
                        f"the ranks of stage {stage} disagree on {field}: rank {members[0]} has "
                        f"{chosen[field]}, "
                        f"rank {rank} has {described[rank][field]}"
                    )
        ranks.append(chosen["ranks"])
        inputs.append([decode_layout(each) for each in chosen["inputs"]])
        trains = any(
            described[rank]["trains"] for rank in members
        )  # ends as that of the last stage, which has the loss
    edges = None if first["edges"] is None else tuple(Edge(*each) for each in first["edges"])
    return StageTable(ranks, inputs, edges, trains)


def connect(
    stage: PipelineStage,
    table: StageTable,
    exchange: Exchange,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    timeout: float,
) -> Wiring:
    """Finds the shapes of all values, stage after stage, and compiles the lanes of this rank.

    Args:
        args: this rank's local arguments of one micro-batch, first stage only.
        kwargs: local keyword arguments of one micro-batch.
    """
    values: list[list[Value]] = []
    for index in range(stage.num_stages):
        if index == stage.stage_index:
            inputs = _inputs(stage, table, table.edges, values)
            _publish_shapes(stage, exchange, _examples(stage, inputs) if index else list(args), kwargs, table)
        # The last stage only tells whether it came this far: nobody must wait for it in vain.
        values.append(_values(index, exchange.collect(f"shapes/{index}", table.ranks[index]), table))
    del values[-1]
    edges = table.edges
    edges = check_edges(_default_edges(values), stage.num_stages) if edges is None else edges
    for edge in edges:
        _value_of(edge, values)
    inputs = _inputs(stage, table, edges, values)
    _check_examples(stage, inputs)
    # A rank whose own checks failed stays away from the transfers, which the others would wait for.
    exchange.publish("checked", {})
    exchange.collect("checked")
    links = links_of(edges)
    wiring = Wiring(links, values, inputs, {}, {})
    for number, link in enumerate(links):
        if stage.stage_index in link:
            _compile_link(wiring, stage, table, edges, number, link, timeout)
    return wiring


def _publish_shapes(
    stage: PipelineStage,
    exchange: Exchange,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    table: StageTable,
) -> None:
    outputs = [] if stage.is_last else stage.infer(args, kwargs, table.trains)
    encoded = [
        encode_value(local, stage.mesh.layout(stage.output_layout(index, local)))
        for index, local in enumerate(outputs)
    ]
    exchange.publish(f"shapes/{stage.stage_index}", {"outputs": encoded})


def _values(index: int, found: Mapping[int, Mapping[str, Any]], table: StageTable) -> list[Value]:
    """Outputs of a stage from what its ranks published."""
    locals_of: dict[int, list[tuple[LocalValue, Layout]]] = {
        rank: [decode_value(each) for each in published["outputs"]] for rank, published in found.items()
    }
    first_rank = table.ranks[index][0]
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
        shape = global_shape(
            layout, {rank: outputs[output][0].shape for rank, outputs in locals_of.items()}, what
        )
        values.append(
            Value(
                shape,
                local.dtype,
                any(outputs[output][0].requires_grad for outputs in locals_of.values()),
                layout,
            )
        )
    return values


def _default_edges(values: Sequence[Sequence[Value]]) -> list[Edge]:
    return [
        Edge(index, output, index + 1, output)
        for index, outputs in enumerate(values)
        for output in range(len(outputs))
    ]


def _value_of(edge: Edge, values: Sequence[Sequence[Value]]) -> Value:
    outputs = values[edge.from_stage]
    if edge.output >= len(outputs):
        raise LayoutError(f"edge {edge}: stage {edge.from_stage} has {len(outputs)} outputs")
    return outputs[edge.output]


def _inputs(
    stage: PipelineStage, table: StageTable, edges: Sequence[Edge] | None, values: Sequence[Sequence[Value]]
) -> dict[int, Value]:
    """Inputs of this rank's stage, all producers being known."""
    index = stage.stage_index
    if index == 0:
        return {}
    own = _default_edges(values[:index])[-len(values[index - 1]) :] if edges is None else edges
    inputs = {}
    for edge in own:
        if edge.to_stage == index:
            value = _value_of(edge, values)
            inputs[edge.input] = Value(
                value.shape, value.dtype, value.requires_grad, table.input_layout(index, edge.input)
            )
    return dict(sorted(inputs.items()))


def _examples(stage: PipelineStage, inputs: Mapping[int, Value]) -> list[torch.Tensor]:
    """Stand-ins of this rank's inputs, for shape inference only."""
    examples = []
    for index, value in inputs.items():
        local = torch.empty(
            value.layout.local_shapes(value.shape)[stage.rank], dtype=value.dtype, device=stage.device
        )
        if stage.use_dtensor:
            local = stage.wrap(local, stage.input_placements[index], value.shape)
        examples.append(local.requires_grad_(value.requires_grad))
    return examples


def _check_examples(stage: PipelineStage, inputs: Mapping[int, Value]) -> None:
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
        if tuple(local.shape) != tuple(expected) or example.dtype != value.dtype:
            raise LayoutError(
                f"rank {stage.rank}, stage {stage.stage_index}, input {index}: input_args says "
                f"{example.dtype} {tuple(local.shape)}, "
                f"its producer sends {value.dtype} {tuple(expected)}"
            )


def _compile_link(
    wiring: Wiring,
    stage: PipelineStage,
    table: StageTable,
    edges: Sequence[Edge],
    number: int,
    link: Link,
    timeout: float,
) -> None:
    source, target = link
    own = [edge for edge in edges if (edge.from_stage, edge.to_stage) == link]
    # A lane of its own for each direction: a receive posted ahead never delays another link, nor the other
    # direction.
    lane = _FIRST_LANE + 2 * number
    problems = []
    for edge in own:
        value = _value_of(edge, wiring.values)
        problems.append((value.shape, value.dtype, value.layout, table.input_layout(target, edge.input)))
    name = f"pipeline {source}->{target}"
    transfer = Transfer(problems, group=stage.group, lane=lane, op=f"{name} forward", timeout=timeout)
    wiring.forward[link] = Lane(transfer, own, _local(problems, stage.rank), stage.device)

    trained = [edge for edge in own if table.trains and _value_of(edge, wiring.values).requires_grad]
    if not trained:
        return
    back = []
    for edge in trained:
        value = _value_of(edge, wiring.values)
        back.append(
            (
                value.shape,
                value.dtype,
                _gradient(table.input_layout(target, edge.input)),
                _gradient(value.layout),
            )
        )
    transfer = Transfer(back, group=stage.group, lane=lane + 1, op=f"{name} backward", timeout=timeout)
    wiring.backward[link] = Lane(transfer, trained, _local(back, stage.rank), stage.device)


def _local(
    problems: Sequence[tuple[Any, torch.dtype, Layout, Layout]], rank: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [
        (target.local_shapes(shape)[rank], dtype)
        for shape, dtype, _, target in problems
        if rank in target.ranks
    ]


def _gradient(layout: Layout) -> Layout:
    placements: tuple[Placement, ...] = gradient_placements(layout.placements)
    return Layout(torch.tensor(layout.ranks).reshape(layout.mesh_shape), placements)
