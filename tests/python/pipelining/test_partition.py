"""partition(): the best of all where that can be checked, resharding taken into account, errors."""

import math
import random
from itertools import pairwise

import meshcast
import pytest
import torch
from meshcast.pipelining import Layer, ScheduleError, Value, partition, simulate
from meshcast.tuning import search
from torch.distributed.tensor import Partial, Replicate, Shard

pytestmark = pytest.mark.timeout(120)

SLOW = meshcast.Topology.uniform(ranks_per_host=1, nic_gbps=0.1)
FAST = meshcast.Topology.uniform(ranks_per_host=8, nic_gbps=1000.0, latency_us=0.0)


def test_equal_layers_on_a_fast_network_are_cut_evenly() -> None:
    found = partition([Layer(0.01, 0.02)] * 6, 4, 6, FAST, stages=3, microbatches=6, schedule="Eager1F1B")
    assert found.layers == [range(2), range(2, 4), range(4, 6)]
    assert found.ranks == [[0, 1], [2, 3], [4, 5]]
    assert found.exhaustive
    assert found.forward == pytest.approx([0.01] * 3)
    assert found.step_seconds == pytest.approx(found.alternatives["layers and ranks as even as possible"])


def test_a_heavy_stage_gets_more_ranks() -> None:
    layers = [Layer(0.01, 0.02), Layer(0.03, 0.06)]
    found = partition(layers, 12, 4, FAST, stages=2, microbatches=16)
    assert found.ranks == [[0], [1, 2, 3]]
    assert found.forward == pytest.approx([0.01, 0.01])


def test_the_cut_moves_to_where_little_crosses() -> None:
    """Equal layers; one of them, off the middle, makes a hundredth of what the others make."""
    wide, narrow = Value((8, 100_000)), Value((8, 1_000))
    layers = [Layer(0.01, 0.02, (narrow if i == 1 else wide,)) for i in range(6)]
    found = partition(layers, 8, 2, SLOW, stages=2, microbatches=8)
    assert found.layers == [range(2), range(2, 6)]
    blind = found.alternatives["best if transfers were free"]
    assert blind > 1.5 * found.step_seconds
    text = found.explain()
    assert "layers 0 to 1 on ranks 0" in text
    assert f"{blind / found.step_seconds:.2f} times as long" in text


def test_a_skip_connection_crosses_every_cut_between_its_ends() -> None:
    skip = Value((4, 1000), used_by=(2,))
    layers = [Layer(1.0, 2.0, (Value((4, 10)), skip)), Layer(1.0, 2.0, (Value((4, 10)),)), Layer(1.0, 2.0)]
    found = partition(layers, 4, 3, SLOW, stages=3, microbatches=2)
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
    arguments = {"stages": 3, "microbatches": 4, "schedule": "Eager1F1B"}
    best = partition(layers, 6, 5, SLOW, **arguments)
    monkeypatch.setattr(search, "_EXHAUSTIVE", 0)
    monkeypatch.setattr(search, "_DRAWN", 12)
    found = partition(layers, 6, 5, SLOW, **arguments)
    assert best.exhaustive
    assert not found.exhaustive
    assert found.step_seconds <= 1.03 * best.step_seconds, f"seed {seed}"


