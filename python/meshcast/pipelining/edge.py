"""Edges: which output of which stage is which input of which later stage; and what modules here know of a
stage (`RankStage`), which lies above them.

The values that travel together: every output of a stage to all stages that use it, once.

Consumers whose layouts join to one, because each needs the whole value or all cut it the same way over meshes
of one shape, get it by one multicast; the others by a transfer each. Pure functions of what all ranks know,
so that all come to the same edges in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.pipelining import stage as torch_stage
from torch.distributed.tensor.placement_types import Partial, Replicate

from ..base.checks import shown
from ..errors import LayoutError
from ..layout import Layout
from ..topology import Topology
from .action import Link
from .data_parallel import GradientScale
from .parallel import DataUse, Inferred, LocalValue, Placements, SentDTensor, StageMesh, ValuePlacements, Way

__all__ = [
    "Bundle",
    "Delivery",
    "Edge",
    "RankStage",
    "bundles",
    "check_kinds",
    "checked",
    "group_of",
    "reduce_once",
    "traced_edges",
    "check_edges",
    "links_of",
    "returns",
]


@dataclass(frozen=True, order=True, slots=True)
class Edge:
    """Output number ``output`` of ``from_stage`` is positional input number ``input`` of ``to_stage``.

    One output may feed several inputs, also of several stages; an input has exactly one edge. The inputs of
    stage 0 are the arguments of ``step`` and have none.
    """

    from_stage: int
    output: int
    to_stage: int
    input: int

    def __str__(self) -> str:
        return (
            f"output {self.output} of stage {self.from_stage} -> input {self.input} of stage {self.to_stage}"
        )


def check_edges(edges: Iterable[Edge], num_stages: int) -> tuple[Edge, ...]:
    """The edges in one order, the same on every rank. Raises LayoutError naming the edge or stage that is
    wrong."""
    ordered = tuple(sorted(edges))
    fed: dict[tuple[int, int], Edge] = {}
    for edge in ordered:
        for stage in (edge.from_stage, edge.to_stage):
            if not 0 <= stage < num_stages:
                raise LayoutError(f"edge {edge}: stages are 0..{num_stages - 1}")
        if edge.from_stage >= edge.to_stage:
            raise LayoutError(f"edge {edge}: values travel to a later stage; a cycle of stages cannot run")
        if edge.output < 0 or edge.input < 0:
            raise LayoutError(f"edge {edge}: outputs and inputs count from 0")
        other = fed.setdefault((edge.to_stage, edge.input), edge)
        if other != edge:
            raise LayoutError(
                f"input {edge.input} of stage {edge.to_stage} has two edges: {other} and {edge}"
            )
    if len(set(ordered)) != len(ordered):
        raise LayoutError(f"an edge is listed twice in {[str(edge) for edge in ordered]}")
    for stage in range(1, num_stages):
        inputs = sorted(edge.input for edge in ordered if edge.to_stage == stage)
        if inputs != list(range(len(inputs))) or not inputs:
            raise LayoutError(
                f"stage {stage}: edges must feed its inputs 0, 1, ... without a gap, found {inputs or 'none'}"
            )
    for stage in range(num_stages - 1):
        if not any(edge.from_stage == stage for edge in ordered):
            raise LayoutError(f"stage {stage}: no edge leaves it, so nothing it computes is used")
    return ordered


def traced_edges(nodes: list[Any]) -> list[Edge]:
    """Arguments of a stage that are the model's own are given to it by name; the others are its inputs."""
    number = {node: index for index, node in enumerate(nodes)}
    edges = []
    for stage, node in enumerate(nodes):
        inputs = 0
        for argument in node.args:
            output, source = 0, argument
            while source.target is operator.getitem:
                source, output = source.args
            if source in number:
                edges.append(Edge(number[source], output, stage, inputs))
                inputs += 1
    return edges


def links_of(edges: Sequence[Edge]) -> list[Link]:
    """The pairs of stages that edges join, ascending."""
    return sorted({(edge.from_stage, edge.to_stage) for edge in edges})


_MOST_MESH_DIMS = 5  # of a Layout


@dataclass(slots=True)
class Delivery:
    """One output of a stage that goes to inputs of one or several stages.

    inputs: by consumer stage; several of one stage if it uses the value several times.
    """

    output: int
    layout: Layout  # over the ranks of all consumers
    inputs: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bundle:
    """The values of one transfer for each micro-batch: deliveries of one stage to the same consumers."""

    source: int
    consumers: tuple[int, ...]  # ascending
    deliveries: tuple[Delivery, ...]


