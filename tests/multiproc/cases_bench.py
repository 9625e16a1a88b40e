"""Every method of the benchmarks on small layouts, in five ranks: the figures are worth nothing if a peer is
implemented wrongly, so each must fill every element."""

from __future__ import annotations

import meshcast
import torch
import torch.distributed as dist
from meshcast.bench import cases
from meshcast.bench.cases.case import Case
from meshcast.bench.measure import Runner, measure
from meshcast.bench.methods import METHODS, Move
from meshcast.layout import Layout
from torch.distributed.tensor import Replicate, Shard

TOPOLOGY = meshcast.Topology.uniform(2, 1)


def small(name: str, shape: tuple[int, ...], src: Layout, dst: Layout) -> Case:
    return Case(name, "test", shape, src, dst, name, fixed=True)


REPLICAS = Layout([[4, 2], [1, 3]], [Replicate(), Shard(1)])
LAYOUTS = [
    small("replicas on both sides", (7, 10), Layout.parse("2x1:RS0"), Layout.parse("3x1@2:RS1")),
    small("overlapping", (13, 5), Layout([3, 0, 1], [Shard(0)]), Layout([4, 3, 2, 0], [Replicate()])),
    small("two replicas of two shards", (9, 8), Layout.parse("1:RR"), REPLICAS),
    small("empty shards", (3, 4), Layout.parse("5:S0R"), Layout.parse("5:RS0")),
]


def method_case(method: str):
    def case(_) -> None:
        for layout in LAYOUTS:
            found = measure(layout, TOPOLOGY, [method], 2)
            assert found["wrong_elements"] == {method: 0}, (layout.name, found)
            assert len(found["seconds"][method]) == 2
            assert found["lower_bound"] > 0

    case.__name__ = method.replace(" ", "_")
    return case


def a_wrong_element_is_counted(_) -> None:
    def forgets(move: Move) -> None:
        METHODS["send_recv"](move)
        if dist.get_rank() == 2 and move.destination is not None:
            move.destination.view(-1)[3] += 1

    METHODS["forgets"] = forgets
    found = Runner(LAYOUTS[0], TOPOLOGY, 1.0).run(["forgets"], 1)
    assert found["wrong_elements"] == {"forgets": 2}  # one in each round


def cases_are_cut_to_the_links(context) -> None:
    if context.rank:
        return  # the same on every rank
    topology = meshcast.Topology.uniform(4, 0.25)
    for case in cases.CASES:
        scaled = case.scaled(topology, 0.4)
        if case.fixed:
            assert scaled is case
            continue
        bound = meshcast.plan(scaled.shape, torch.int32, case.src, case.dst, topology).lower_bound
        assert 0.35 < bound < 0.45, case.name
    assert cases.find(["1-to-m"])[0].name == "1-to-1x1"


CASES = [*(method_case(method) for method in METHODS), a_wrong_element_is_counted, cases_are_cut_to_the_links]
