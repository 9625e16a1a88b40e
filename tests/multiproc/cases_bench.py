"""Every method of the benchmarks on small layouts, in five ranks: the figures are worth nothing if a peer is
implemented wrongly, so each must fill every element."""

from __future__ import annotations

import gc
import threading
import time

import meshcast
import torch
import torch.distributed as dist
from meshcast.bench import cases
from meshcast.bench.cases import Case, Tensor
from meshcast.bench.measure import Runner, choose, measure
from meshcast.bench.methods import BALANCES, METHODS, CaseBatch, Groups, Method
from meshcast.layout import Layout
from multiproc.threads import thread_names
from torch.distributed.tensor import Partial, Replicate, Shard

GROUP_TIMEOUT = 100.0
TOPOLOGY = meshcast.Topology.uniform(2, 1)


def small(name: str, shape: tuple[int, ...], src: Layout, dst: Layout, more: tuple[Tensor, ...] = ()) -> Case:
    return Case(name, "test", shape, src, dst, name, fixed=True, more=more)


R, S0, S1, SUM = Replicate(), Shard(0), Shard(1), Partial("sum")
REPLICAS = Layout([[4, 2], [1, 3]], [R, S1])
TWO, OTHER_TWO = Layout([1, 3], [S0]), Layout([0, 4], [S1])
LAYOUTS = [
    small("replicas on both sides", (7, 10), Layout.parse("2x1:RS0"), Layout.parse("3x1@2:RS1")),
    small("overlapping", (13, 5), Layout([3, 0, 1], [S0]), Layout([4, 3, 2, 0], [R])),
    small("two replicas of two shards", (9, 8), Layout.parse("1:RR"), REPLICAS),
    small("empty shards", (3, 4), Layout.parse("5:S0R"), Layout.parse("5:RS0")),
    small("meshes of one shape", (5, 7), TWO, OTHER_TWO),
    small("replicas on both sides of one shape", (6, 5), Layout([[1, 3]], [R, S0]), Layout([[0, 4]], [R, R])),
    small("to other ranks in another order", (6, 5), Layout([3, 1], [S0]), Layout([4, 0], [S0])),
    small("several tensors", (5, 7), TWO, OTHER_TWO,
          (Tensor((11,), Layout([2, 3], [R]), Layout([0, 4], [S0])), Tensor((4, 6), OTHER_TWO, TWO))),
    small("to be added up", (7, 6), Layout([[3, 1], [2, 0]], [SUM, S0]), Layout([[4, 2], [1, 3]], [S1, R])),
    small("to be added up, to other ranks", (7, 6), Layout([2, 0, 3], [SUM]), Layout([1, 4], [R])),
    small("one to all", (17,), Layout([2], [R]), Layout([0, 1, 2, 3, 4], [R])),
]  # fmt: skip


def layout_case(layout: Case):
    """All methods on one layout; returns those that could do it."""

    def case(_) -> list[str]:
        found = measure(layout, TOPOLOGY, list(METHODS), 1)
        able, unable = choose(layout, list(METHODS))
        assert found["lower_bound"] > 0
        assert found["not_run"] == unable
        assert all(unable.values())
        assert found["wrong_bytes"] == dict.fromkeys(able, 0), found["wrong_bytes"]
        assert all(len(found["seconds"][method]) == 1 for method in able)
        return able

    case.__name__ = layout.name.replace(" ", "_").replace(",", "")
    return case


def a_wrong_element_is_counted(_) -> None:
    def forgets(batch: CaseBatch) -> None:
        METHODS["send_recv"].run(batch)
        (move,) = batch.moves
        if dist.get_rank() == 2 and move.destination is not None:
            move.destination.view(-1)[3] += 1

    METHODS["forgets"] = Method("forgets", forgets, "one element wrong")
    try:
        runner = Runner(LAYOUTS[0], TOPOLOGY, 1e6, ["forgets"])
        found = runner.run(["forgets"], 1)
        runner.close()
    finally:
        del METHODS["forgets"]
    assert found["wrong_bytes"] == {"forgets": 8}  # four in each round


def a_slow_method_counts_once(_) -> None:
    runner = Runner(LAYOUTS[0], TOPOLOGY, 1e-9, ["send_recv"])

    def slowly(batch: CaseBatch) -> None:
        METHODS["send_recv"].run(batch)
        dist.barrier(batch.group)
        threading.Event().wait(0.3)

    METHODS["slow"] = Method("slow", slowly, "takes its time", prepares=False)
    METHODS["prepares"] = Method("prepares", slowly, "takes its time")
    started: list[str] = []
    auto = METHODS["auto"]
    try:
        found = runner.run(["slow", "prepares"], 5, started.append)
        METHODS["auto"] = METHODS["slow"]
        compared = runner.run(["auto"], 2)
    finally:
        del METHODS["slow"], METHODS["prepares"]
        METHODS["auto"] = auto
    runner.close()
    assert len(compared["seconds"]["auto"]) == 2, "the others are compared with it"
    assert started == ["slow", "prepares", "prepares"]
    assert {method: len(seconds) for method, seconds in found["seconds"].items()} == {
        "slow": 1,
        "prepares": 1,
    }
    assert min(*found["seconds"]["slow"], *found["seconds"]["prepares"]) >= 0.3


def balances_reach_the_planner(_) -> None:
    methods = [f"broadcast-{balance}" for balance in BALANCES]
    runner = Runner(LAYOUTS[0], TOPOLOGY, 1e6, methods)
    runner.run(methods, 1)
    if runner._batch is not None:
        plans = [runner._batch.kept[method].plan for method in methods]
        assert [plan.options.balance for plan in plans] == list(BALANCES)
        assert {plan.strategy for plan in plans} == {"broadcast"}
        plans.clear()
    runner.close()


def a_mesh_of_all_ranks_leaves_the_job_its_group(_) -> None:
    groups = Groups()
    groups.mesh([0, 1, 2, 3, 4])
    groups.new([1, 3])
    groups.close()
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == 5


def cases_are_cut_to_the_links(context) -> None:
    if context.rank:
        return  # the same on every rank
    for case in cases.CASES:
        topology = meshcast.Topology.uniform(
            case.setting.ranks_per_host, 0.25 / case.setting.nics, case.setting.nics
        )
        scaled = case.scaled(topology, 0.3)
        if case.fixed:
            assert scaled is case
            continue
        assert 0.25 < scaled.plan(topology).lower_bound < 0.35, case.name
    assert cases.find(["1-to-m"])[0].name == "1-to-1x1"


def no_group_outlives_its_case(_) -> None:
    """Its threads would take the cores from the cases that follow."""
    gc.collect()
    end = time.monotonic() + 20.0
    while (names := thread_names()).count("gloo_tcp_loop") > 1:
        assert time.monotonic() < end, f"the job's own group has one: {names}"
        time.sleep(0.01)


LAYOUT_CASES = [layout_case(layout) for layout in LAYOUTS]
CASES = [
    *LAYOUT_CASES,
    no_group_outlives_its_case,
    a_wrong_element_is_counted,
    a_slow_method_counts_once,
    balances_reach_the_planner,
    a_mesh_of_all_ranks_leaves_the_job_its_group,
    cases_are_cut_to_the_links,
]
