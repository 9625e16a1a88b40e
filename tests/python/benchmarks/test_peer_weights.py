"""Bytes of every method on layouts small enough to count by hand, and the shapes of the models by figures
that others publish of them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_pages import check_tables

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.weights import peer_weights  # noqa: E402
from benchmarks.weights.peer_weights import METHODS, count, hops, planned  # noqa: E402
from benchmarks.weights.published import (  # noqa: E402
    BF16,
    FP8,
    NIC_GBPS,
    Engine,
    Hosts,
    Megatron,
    Model,
    Pair,
    Sharded,
    ShardedInHosts,
    Side,
    Tensor,
    deepseek,
    kimi,
    pairs,
    qwen_30b,
    qwen_235b,
)

DTYPES = [torch.float32, torch.bfloat16]
HOSTS = Hosts(2, 8 * NIC_GBPS)  # ranks 0 and 1 train, 2 and 3, 4 and 5 are hosts of a replica each


def pair(trainers: Side, dtype: torch.dtype, *names: str, shape: tuple[int, ...] = (5, 3)) -> Pair:
    tensors = tuple(Tensor(name, shape, dtype, "columns", layer) for layer, name in enumerate(names))
    model = Model("small", len(names), tensors, 1)
    return Pair("small", "", model, trainers, Engine(range(2, 6), 2), HOSTS, {})


# A tensor of 5 x 3: rank 0 has rows 0 to 2, rank 1 rows 3 and 4; ranks 2 and 4 want columns 0 and 1, ranks 3
# and 5 column 2. Boxes: 6 and 3 elements of rank 0, 4 and 2 of rank 1. In elements: to the servers, out of
# the busiest trainer, between servers, what a server takes in at most, and through the busiest port.
UNEVEN = {
    # down_proj has a parameter of its own in the engine, and is one of the projections
    ("down_proj", "ring"): (15, 9, 15, 10, 10),
    ("down_proj", "engine"): (15, 9, 15, 10, 10),
    # 6 elements in stripes of 2 and 4, 3 of 1 and 2, 4 of 2 and 2, 2 of 1 and 1; then all of them once more
    ("down_proj", "stripes"): (15, 9, 15, 10, 10),
    ("down_proj", "unicasts"): (30, 18, 0, 10, 18),
    ("down_proj", "pulls"): (30, 18, 0, 10, 18),
    # rank 0 gathers, and sends 15 elements to rank 2, which passes them on to rank 3 and to rank 4
    ("down_proj", "broadcast"): (15, 15, 15, 15, 15),
    # of a name that the engine does not have: 9 elements of rank 0 enter a host at its first rank, 6 of rank
    # 1 at its second; each passes them to the other
    ("q_proj", "ring"): (15, 9, 15, 10, 10),
    ("q_proj", "engine"): (15, 9, 15, 15, 9),
    # no projection: both trainers gather, rank 0 sends two rows and rank 1 three
    ("q_proj", "stripes"): (15, 9, 15, 15, 9),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "method"), UNEVEN)
def test_bytes_of_an_uneven_tensor(name: str, method: str, dtype: torch.dtype) -> None:
    to_servers, busiest, between, takes_in, port = (n * dtype.itemsize for n in UNEVEN[name, method])
    traffic = count(pair(Sharded(range(2)), dtype, name), method)
    row = traffic.row(range(2, 6))
    assert row["to_servers"] == to_servers
    assert row["busiest_trainer_nic"] == busiest
    assert row["between_servers"] == between
    assert row["between_trainers"] == 0  # they are of one host
    assert row["server_takes_in"] == takes_in
    assert row["port_seconds"] == pytest.approx(port / (NIC_GBPS / 8 * 1e9))


# Both trainers hold all, and there are two tensors: 10 elements for ranks 2 and 4, 5 for ranks 3 and 5, each.
REPLICATED = {
    "ring": (30, 15),  # the first tensor: 10 from rank 0, 5 from rank 1; the second the other way round
    "unicasts": (60, 30),  # all of the first from rank 0, since the receivers of a box are both even or odd
    "pulls": (60, 60),
    "broadcast": (30, 30),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", REPLICATED)
def test_holders_take_turns_from_tensor_to_tensor(method: str, dtype: torch.dtype) -> None:
    row = count(pair(Megatron(range(2)), dtype, "down_proj", "down_proj"), method).row(range(2, 6))
    assert (row["to_servers"], row["busiest_trainer_nic"]) == tuple(
        n * dtype.itemsize for n in REPLICATED[method]
    )


def test_a_pull_reads_from_the_first_holder() -> None:
    """Every server wants all 15 elements, which both trainers have."""
    found = pair(Megatron(range(2)), BF16, "down_proj")._replace(servers=Engine(range(2, 6)))
    assert count(found, "unicasts").nic_out == {0: 60, 1: 60}
    assert count(found, "pulls").nic_out == {0: 120}


def test_layouts_of_an_engine() -> None:
    model, engine = Model("small", 1, (), 2), Engine(range(8, 16), 4)

    def boxes(name: str, cut: str, *shape: int) -> list[Any]:
        shards = engine.layout(Tensor(name, shape, BF16, cut, 0), model).shards(shape)
        assert all(shards[rank] == shards[rank + 4] for rank in range(8, 12)), "replicas"
        return [shards[rank][0] for rank in range(8, 12)]

    quarters, sixes = [(0, 2), (2, 4), (4, 6), (6, 8)], (0, 6)
    assert boxes("gate_proj", "rows", 3, 8, 6) == [((0, 3), part, sixes) for part in quarters]
    assert boxes("down_proj", "columns", 3, 6, 8) == [((0, 3), sixes, part) for part in quarters]
    assert boxes("o_proj", "columns", 6, 8) == [(sixes, part) for part in quarters]
    assert boxes("norm", "whole", 6) == [(sixes,)] * 4
    halves = [(0, 2), (0, 2), (2, 4), (2, 4)]
    assert boxes("k_proj", "heads", 4, 6) == [(half, sixes) for half in halves], "two heads for four ranks"
    experts = Engine(range(8, 16), 4, 8).layout(Tensor("gate_proj", (8, 2, 6), BF16, "rows", 0), model)
    assert experts.shards((8, 2, 6))[9] == [((1, 2), (0, 2), sixes)]


def test_layouts_of_trainers() -> None:
    model = Model("small", 3, (), 2)

    def shards(side: Side, layer: int, cut: str, *shape: int) -> dict[int, list[Any]]:
        return dict(side.layout(Tensor("gate_proj", shape, BF16, cut, layer), model).shards(shape))

    trainers = Megatron(range(8), tensor=2, experts=4, stages=2)
    low, high = [((0, 2), (0, 6))], [((2, 4), (0, 6))]
    for layer, first in ((-1, 0), (0, 0), (1, 0), (2, 4), (3, 4)):  # layers 0 and 1 are of the first stage
        assert shards(trainers, layer, "rows", 4, 6) == dict(
            zip(range(first, first + 4), (low, high, low, high), strict=True)
        )
    assert shards(trainers, 2, "rows", 4, 2, 6) == {4 + n: [((n, n + 1), (0, 2), (0, 6))] for n in range(4)}
    assert shards(Sharded(range(2)), 0, "rows", 3, 6) == {0: low, 1: [((2, 3), (0, 6))]}
    inside = ShardedInHosts(range(4), per_host=2)
    assert shards(inside, 0, "rows", 4, 6) == {0: low, 1: high, 2: low, 3: high}
    assert shards(inside, 0, "rows", 2, 4, 6)[3] == [((1, 2), (2, 4), (0, 6))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_meshcast_sends_what_is_needed_and_no_faster_than_its_ports(dtype: torch.dtype) -> None:
    plan, traffic = planned(pair(Sharded(range(2)), dtype, "down_proj", shape=(5000, 3001)))
    row = traffic.row(range(2, 6))
    size = 5000 * 3001 * dtype.itemsize
    assert row["server_takes_in"] == 5000 * 1501 * dtype.itemsize
    assert size <= row["to_servers"] <= 2 * size
    assert row["to_servers"] + row["between_servers"] == 2 * size
    assert row["port_seconds"] <= plan.makespan
    assert plan.lower_bound <= plan.makespan
    assert sum(traffic.nic_out.values()) == sum(plan.nic_bytes(host)[0] for host in range(3))


def test_counting_kinds_is_counting_tensors() -> None:
    """What is counted once for several tensors is the sum over each of them, with turns of its holders."""
    trainers = Megatron(range(2))
    once = count(pair(trainers, BF16, "down_proj"), "unicasts")
    thrice = count(pair(trainers, BF16, "down_proj", "down_proj", "down_proj"), "unicasts")
    assert thrice.nic_out == {0: 2 * once.nic_out[0], 1: once.nic_out[0]}
    assert thrice.nic_in == {rank: 3 * nbytes for rank, nbytes in once.nic_in.items()}


@pytest.mark.parametrize("method", [method for method in METHODS if method != "auto"])
def test_every_server_takes_in_what_it_needs(method: str) -> None:
    """Stages, tensor parallelism that is not that of the engine, experts, heads that are repeated."""
    tensors = (
        Tensor("embed_tokens", (12, 4), BF16, "rows", -1), Tensor("k_proj", (4, 6), BF16, "heads", 0),
        Tensor("gate_proj", (4, 8, 6), BF16, "rows", 1), Tensor("down_proj", (4, 6, 8), BF16, "columns", 2),
        Tensor("norm", (7,), BF16, "whole", 3),
    )  # fmt: skip
    model = Model("small", 3, tensors, 2)
    trainers, engine = Megatron(range(8), 2, 1, 2, 2), Engine(range(8, 16), 4)
    traffic = count(Pair("", "", model, trainers, engine, HOSTS, {}), method)
    needed: Counter[int] = Counter()
    for tensor in tensors:
        for rank, shape in engine.layout(tensor, model).local_shapes(tensor.shape).items():
            needed[rank] += 2 * torch.Size(shape).numel()
    taken = {rank: traffic.nic_in[rank] + traffic.local_in[rank] for rank in engine.ranks}
    if method in ("ring", "unicasts", "pulls"):
        assert taken == needed
    else:
        assert all(taken[rank] >= needed[rank] for rank in engine.ranks)
    assert traffic.nic_in.total() == traffic.nic_out.total()


def test_leaders_of_a_host_take_turns() -> None:
    ways = [list(hops(0, [2, 3, 4, 5], place, 2, 2)) for place in (0, 1)]
    assert ways == [[(0, 2), (2, 3), (2, 4), (4, 5)], [(0, 3), (3, 2), (3, 5), (5, 4)]]
    assert list(hops(4, [5, 2, 6], 0, 1, 2)) == [(4, 5), (4, 6), (6, 2)], "round from its own host"


def parameters(model: Model, *, projections: bool = False) -> float:
    return sum(torch.Size(t.shape).numel() for t in model.tensors if t.projection or not projections) / 1e9


def test_models_have_the_parameters_that_their_authors_say() -> None:
    assert parameters(deepseek(FP8)) == pytest.approx(671, abs=0.5)
    assert parameters(qwen_235b()) == pytest.approx(235, abs=0.5)
    assert parameters(qwen_30b()) == pytest.approx(30.5, abs=0.05)
    assert parameters(kimi()) == pytest.approx(1026, abs=1)


def test_projections_are_the_part_that_nemo_rl_says() -> None:
    """Its nccl-reshard-refit document: 97.6 % of DeepSeek-V3 and 95.0 % of Qwen3-30B."""
    for model, part in ((deepseek(BF16), 0.976), (qwen_30b(), 0.950)):
        assert parameters(model, projections=True) / parameters(model) == pytest.approx(part, abs=5e-4)


def test_every_pair_has_layouts_for_all_of_its_tensors() -> None:
    for each in pairs():
        for tensor in {(t.name, t.shape, min(t.layer, 0)): t for t in each.model.tensors}.values():
            for side in (each.trainers, each.servers):
                shapes = side.layout(tensor, each.model).local_shapes(tensor.shape)
                assert set(shapes) <= set(side.ranks)
                if isinstance(side, Engine):
                    assert set(shapes) == set(side.ranks)
        assert set(each.published) <= set(each.methods or METHODS)


def test_kept_figures_are_those_of_this_tree() -> None:
    """One pair, without meshcast's plan, which may become better."""
    small = next(each for each in pairs() if each.name == "Qwen3-30B, 16 to 16 H100")
    (kept,) = (each for each in peer_weights.PAGE.results["pairs"] if each["name"] == small.name)
    for row in kept["rows"][1:]:
        found = count(small, row["method"])
        assert {**row, **found.row(small.servers.ranks), "seconds": found.seconds} == row


