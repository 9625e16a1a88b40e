"""The face of a plan: parameters, figures, cache, JSON, text."""

import functools
import heapq
import json
import pickle
import random
import threading
import time

import meshcast
import planning_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshcast import Layout, LayoutError, Plan, Topology
from meshcast.topology import Host, Nic
from torch.distributed.tensor import Shard

HOSTS = Topology.uniform(4, 10)
SRC, DST = Layout.parse("2x4:S0RR"), Layout.parse("2x4@8:S0RR")
SHAPE = (1024, 1024, 512)


def paper_case_1(**options: object) -> Plan:
    """First n-to-m case of the paper (section 5.1.2): 2 GiB from two hosts to two others, half each."""
    return meshcast.plan(SHAPE, torch.int32, SRC, DST, HOSTS, **options)  # type: ignore[arg-type]


def test_figures_of_the_first_case_of_the_paper() -> None:
    plan = paper_case_1()
    half = 1 << 30
    assert [(task.holders, task.receivers, task.nbytes) for task in plan.tasks] == [
        ((0, 1, 2, 3), (8, 9, 10, 11), half),
        ((4, 5, 6, 7), (12, 13, 14, 15), half),
    ]
    assert plan.lower_bound == pytest.approx(half / 1.25e9, rel=1e-3)
    assert 1 <= plan.ratio < 1.05
    assert plan.nic_bytes(0) == plan.nic_bytes(1) == (half, 0)
    assert plan.nic_bytes(2) == plan.nic_bytes(3) == (0, half)
    assert sum(plan.bytes_sent(rank) for rank in plan.ranks) == 8 * half
    assert all(plan.bytes_received(rank) == half for rank in range(8, 16))
    assert plan.bytes_sent(99) == plan.bytes_received(99) == 0
    assert plan.ranks == tuple(range(16))
    assert not plan.local_copies


def begins(hosts: int, hold: float, latency: float) -> float:
    """When the last of the hosts begins to take in, where all of one NIC send to those that have nothing."""
    free = [0.0]  # when each port is
    for _ in range(hosts):
        now = heapq.heappop(free)
        for after in (hold, hold + latency):
            heapq.heappush(free, now + after)
    return now


@pytest.mark.parametrize("hosts", [1, 2, 7, 8, 100, 511])
@pytest.mark.parametrize("latency", [0, 20, 500])  # microseconds
def test_filling_bound_is_that_of_the_postal_model(hosts: int, latency: int) -> None:
    one, others = Layout.parse("1:R"), Layout.parse(f"{hosts}@1:R")
    topology = Topology.uniform(1, 10, latency_us=latency)
    plan = meshcast.plan((1 << 22,), torch.int32, one, others, topology, "multicast", chunk_bytes=1 << 20)
    assert plan.lower_bound <= plan.filling_bound <= plan.makespan
    hold = (1 << 20) / 1.25e9
    expected = begins(hosts, hold, latency / 1e6) + 16 * hold + latency / 1e6
    assert plan.filling_bound == pytest.approx(expected, rel=1e-6)
    assert ("that no plan beats" in plan.describe()) == (hosts > 1)


def test_strategies_keep_their_name_and_order() -> None:
    send_recv = paper_case_1(strategy="send_recv")
    broadcast = paper_case_1(strategy="broadcast", balance="none")
    assert (send_recv.strategy, broadcast.strategy) == ("send_recv", "broadcast")
    assert paper_case_1().strategy != "auto"
    # Every receiver gets a copy of its own over the network: four times the bytes (paper, section 3.1).
    assert send_recv.ratio == pytest.approx(4, rel=0.02)
    assert send_recv.nic_bytes(0)[0] == 4 * broadcast.nic_bytes(0)[0]


def test_chunk_bytes_is_an_upper_limit() -> None:
    for chunk_bytes in (1 << 20, 1 << 24):
        plan = paper_case_1(strategy="broadcast", chunk_bytes=chunk_bytes)
        sizes = {transfer.nbytes for transfer in plan.transfers}
        assert max(sizes) <= chunk_bytes
        assert max(sizes) > chunk_bytes // 4


def test_seeds_and_processes_agree() -> None:
    plan = paper_case_1()
    again = Plan(plan.problems, plan.topology, plan.options)
    assert again.hash == plan.hash
    assert len(plan.hash) == 32
    assert int(plan.hash, 16) >= 0
    assert again == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert meshcast.plan(SHAPE, "float32", SRC, DST, HOSTS) != plan
    assert meshcast.plan((1024, 1024, 510), "int32", SRC, DST, HOSTS).hash != plan.hash


