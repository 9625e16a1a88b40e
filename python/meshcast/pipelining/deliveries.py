"""The values that travel together: every output of a stage to all stages that use it, once.

Consumers whose layouts join to one, because each needs the whole value or all cut it alike over meshes of one
shape, get it by one multicast; the others by a transfer each. Pure functions of what all ranks know, so that
all come to the same edges in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor.placement_types import Partial, Replicate

from meshcast.layout import Layout
from meshcast.pipelining.edge import Edge

__all__ = ["Delivery", "Bundle", "returns", "bundles"]

_MOST_MESH_DIMS = 5  # of a Layout


@dataclass(slots=True)
class Delivery:
    """One output of a stage on its way to inputs of one or several stages.

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
    # Alike: a leading dimension over the stages, on which nothing is cut.
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