def test_the_most_balanced_cut_has_the_fastest_slowest_stage() -> None:
    rng = random.Random(3)
    times = [rng.uniform(1, 5) for _ in range(7)]

    def slowest(cut: search.Cut) -> float:
        parts = zip(cut.layer_ranges(), cut.ranks, strict=True)
        return max(sum(times[i] for i in layers) * -(-12 // d) / 12 for layers, d in parts)

    def stage_seconds(_: int, layers: range, ranks: int) -> float:
        return sum(times[i] for i in layers) * -(-12 // ranks) / 12

    cut = search.balanced(7, 3, 6, stage_seconds)
    everything = [
        search.Cut(layers, ranks)
        for layers in search._compositions(7, 3)
        for ranks in search._compositions(6, 3)
    ]
    assert len(everything) == 15 * 10
    assert slowest(cut) == pytest.approx(min(map(slowest, everything)))


def test_a_model_of_24_layers_on_12_ranks_is_cut_in_bounded_time() -> None:
    layers = [Layer(0.01, 0.02, (Value((16, 64)),)) for _ in range(24)]
    found = partition(layers, 12, 12, FAST, stages=4, microbatches=2)
    assert found.step_seconds <= found.alternatives["layers and ranks as even as possible"]
    assert found.tried <= search._MOST_TRIED + 500
    for before, after in pairwise(found.layers):
        assert before.stop == after.start


def test_the_simulated_step_is_that_of_simulate() -> None:
    layers = [Layer(0.01, 0.02, (Value((4, 50_000)),))] * 4
    found = partition(layers, 4, 2, SLOW, stages=2, microbatches=5, schedule="1F1B")
    again = simulate("1F1B", 2, 5, found.forward, found.backward, transfer=found.transfers)
    assert found.step_seconds == pytest.approx(again.makespan)


@pytest.mark.parametrize(
    "options", [{}, {"schedule": "ZBH1"}, {"schedule": "1F1B", "delay_weight_grad": True}]
)
def test_the_schedule_is_chosen_or_given(options: dict) -> None:
    layers = [Layer(0.01, 0.02, (Value((4, 50_000)),), inputs=0.008)] * 4
    found = partition(layers, 4, 2, SLOW, stages=2, microbatches=5, **options)
    again = simulate(
        found.schedule.schedule, 2, 5, found.forward, found.backward,
        [0.6 * seconds for seconds in found.backward], transfer=found.transfers,
        **found.schedule.options,
    )  # fmt: skip
    assert found.step_seconds == pytest.approx(again.makespan)
    if options:
        assert found.schedule.schedule == options["schedule"]
    else:
        for name in ("GPipe", "1F1B", "Eager1F1B", "ZBH1", "ZBH2"):
            other = partition(layers, 4, 2, SLOW, stages=2, microbatches=5, schedule=name)
            assert found.step_seconds <= 1.01 * other.step_seconds


# ---- sums inside a stage -------------------------------------------------------------------------------


def summed(
    ranks: list, elements: int, before: list, after: list, topology: meshcast.Topology = SLOW
) -> float:
    src, dst = meshcast.Layout(ranks, before), meshcast.Layout(ranks, after)
    return meshcast.plan((elements,), torch.float32, src, dst, topology=topology).makespan


@pytest.mark.parametrize("schedule", ["1F1B", None])
def test_gradients_are_summed_over_the_data_parallel_ranks_once_in_a_step(schedule: str | None) -> None:
    layers = [Layer(0.01, 0.02, parameters=4_000_000)]
    found = partition(layers, 4, 2, SLOW, stages=1, microbatches=3, schedule=schedule)
    alone = summed([0, 1], 1_000_000, [Partial()], [Replicate()])
    assert found.gradient_sums == pytest.approx([alone], rel=1e-3)
    assert found.step_seconds == pytest.approx(3 * 0.015 + alone, rel=1e-3)


def test_each_stage_sums_when_it_is_done_with_its_last_micro_batch() -> None:
    """The last stage is done first, so its sum is hidden; that of the first one is not."""
    plain, heavy = Layer(0.01, 0.02), Layer(0.01, 0.02, parameters=40_000)
    last, first = (
        partition(layers, 4, 4, SLOW, stages=2, microbatches=8, schedule="1F1B")
        for layers in ([plain, heavy], [heavy, plain])
    )
    sums = summed([0, 1], 10_000, [Partial()], [Replicate()])
    assert sums < 0.01
    assert last.ranks == first.ranks == [[0, 1], [2, 3]]
    assert last.step_seconds == pytest.approx(last.report.makespan)
    assert first.step_seconds == pytest.approx(first.report.makespan + sums, rel=1e-2)


def test_tensor_parallel_ranks_share_a_layer_and_sum_what_it_makes_in_each_micro_batch() -> None:
    part = Layer(0.01, 0.02, sums_forward=(400_000,), sums_backward=(400_000, 400_000), parameters=100)
    layers = [Layer(0.02, 0.04, parameters=200, tensor={2: part})]
    found = partition(layers, 1, 2, FAST, stages=1, microbatches=3, schedule="1F1B")
    assert found.meshes == [[[0, 1]]]  # one sample: data parallelism halves nothing
    once = summed([0, 1], 100_000, [Partial()], [Replicate()], FAST)
    assert found.forward == pytest.approx([0.01 + once], rel=1e-3)
    assert found.backward == pytest.approx([0.02 + 2 * once], rel=1e-3)
    assert found.gradient_sums == [0.0]
    assert "1 x 2 tensor parallel" in found.explain()


def test_degrees_of_both_kinds_multiply() -> None:
    part = Layer(0.01, 0.02, sums_forward=(800_000,), parameters=4_000_000)
    layers = [Layer(0.02, 0.04, parameters=8_000_000, tensor={2: part})]
    found = partition(layers, 2, 4, FAST, stages=1, microbatches=1, schedule="1F1B")
    assert found.meshes == [[[0, 1], [2, 3]]]
    half = summed([[0, 1], [2, 3]], 200_000, [Shard(0), Partial()], [Shard(0), Replicate()], FAST)
    assert found.forward == pytest.approx([0.005 + half], rel=1e-3)
    both = summed([[0, 1], [2, 3]], 2_000_000, [Partial(), Shard(0)], [Replicate(), Shard(0)], FAST)
    assert found.gradient_sums == pytest.approx([both], rel=1e-3)


def test_a_slow_network_keeps_tensor_parallel_ranks_on_one_host() -> None:
    part = Layer(0.01, 0.02, sums_forward=(4_000_000,), sums_backward=(4_000_000,))
    layers = [Layer(0.02, 0.04, (Value((1, 1000)),), tensor={2: part})] * 3
    for hosts, expected in (("abbc", [[[0]], [[1, 2]], [[3]]]), ("aabc", [[[0, 1]], [[2]], [[3]]])):
        where = meshcast.Topology.from_hosts(dict(enumerate(hosts)), nic_gbps=1)
        assert partition(layers, 1, 4, where, stages=3, microbatches=8).meshes == expected


# ---- memory --------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_not_proposed() -> None:
    layers = [Layer(0.01, 0.02, (Value((4, 10)),), parameters=1000)] * 4
    free = partition(layers, 4, 4, FAST, microbatches=4)
    assert len(free.layers) == 1
    found = partition(layers, 4, 4, FAST, microbatches=4, memory=9000)
    assert len(found.layers) > 1
    assert max(map(len, found.layers)) <= 2
    assert found.alternatives["one stage, data parallel"] == math.inf
    assert "one stage, data parallel: does not fit into memory" in found.explain()
    with pytest.raises(ScheduleError, match=r"no cut into 1 stages on 4 ranks fits into 9000 bytes"):
        partition(layers, 4, 4, FAST, microbatches=4, memory=9000, stages=1)


def test_a_schedule_that_holds_less_is_chosen_where_memory_is_short() -> None:
    layers = [Layer(0.01, 0.02, (Value((4, 50_000)),), held=1000)] * 3
    wide = partition(layers, 4, 3, SLOW, stages=3, microbatches=9)
    assert max(wide.schedule.held) > 3000
    found = partition(layers, 4, 3, SLOW, stages=3, microbatches=9, memory=3000)
    assert max(found.schedule.held) <= 3000
    assert found.step_seconds > wide.step_seconds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 4}, r"stages must be in 1..3 for 3 layers on 4 ranks, found 4"),
        ({"ranks": 1}, r"stages must be in 1..1 for 3 layers on 1 ranks"),
        ({"example": 0}, r"samples must be at least 1, found 0"),
        ({"example": 2.5}, r"samples must be at least 1, found 2.5"),
        ({"stages": []}, r"stages must be in 1..3 for 3 layers on 4 ranks, found None"),
        ({"memory": 0}, r"memory must be above 0"),
        ({"tensor": [2]}, r"leave tensor= out"),
        ({"tensor": [0]}, r"degrees are numbers of at least 1"),
        ({"layers": ["0"]}, r"layers= and tensor_plan= are of a module"),
        ({"schedule": "ZBV"}, r"ZBV has several stages on a rank"),
        ({"schedule": "2F2B"}, r"2F2B"),
        ({"model": [Layer(1.0, 1.0, tensor={2: Layer(1.0, -1.0)})]}, r"layer 0 with tensor.*2: times"),
        ({"model": [Layer(1.0, 1.0, inputs=2.0)]}, r"layer 0: inputs is a part of its backward, 1.0"),
        ({"model": [Layer(1.0, 1.0, held=-1)]}, r"layer 0: bytes must be >= 0"),
        ({"model": [Layer(-1.0, 1.0)] * 3}, r"layer 0: times must be >= 0"),
        ({"model": [Layer(1.0, 1.0, (Value((1,), used_by=(0,)),))] * 3}, r"cannot be used by layer 0"),
        ({"model": [Layer(1.0, 1.0, (Value((1,), used_by=(3,)),))] * 3}, r"cannot be used by layer 3"),
    ],
)
def test_bad_input_is_refused(change: dict, message: str) -> None:
    arguments = {"model": [Layer(1.0, 2.0)] * 3, "example": 4, "ranks": 4, "topology": FAST}
    arguments |= {"stages": min(2, len(change.get("model", "ab"))), "microbatches": 2} | change
    with pytest.raises(ScheduleError, match=message):
        partition(**arguments)