def test_transfers_are_a_lazy_sequence() -> None:
    plan = paper_case_1(chunk_bytes=1 << 18)
    transfers = plan.transfers
    assert len(transfers) > 10_000
    assert transfers[-1] == transfers[len(transfers) - 1] == transfers[len(transfers) - 3 :][2]
    assert [t.id for t in transfers[5:20:5]] == [5, 10, 15]
    assert transfers[3] in transfers[:10]
    with pytest.raises(IndexError):
        transfers[len(transfers)]
    start = time.perf_counter()
    for _ in range(1000):
        transfers[-1]
    assert (time.perf_counter() - start) / 1000 < 1e-3  # an access does not walk the plan
    assert repr(transfers).endswith(f"{len(transfers)} items]")


def test_coalesced_messages_unfold_into_boxes() -> None:
    """Many small tensors between the same ranks share messages; every box is still a transfer of its own."""
    pair = Layout([0], [Shard(0)]), Layout([1, 2], [Shard(0)])
    plan = meshcast.plan_many([((n,), "float32", *pair) for n in range(1, 60)], Topology.uniform(1, 10))
    for position, transfer in enumerate(plan.transfers):
        assert transfer.id == position
        ((lo, hi),) = transfer.box
        assert transfer.nbytes == 4 * (hi - lo)
        assert plan.tasks[transfer.task].tensor == transfer.tensor
    assert {t.tensor for t in plan.transfers} == set(range(59))


def test_plan_many_of_one_is_plan() -> None:
    assert meshcast.plan_many([(SHAPE, "int32", SRC, DST)], HOSTS) is paper_case_1()


def test_no_topology_means_eight_ranks_per_host() -> None:
    plan = meshcast.plan((8, 8, 8), "int8", SRC, DST)
    assert plan is meshcast.plan((8, 8, 8), "int8", SRC, DST, Topology.uniform(8, 10))


def test_cache_counts_hits() -> None:
    meshcast.plan_cache_clear()
    assert meshcast.plan_cache_info()[:2] == (0, 0)
    first = paper_case_1()
    assert paper_case_1() is first
    assert paper_case_1(seed=1) is not first
    info = meshcast.plan_cache_info()
    assert (info.hits, info.misses, info.currsize) == (1, 2, 2)
    assert info.hops == 2 * len(first)
    meshcast.plan_cache_clear()
    assert meshcast.plan_cache_info().currsize == 0


def test_cache_forgets_the_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshcast.planning.plan.MAX_PLANS", 3)
    meshcast.plan_cache_clear()
    made = {n: meshcast.plan((n,), "int8", Layout.parse("2:S0"), Layout.parse("2@2:R")) for n in (1, 2, 3)}
    assert meshcast.plan((1,), "int8", Layout.parse("2:S0"), Layout.parse("2@2:R")) is made[1]
    meshcast.plan((4,), "int8", Layout.parse("2:S0"), Layout.parse("2@2:R"))  # drops 2, used least recently
    assert meshcast.plan((1,), "int8", Layout.parse("2:S0"), Layout.parse("2@2:R")) is made[1]
    assert meshcast.plan((3,), "int8", Layout.parse("2:S0"), Layout.parse("2@2:R")) is made[3]
    assert meshcast.plan((2,), "int8", Layout.parse("2:S0"), Layout.parse("2@2:R")) is not made[2]
    monkeypatch.setattr("meshcast.planning.plan.MAX_HOPS", 0)
    meshcast.plan((5,), "int8", Layout.parse("2:S0"), Layout.parse("2@2:R"))
    assert meshcast.plan_cache_info().currsize == 1