def bundles(
    edges: Sequence[Edge], layout_of: Callable[[int, int], Layout], rows: Mapping[int, int]
) -> list[Bundle]:
    """Every forward transfer of the pipeline, in one order.

    Args:
        edges: ascending.
        layout_of: of (stage, input).
        rows: of each stage the row of the schedule; stages of one row share their ranks.
    """
    found: list[Bundle] = []
    for source in sorted({edge.from_stage for edge in edges}):
        deliveries: list[Delivery] = []
        for edge in edges:
            if edge.from_stage == source:
                _deliver(deliveries, edge, layout_of, rows)
        together: dict[tuple[int, ...], list[Delivery]] = {}
        for delivery in deliveries:
            together.setdefault(tuple(sorted(delivery.inputs)), []).append(delivery)
        found += [
            Bundle(source, consumers, tuple(members)) for consumers, members in sorted(together.items())
        ]
    return found


def returns(
    found: Sequence[Bundle], source: int, consumer: int, layout_of: Callable[[int, int], Layout]
) -> list[Delivery]:
    """The values whose gradients one consumer gives to one stage: deliveries in the consumer's own layout."""
    return [
        Delivery(
            each.output, layout_of(consumer, each.inputs[consumer][0]), {consumer: each.inputs[consumer]}
        )
        for bundle in found
        if bundle.source == source
        for each in bundle.deliveries
        if consumer in each.inputs
    ]


def _deliver(
    deliveries: list[Delivery],
    edge: Edge,
    layout_of: Callable[[int, int], Layout],
    rows: Mapping[int, int],
) -> None:
    """Lets the edge join a delivery, or makes one for it."""
    source, target = edge.from_stage, edge.to_stage
    layout = layout_of(target, edge.input)
    for delivery in deliveries:
        if delivery.output != edge.output:
            continue
        if target in delivery.inputs:
            if layout_of(target, delivery.inputs[target][0]) == layout:
                delivery.inputs[target].append(edge.input)
                return
            continue
        # Stages on the producer's ranks are handed the value; two of one row would need two copies of it.
        taken = [rows[stage] for stage in (source, *delivery.inputs)]
        if rows[target] in taken or rows[source] in taken[1:]:
            continue
        joined = _join(delivery.layout, layout, len(delivery.inputs))
        if joined is not None:
            delivery.layout = joined
            delivery.inputs[target] = [edge.input]
            return
    deliveries.append(Delivery(edge.output, layout, {target: [edge.input]}))


def _join(together: Layout, layout: Layout, members: int) -> Layout | None:
    """The layout of `members` stages and one more, if there is one."""
    if _is_whole(together) and _is_whole(layout):
        return Layout([*together.ranks, *layout.ranks], [Replicate()])
    # The same mesh shape: a leading dimension over the stages, on which nothing is cut.
    shape, placements = layout.mesh_shape, layout.placements
    own = (shape, placements) if members == 1 else ((members, *shape), (Replicate(), *placements))
    if (together.mesh_shape, together.placements) != own or len(shape) == _MOST_MESH_DIMS:
        return None
    if any(isinstance(placement, Partial) for placement in placements):
        return None
    ranks = torch.tensor([*together.ranks, *layout.ranks]).reshape(members + 1, *shape)
    return Layout(ranks, (Replicate(), *placements))


def _is_whole(layout: Layout) -> bool:
    """Returns whether every rank has the whole value."""
    return all(
        size == 1 or isinstance(placement, Replicate)
        for size, placement in zip(layout.mesh_shape, layout.placements, strict=True)
    ) and not any(isinstance(placement, Partial) for placement in layout.placements)