def results() -> dict[str, Any]:
    row = {
        "method": "unicasts", "seconds": 0.5, "to_servers": 2.5e9, "busiest_trainer_nic": 1e9,
        "between_trainers": 0, "between_servers": 123.4e9, "server_takes_in": 7e9, "port_seconds": 0.5,
    }  # fmt: skip
    small = {
        "name": "small", "what": "an example", "tensors": 3, "nbytes": 5e9, "strategy": "multicast",
        "bound": 0.25, "rows": [row], "together": False, "published": {"unicasts": "1 s (said so)"},
    }  # fmt: skip
    head = {"command": "python -m benchmarks peer_weights", "commit": "c0ffee", "cores": 2}
    return {**head, "kernel": "6.1", "torch": "2.13.0", "pairs": [small, {**small, "together": True}]}


def test_the_table_says_what_was_counted() -> None:
    text = peer_weights.text(results())
    check_tables(text)
    method = METHODS["unicasts"]
    head = "**small**: 5 GB, bound 0.250 s"
    assert f"| {head} | {method} | 2.5 | 1 | 0 | 123 | 7 | 0.500 | 2.00 | 1 s (said so) |" in text
    assert f"| {head} | {method} |  |  |  | 123 | 7 | 0.500 | 2.00 | 1 s (said so) |" in text
    assert "- **small**: an example. 3 tensors." in text