def test_threads_share_the_cache() -> None:
    meshcast.plan_cache_clear()
    found: list[Plan] = []
    threads = [threading.Thread(target=lambda: found.append(paper_case_1())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(plan is found[0] for plan in found)


def test_description_says_the_essentials() -> None:
    plan = paper_case_1()
    text = plan.describe()
    for part in (
        plan.strategy,
        plan.hash,
        "lower bound",
        "1024x1024x512 int32",
        "0-3 -> 8-11",
        "1 GiB",
        "99.",
    ):
        assert part in text
    assert all(len(line) < 140 for line in text.splitlines())
    nothing = meshcast.plan((0,), "int8", Layout.parse("2:S0"), Layout.parse("2:R"))
    assert "1 x the lower bound" in nothing.describe()


def test_json_round_trip() -> None:
    for seed in range(25):
        rng = random.Random(seed)
        problems = []
        for _ in range(rng.randint(1, 3)):
            shape = planning_cases.tensor_shape(rng)
            problems.append(
                (shape, rng.choice(planning_cases.DTYPES), *planning_cases.layout_pair(rng, len(shape)))
            )
        plan = meshcast.plan_many(problems, planning_cases.topology(rng), chunk_bytes=rng.choice((None, 16)))
        again = Plan.from_json(plan.to_json())
        assert again == plan, f"seed {seed}"
        assert list(again.transfers) == list(plan.transfers)
        assert (again.makespan, again.lower_bound, again.options) == (
            plan.makespan,
            plan.lower_bound,
            plan.options,
        )


def _small() -> Plan:
    hosts = [Host((0, 1), (Nic(10**9, 10**9),), 10**10), Host((2, 3), (Nic(10**9, 10**9),), 10**10)]
    return meshcast.plan((8,), "float32", Layout.parse("2:S0"), Layout.parse("2@2:R"), Topology(hosts))


def _paths(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    here = [path] if path else []
    if isinstance(value, dict):
        return here + [found for key, item in value.items() for found in _paths(item, (*path, key))]
    if isinstance(value, list):
        return here + [found for index, item in enumerate(value) for found in _paths(item, (*path, index))]
    return here


def _set(root: object, path: tuple[object, ...], value: object) -> None:
    for key in path[:-1]:
        root = root[key]  # type: ignore[index]
    root[path[-1]] = value  # type: ignore[index]


@functools.cache
def _small_paths() -> list[tuple[object, ...]]:
    return _paths(json.loads(_small().to_json()))


VALUES = [None, True, -1, 0, 1, 7, 1 << 62, 1 << 80, 0.5, "", "x", [], [1], {}, [[[]]]]


@given(st.integers(0, 10_000), st.sampled_from(VALUES))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_an_altered_file_is_refused_or_another_plan(pick: int, value: object) -> None:
    path = _small_paths()[pick % len(_small_paths())]
    parsed = json.loads(_small().to_json())
    _set(parsed, path, value)
    try:
        plan = Plan.from_json(json.dumps(parsed))
    except LayoutError:
        return
    # What was accepted is what its own input gives: the change was none, or is part of that input.
    assert json.loads(plan.to_json()) == parsed


def test_every_changed_result_is_refused() -> None:
    for path in _small_paths():
        if path[0] != "result" or path == ("result",):
            continue
        parsed = json.loads(_small().to_json())
        _set(parsed, path, "changed")
        with pytest.raises(LayoutError, match="altered"):
            Plan.from_json(json.dumps(parsed))


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"shape": "88"}, "shape '88'"),
        ({"shape": 8}, "shape 8"),
        ({"shape": (-1,)}, "size of dimension 0 -1"),
        ({"shape": (1 << 63,)}, "size of dimension 0"),
        ({"shape": (1 << 62,)}, "overflow"),
        ({"shape": (8, 8)}, "1 dimensions"),
        ({"dtype": "float33"}, "float33"),
        ({"dtype": 4}, "dtype 4"),
        ({"dtype": "nn"}, "'nn'"),
        ({"src": "2:S0"}, "src '2:S0'"),
        ({"dst": None}, "dst None"),
        ({"topology": {}}, "topology {}"),
        ({"strategy": "fast"}, "strategy 'fast'.*send_recv"),
        ({"strategy": None}, "strategy None"),
        ({"balance": "best"}, "balance 'best'.*greedy"),
        ({"chunk_bytes": 0}, "chunk_bytes 0"),
        ({"chunk_bytes": 1.5}, "chunk_bytes 1.5"),
        ({"seed": -1}, "seed -1"),
        ({"seed": []}, r"seed \[\]"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], names: str) -> None:
    good = {"shape": (8,), "dtype": "int32", "src": Layout.parse("2:S0"), "dst": Layout.parse("2@2:S0")}
    for _ in range(2):  # a refusal is not cached
        with pytest.raises(LayoutError, match=names):
            meshcast.plan(**{**good, **arguments})  # type: ignore[arg-type]


def test_bad_batches() -> None:
    with pytest.raises(LayoutError, match="empty"):
        meshcast.plan_many([])
    with pytest.raises(LayoutError, match="problem 1"):
        meshcast.plan_many([((8,), "int8", SRC, DST), ((8,), "int8")])  # type: ignore[list-item]


def test_sizes_beyond_32_bits() -> None:
    pair = Layout.parse("2:S0R"), Layout.parse("2@2:RS0")
    plan = meshcast.plan((1 << 41, 3), "int32", *pair, Topology.uniform(2, 100))
    assert sum(plan.bytes_received(rank) for rank in (2, 3)) == 3 << 43
    assert 1 <= plan.ratio < 1.02


def test_bad_figures() -> None:
    plan = paper_case_1()
    for host in (-1, 4, "0"):
        with pytest.raises(LayoutError, match="host"):
            plan.nic_bytes(host)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="rank"):
        plan.peak_staging_bytes(-1)


def test_staging_is_for_what_is_not_contiguous() -> None:
    rows = meshcast.plan((64, 64), "int8", Layout.parse("2:S0R"), Layout.parse("2@2:S0R"), HOSTS)
    columns = meshcast.plan((64, 64), "int8", Layout.parse("2:S0R"), Layout.parse("2@2:RS0"), HOSTS)
    assert [rows.peak_staging_bytes(rank) for rank in range(4)] == [0, 0, 0, 0]
    assert columns.peak_staging_bytes(0) > 0  # columns of a row-major shard are packed to be sent
    assert columns.peak_staging_bytes(2) == 0  # and arrive as whole rows of the destination
    assert columns.peak_staging_bytes(77) == 0
