"""Whether another cut is better: beside all cuts, by simulation."""

from __future__ import annotations

from itertools import product
from typing import Any

import meshcast
import pytest
from meshcast.pipelining import Layer, simulate
from meshcast.pipelining.recipe import Recipe
from meshcast.tuning.recut import Recut, RunningPipeline, better_cut

Cut = tuple[int, ...]
MICROBATCHES = 6
ARGUMENTS: dict[str, Any] = {"threshold": 0.01, "horizon": 10**9, "overhead": 0.0, "topology": None}


def running(cut: Cut, forward: list[float], name: str = "1F1B", **more: Any) -> RunningPipeline:
    stages = len(cut)
    recipe = Recipe(name, stages, MICROBATCHES, None, None, None, {}, delayed=False)
    times = {"forward": forward, "backward": [2 * each for each in forward], "weight": None, "transfer": 0.1}
    given = {
        "rows": [[stage] for stage in range(stages)],
        "ranks": [[stage] for stage in range(stages)],
        "nbytes": [0] * stages,
        "times": times,
        **more,
    }
    actions = recipe.lowered(len(given["rows"]), train=True)
    return RunningPipeline(cut, actions, MICROBATCHES, **given)


def seconds(cut: Cut, speeds: list[float], costs: list[float]) -> float:
    forward = [
        speed * sum(costs[sum(cut[:stage]) : sum(cut[: stage + 1])]) for stage, speed in enumerate(speeds)
    ]
    return simulate(
        "1F1B", len(cut), MICROBATCHES, forward, [2 * each for each in forward], None, 0.1
    ).makespan


def cuts(layers: int, stages: int) -> list[Cut]:
    return [each for each in product(range(1, layers), repeat=stages) if sum(each) == layers]


@pytest.mark.parametrize("speeds", [[1.0, 2.0, 1.0], [3.0, 1.0, 1.0], [1.0, 1.0, 0.25], [2.0, 1.0, 4.0]])
@pytest.mark.parametrize("costs", [[1.0] * 9, [4.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 3.0]])
@pytest.mark.parametrize("cut", [(3, 3, 3), (1, 1, 7)])
def test_it_is_the_fastest_there_is(speeds: list[float], costs: list[float], cut: Cut) -> None:
    starts = [0, cut[0], cut[0] + cut[1], 9]
    forward = [speed * sum(costs[starts[i] : starts[i + 1]]) for i, speed in enumerate(speeds)]
    layers = [Layer(cost, 2 * cost) for cost in costs]
    found = better_cut(running(cut, forward), layers, **ARGUMENTS)
    before = seconds(cut, speeds, costs)
    best = min(seconds(each, speeds, costs) for each in cuts(9, 3))
    if best > 0.99 * before:
        assert found is None
    else:
        assert found is not None
        assert found.before == pytest.approx(before)
        assert found.after == pytest.approx(best)
        assert seconds(found.cut, speeds, costs) == pytest.approx(best)


def test_many_layers_are_not_all_listed() -> None:
    """More cuts than are listed: the search begins with the present cut and the balanced one."""
    found = better_cut(running((25,) * 8, [0.5, *[0.25] * 7]), None, **ARGUMENTS)
    assert found is not None
    assert sum(found.cut) == 200
    by_hand = (14, 27, 27, 27, 27, 26, 26, 26)
    assert found.after <= seconds(by_hand, [0.02, *[0.01] * 7], [1.0] * 200)


def test_what_a_move_must_save() -> None:
    slow = running((3, 3, 3), [3.0, 6.0, 3.0])
    found = better_cut(slow, None, **ARGUMENTS)
    assert found is not None
    saved = 1 - found.after / found.before
    assert better_cut(slow, None, **{**ARGUMENTS, "threshold": saved * 0.99}) is not None
    assert better_cut(slow, None, **{**ARGUMENTS, "threshold": saved * 1.01}) is None
    spare = (0.9 * found.before - found.after) * 100  # seconds that a hundred steps have to spare
    given = {**ARGUMENTS, "threshold": 0.1, "horizon": 100}
    assert better_cut(slow, None, **{**given, "overhead": spare * 0.99}) is not None
    assert better_cut(slow, None, **{**given, "overhead": spare * 1.01}) is None


def test_bytes_that_move_take_time() -> None:
    topology = meshcast.Topology.uniform(ranks_per_host=1, nic_gbps=8, latency_us=0)  # 1 GB/s
    slow = running((3, 3, 3), [3.0, 6.0, 3.0], nbytes=[3 * 10**9] * 3)
    found = better_cut(slow, None, **{**ARGUMENTS, "topology": topology, "overhead": 5.0})
    assert found is not None
    moved = sum(abs(a - b) for a, b in zip(found.cut, slow.cut, strict=True)) // 2
    assert 5.0 + 0.9 * moved < found.moving < 5.0 + 2.5 * moved
    same_ranks = running((3, 3, 3), [3.0, 6.0, 3.0], nbytes=[3 * 10**9] * 3, ranks=[[0], [0], [0]])
    found = better_cut(same_ranks, None, **{**ARGUMENTS, "topology": topology, "overhead": 5.0})
    assert found is not None
    assert found.moving == 5.0


def test_stages_of_one_rank_have_its_speed() -> None:
    """ZBV: stages 0 and 3 are on one rank, 1 and 2 on another one, which is slow."""
    times = {
        "forward": [2.0, 4.0, 4.0, 2.0],
        "backward": [4.0, 8.0, 8.0, 4.0],
        "weight": [2.0, 4.0, 4.0, 2.0],
    }
    slow = running(
        (2, 2, 2, 2),
        [],
        "ZBV",
        rows=[[0, 3], [1, 2]],
        ranks=[[0], [1], [1], [0]],
        times={**times, "transfer": 0.0},
    )
    found = better_cut(slow, None, **ARGUMENTS)
    assert isinstance(found, Recut)
    assert found.cut[1] + found.cut[2] < 4
    assert found.after < 0.9 * found.before


def test_nothing_to_gain() -> None:
    assert better_cut(running((3, 3, 3), [3.0, 3.0, 3.0]), None, **{**ARGUMENTS, "threshold": 0.1}) is None
    assert better_cut(running((3, 3, 3), [0.0, 0.0, 0.0]), None, **ARGUMENTS) is None
