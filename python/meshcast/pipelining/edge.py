"""Edges: which output of which stage is which input of which later stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshcast.errors import LayoutError
from meshcast.pipelining.lower import Link

__all__ = ["Edge", "check_edges", "links_of"]


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


def links_of(edges: Sequence[Edge]) -> list[Link]:
    """The pairs of stages that edges join, ascending."""
    return sorted({(edge.from_stage, edge.to_stage) for edge in edges})
