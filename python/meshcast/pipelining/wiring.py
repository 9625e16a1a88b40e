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
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ..base.checks import Reader, dtype_name
from ..errors import DeadlineExceededError, LayoutError, MeshcastError
from ..layout import Layout
from ..planning.plan import Problem, plan_many
from ..topology import Topology
from ..transfers.handle import Handle
from ..transfers.transfer import PersistentTransfer, PlanOptions
from .action import Link
from .board import PipelineBoard, Refused
from .edge import (
    Bundle,
    Delivery,
    Edge,
    RankStage,
    bundles,
    check_edges,
    links_of,
    make_transfer,
    returns,
)
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
from .table import SharedGradients, StageTable

__all__ = [
    "Arrival",
    "EdgeTransfers",
    "LocalShape",
    "StageValue",
    "Wiring",
    "check_split",
    "connect",
    "decode_value",
    "encode_value",
    "gradient_layout",
    "transfer_times",
]


class _Value(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def requires_grad(self) -> bool: ...


def check_split(
    stage: RankStage,
    inputs: Mapping[int, _Value],
    outputs: Sequence[_Value],
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
    inputs: Mapping[int, _Value],
    outputs: Sequence[_Value],
) -> None:
    where = f"rank {stage.rank}, stage {stage.stage_index}"
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
    stage: RankStage, dim: int, value: _Value, index: int, outputs: Sequence[LocalValue]
) -> None:
    """Raises LayoutError where, by their sizes, the outputs that the loss is taken of are this rank's part
    of the input."""
    placement = value.layout.placements[dim]
    tokens = 1 if len(value.shape) > 2 else 0  # else dimension 1 is of features
    dims = [placement.dim % len(value.shape)] if isinstance(placement, Shard) else range(tokens + 1)
    # Other dimensions of the mesh may cut the value as well: a data-parallel rank has its samples anyhow.
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
                    f"rank {stage.rank}, stage {stage.stage_index}: over dimension {dim} of the mesh input "
                    f"{index} is {placement}, and the loss is taken of outputs that are this rank's part. "
                    f"If every rank's loss is that of its own part, give loss_dims={both}, and the same "
                    "data_dims= where parameters are whole on these ranks (context parallelism, modules that "
                    f"take their part by themselves); if all have the same loss, loss_dims={stage.loss_dims}"
                )


def _local_shape(stage: RankStage, value: _Value, dim: int, placement: Placement) -> tuple[int, ...]:
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


_RANKS = torch.tensor([0])


def encode_value(local: LocalValue, layout: Layout) -> dict[str, Any]:
    """A local output and the layout it is a shard of."""
    return {
        "shape": list(local.shape),
        "dtype": dtype_name(local.dtype),
        "requires_grad": local.requires_grad,
        "layout": layout.to_wire(),
        "sent": None if local.sent is None else _encode(local.sent),
    }


def decode_value(text: dict[str, Any]) -> tuple[LocalValue, Layout]:
    dtype = getattr(torch, text["dtype"])
    layout = Layout.from_wire(Reader(text["layout"], "layout"))
    sent = None if text["sent"] is None else _decode(text["sent"])
    return LocalValue(tuple(text["shape"]), dtype, text["requires_grad"], None, sent), layout


def _encode(sent: SentDTensor) -> dict[str, Any]:
    # A layout of as many ranks has the placements' wire form.
    placements = Layout(_RANKS.reshape([1] * len(sent.placements)), sent.placements).to_wire()
    return {"placements": placements, "shape": sent.shape, "names": sent.names, "mesh": sent.layout}


def _decode(text: dict[str, Any]) -> SentDTensor:
    placements = Layout.from_wire(Reader(text["placements"], "placements")).placements
    mesh = None if text["mesh"] is None else tuple(text["mesh"])
    return SentDTensor(placements, tuple(text["shape"]), tuple(text["names"]), mesh)


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
        # Whether a receiver may have to pass values on to another.
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
        return [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._buffers]


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
    stages: Mapping[int, RankStage],
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
    # different edges do not wait for each other.
    for handle in [each.warm_up(timeout) for each in wiring.edge_transfers()]:
        if handle is not None:
            handle.wait()
    return wiring


def _agree(
    stages: Mapping[int, RankStage],
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


def _publish_shapes(stage: RankStage, board: PipelineBoard, topic: str, inferred: Inferred) -> None:
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
        local = torch.empty(
            value.layout.local_shapes(value.shape)[stage.rank], dtype=value.dtype, device=stage.device
        )
        if stage.use_dtensor:
            local = stage.wrap(local, stage.input_placements[index], value.shape)
        elif value.sent is not None:
            local = stage.as_before(local, value.sent)
        examples.append(local.requires_grad_(value.requires_grad))
    return examples


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
                f"rank {stage.rank}, stage {stage.stage_index}, input {index}: input_args says "
                f"{example.dtype} {tuple(local.shape)}, "
                f"its producer sends {value.dtype} {tuple(expected)}"
            )


def _compile_bundle(
    wiring: Wiring, stages: Mapping[int, RankStage], bundle: Bundle, number: int, timeout: float
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
    stages: Mapping[int, RankStage],
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
    stage: RankStage,
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


def transfer_times(
    wiring: Wiring, table: StageTable, topology: Topology | None, strategy: str = "auto"
) -> dict[Link, float]:
    """Seconds of one micro-batch over each link, what `simulate` takes as ``transfer``: the longer of values
    and gradients. A value for several stages counts for each of them."""
    rows = {stage: table.row_of(stage) for stage in range(len(table.ranks))}
    found = bundles(wiring.edges, table.input_layout, rows)
    times = dict.fromkeys(wiring.links, 0.0)
    for bundle in found:
        problems = []
        for each in bundle.deliveries:
            value = wiring.values[bundle.source][each.output]
            problems.append((value.shape, value.dtype, value.layout, each.layout))
        seconds = plan_many(problems, topology=topology, strategy=strategy).makespan
        for consumer in bundle.consumers:
            times[bundle.source, consumer] += seconds
    for link in wiring.links:
        problems = []
        for each in returns(found, *link, table.input_layout):
            value = wiring.values[link[0]][each.output]
            if table.trains and value.requires_grad:
                back = gradient_layout(value.layout)
                problems.append((value.shape, value.dtype, gradient_layout(each.layout), back))
        if problems:
            seconds = plan_many(problems, topology=topology, strategy=strategy).makespan
            times[link] = max(times[link], seconds)
    return times
