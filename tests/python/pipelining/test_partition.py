"""partition(): the best of all where that can be checked, resharding taken into account, errors."""

import random
from itertools import pairwise

import meshcast
import pytest
import torch
from meshcast.pipelining import Layer, ScheduleError, Value, partition, simulate
from meshcast.pipelining import partition_search as search
from torch.distributed.tensor import Shard

pytestmark = pytest.mark.timeout(120)

SLOW = meshcast.Topology.uniform(ranks_per_host=1, nic_gbps=0.1)
FAST = meshcast.Topology.uniform(ranks_per_host=8, nic_gbps=1000.0, latency_us=0.0)


def test_equal_layers_on_a_fast_network_are_cut_evenly() -> None:
    found = partition([Layer(0.01, 0.02)] * 6, 3, 6, topology=FAST, microbatches=6, samples=4)
    assert found.layers == [range(2), range(2, 4), range(4, 6)]
    assert found.ranks == [[0, 1], [2, 3], [4, 5]]
    assert found.exhaustive
    assert found.forward == pytest.approx([0.01] * 3)
    assert found.step_seconds == pytest.approx(found.alternatives["layers and ranks as even as possible"])


def test_a_heavy_stage_gets_more_ranks() -> None:
    layers = [Layer(0.01, 0.02), Layer(0.03, 0.06)]
    found = partition(layers, 2, 4, topology=FAST, microbatches=16, samples=12)
    assert found.ranks == [[0], [1, 2, 3]]
    assert found.forward == pytest.approx([0.01, 0.01])


def test_the_cut_moves_to_where_little_crosses() -> None:
    """Equal layers; one of them, off the middle, makes a hundredth of what the others make."""
    wide, narrow = Value((8, 100_000)), Value((8, 1_000))
    layers = [Layer(0.01, 0.02, (narrow if i == 1 else wide,)) for i in range(6)]
    found = partition(layers, 2, 2, topology=SLOW, microbatches=8, samples=8)
    assert found.layers == [range(2), range(2, 6)]
    blind = found.alternatives["best where transfers are taken for free"]
    assert blind > 1.5 * found.step_seconds
    text = found.explain()
    assert "layers 0 to 1 on ranks 0" in text
    assert f"{blind / found.step_seconds:.2f} times as long" in text


def test_a_skip_connection_crosses_every_cut_between_its_ends() -> None:
    skip = Value((4, 1000), used_by=(2,))
    layers = [Layer(1.0, 2.0, (Value((4, 10)), skip)), Layer(1.0, 2.0, (Value((4, 10)),)), Layer(1.0, 2.0)]
    found = partition(layers, 3, 3, topology=SLOW, microbatches=2, samples=4)
    assert set(found.transfers) == {(0, 1), (1, 2), (0, 2)}
    src, dst = meshcast.Layout([0], [Shard(0)]), meshcast.Layout([2], [Shard(0)])
    alone = meshcast.plan((4, 1000), torch.float32, src, dst, topology=SLOW)
    assert found.transfers[0, 2] == pytest.approx(alone.makespan)


@pytest.mark.parametrize("seed", range(6))
def test_the_search_finds_what_trying_everything_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    layers = [
        Layer(t := rng.uniform(0.005, 0.02), 2 * t, (Value((6, rng.choice([100, 1000, 20_000]))),))
        for _ in range(7)
    ]
    arguments = {"topology": SLOW, "microbatches": 4, "samples": 6}
    best = partition(layers, 3, 5, **arguments)
    monkeypatch.setattr(search, "_EXHAUSTIVE", 0)
    monkeypatch.setattr(search, "_DRAWN", 12)
    found = partition(layers, 3, 5, **arguments)
    assert best.exhaustive
    assert not found.exhaustive
    assert found.step_seconds <= 1.03 * best.step_seconds, f"seed {seed}"


def test_the_most_balanced_cut_has_the_fastest_slowest_stage() -> None:
    rng = random.Random(3)
    times = [rng.uniform(1, 5) for _ in range(7)]

    def slowest(cut: search.Cut) -> float:
        parts = zip(cut.layer_ranges(), cut.ranks, strict=True)
        return max(sum(times[i] for i in layers) * -(-12 // d) / 12 for layers, d in parts)

    cut = search.balanced(times, 3, 6, 12)
    everything = [
        search.Cut(layers, ranks)
        for layers in search._compositions(7, 3)
        for ranks in search._compositions(6, 3)
    ]
    assert len(everything) == 15 * 10
    assert slowest(cut) == pytest.approx(min(map(slowest, everything)))


def test_a_model_of_24_layers_on_12_ranks_is_cut_in_bounded_time() -> None:
    layers = [Layer(0.01, 0.02, (Value((16, 64)),)) for _ in range(24)]
    found = partition(layers, 4, 12, topology=FAST, microbatches=2, samples=12)
    assert found.step_seconds <= found.alternatives["layers and ranks as even as possible"]
    assert found.tried <= search._MOST_TRIED + 500
    for before, after in pairwise(found.layers):
        assert before.stop == after.start


def test_the_simulated_step_is_that_of_simulate() -> None:
    layers = [Layer(0.01, 0.02, (Value((4, 50_000)),))] * 4
    found = partition(layers, 2, 2, topology=SLOW, microbatches=5, samples=4, schedule="1F1B")
    again = simulate("1F1B", 2, 5, found.forward, found.backward, transfer=found.transfers)
    assert found.step_seconds == pytest.approx(again.makespan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 4}, r"stages must be in 1..3 for 3 layers on 4 ranks, found 4"),
        ({"ranks": 1}, r"stages must be in 1..1 for 3 layers on 1 ranks"),
        ({"samples": 0}, r"samples must be at least 1, found 0"),
        ({"schedule": "ZBV"}, r"ZBV has several stages on a rank"),
        ({"schedule": "2F2B"}, r"2F2B"),
        ({"layers": [Layer(-1.0, 1.0)] * 3}, r"layer 0: times must be >= 0"),
        ({"layers": [Layer(1.0, 1.0, (Value((1,), used_by=(0,)),))] * 3}, r"cannot be used by layer 0"),
        ({"layers": [Layer(1.0, 1.0, (Value((1,), used_by=(3,)),))] * 3}, r"cannot be used by layer 3"),
    ],
)
def test_bad_input_is_refused(change: dict, message: str) -> None:
    arguments = {"layers": [Layer(1.0, 2.0)] * 3, "stages": 2, "ranks": 4, "topology": FAST}
    arguments |= {"microbatches": 2, "samples": 4} | change
    with pytest.raises(ScheduleError, match=message):
        partition(**arguments)
