"""The times of a pipeline's transfers by the planner's cost model, for simulation."""

from __future__ import annotations

from meshcast.pipelining.deliveries import bundles, returns
from meshcast.pipelining.lower import Link
from meshcast.pipelining.table import StageTable
from meshcast.pipelining.wiring import Wiring, gradient_layout
from meshcast.planning.plan import plan_many
from meshcast.topology import Topology

__all__ = ["transfer_times"]


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