class RankStage(Protocol):
    """The interface of a `PipelineStage` to the modules that join it with others and run it."""

    stage_index: int
    num_stages: int
    rank: int
    device: torch.device
    group: dist.ProcessGroup | None
    mesh: StageMesh
    submod: torch.nn.Module
    edges: tuple[Edge, ...] | None
    input_placements: ValuePlacements
    input_examples: tuple[torch.Tensor, ...] | None
    data_dims: list[int]
    loss_dims: list[int]
    summed_dims: list[int]
    data_dims_given: bool
    loss_dims_given: bool
    use_dtensor: bool
    strategy: str
    topology: Topology | None
    scale: GradientScale
    ways: Sequence[Way]
    sharing: Mapping[str, Sequence[int]] | None
    reduced_elsewhere: set[int]
    fwd_cache: dict[int, Any]
    bwd_cache: dict[int, Any]
    output_chunks: list[Any]

    @property
    def is_first(self) -> bool: ...
    @property
    def is_last(self) -> bool: ...
    @property
    def alone(self) -> bool: ...
    @property
    def accumulates(self) -> bool: ...
    @property
    def reduces(self) -> bool: ...
    @property
    def joins_pipelines(self) -> bool: ...
    @property
    def batch_parts(self) -> int: ...
    @property
    def batch_part(self) -> int: ...
    @property
    def shared(self) -> Mapping[str, torch.nn.Parameter]: ...

    def learn_wrappers(self) -> None: ...
    def infer(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        with_grad: bool,
        empty: bool,
        data: DataUse,
        again: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    ) -> Inferred: ...
    def output_layout(self, index: int, local: LocalValue) -> Placements: ...
    def wrap(self, local: torch.Tensor, placements: Placements, shape: Sequence[int]) -> torch.Tensor: ...
    def as_before(self, local: torch.Tensor, sent: SentDTensor) -> torch.Tensor: ...
    def check_arguments(self, count: int | None, names: Collection[str]) -> None: ...
    def over_columns(self, *values: float) -> torch.Tensor: ...
    def own_parameters(self) -> list[torch.nn.Parameter]: ...
    def free_parameters(self) -> None: ...
    def drop_stand_ins(self) -> None: ...
    def reduce_gradients(self) -> None: ...
    def scale_grads(self, grad_scale_factor: Any) -> None: ...
    def tell_added(self, factor: float) -> None: ...
    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any: ...
    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True) -> None: ...
    def backward_weight_one_chunk(self, bwd_chunk_id: int) -> None: ...
    def receive(self, microbatch: int, inputs: list[Any]) -> None: ...
    def has_inputs(self, microbatch: int) -> bool: ...
    def receive_gradients(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None: ...
    def has_gradients(self, microbatch: int) -> bool: ...
    def clear_runtime_states(self) -> None: ...


S = TypeVar("S", bound=RankStage)


def group_of(stages: object) -> Any:
    """The process group of the pipeline that a stage, or several, are of, whatever was given for them."""
    first = stages[0] if isinstance(stages, Sequence) and stages else stages
    return getattr(first, "group", None)


def check_kinds(stages: object) -> None:
    """Raises LayoutError for what are no stages, or torch's own. Other subclasses of torch's base may be
    looked at, but not run."""
    if not isinstance(stages, Sequence) or not stages:
        raise LayoutError(f"a schedule needs at least one stage on this rank, found {shown(stages)}")
    for stage in stages:
        if type(stage) in (torch_stage.PipelineStage, torch_stage._PipelineStage) or not isinstance(
            stage, torch_stage._PipelineStageBase
        ):
            raise LayoutError(
                f"stage must be a meshcast.pipelining.PipelineStage, found {type(stage).__name__} of "
                f"{type(stage).__module__}: import it, pipeline and build_stage from meshcast.pipelining"
            )


def checked(stages: Sequence[S], microbatches: int) -> dict[int, S]:
    """The stages by number, ascending. Raises LayoutError unless they can be one rank's."""
    if isinstance(microbatches, bool) or not isinstance(microbatches, int):
        raise LayoutError(f"n_microbatches must be an integer, found {shown(microbatches)}")
    if microbatches < 1:
        raise LayoutError(f"n_microbatches must be at least 1, found {microbatches}")
    first = stages[0]
    for stage in stages[1:]:
        for what, mine, theirs in (
            ("num_stages", first.num_stages, stage.num_stages),
            ("edges", first.edges, stage.edges),
            ("group", first.group, stage.group),
            ("mesh", sorted(first.mesh.ranks), sorted(stage.mesh.ranks)),
            ("device", first.device, stage.device),
        ):
            if mine != theirs:
                raise LayoutError(
                    f"stages {first.stage_index} and {stage.stage_index} of rank {first.rank} have different "
                    f"{what}: {mine} and {theirs}"
                )
    for stage in stages:
        stage.learn_wrappers()
    by_index = {stage.stage_index: stage for stage in stages}
    if len(by_index) != len(stages):
        raise LayoutError(f"rank {first.rank} makes a stage twice: {[s.stage_index for s in stages]}")
    return dict(sorted(by_index.items()))


def reduce_once(stages: Iterable[RankStage]) -> None:
    """A parameter that several stages of this rank hold is left to the first. Raises LayoutError where they
    would reduce its gradient over different ranks."""
    owners: dict[int, RankStage] = {}
    for stage in stages:
        stage.reduced_elsewhere.clear()
        for name, parameter in stage.submod.named_parameters():
            first = owners.setdefault(id(parameter), stage)
            if first is stage:
                continue
            mine, other = (each.mesh.along(each.data_dims) for each in (stage, first))
            if sorted(mine) != sorted(other):
                raise LayoutError(
                    f"stages {first.stage_index} and {stage.stage_index} of rank {stage.rank} hold one "
                    f"parameter, {name!r} of the latter, but split their samples over different ranks, "
                    f"{other} and {mine}: give them the same mesh= and data_dims=, or copies and "
                    "shared_parameters="
                )
            stage.reduced_elsewhere.add(id(parameter))
