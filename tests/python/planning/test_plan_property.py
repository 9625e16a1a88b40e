"""Hundreds of random layout pairs, each plan executed by an interpreter that knows nothing of the planner."""

import math
import random

import meshcast
import planning_cases
import pytest
from meshcast import Layout, LayoutError
from plan_interpreter import execute
from torch.distributed.tensor import Partial, Shard

STRATEGIES = ("auto", "multicast", "broadcast", "send_recv", "local_all_gather", "global_all_gather")
PAIRS = 100  # per strategy and test


def _random_plan(seed: int, strategy: str, tensors: int = 1, partial: str | None = None) -> meshcast.Plan:
    rng = random.Random(seed)
    problems = []
    for _ in range(tensors):
        shape = planning_cases.tensor_shape(rng)
        src, dst = planning_cases.layout_pair(rng, len(shape), partial)
        problems.append((shape, rng.choice(planning_cases.DTYPES), src, dst))
    # Chunks down to one element, so that small tensors are cut as finely as large ones.
    chunk_bytes = rng.choice((None, 1, 8, 64, 1024))
    topology = planning_cases.topology(rng)
    balance = rng.choice(("none", "size", "greedy", "search"))
    return meshcast.plan_many(problems, topology, strategy, balance, chunk_bytes, rng.randrange(1 << 30))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_element_arrives_once(strategy: str) -> None:
    travelling = 0
    for seed in range(PAIRS):
        print(f"seed {seed}")  # shown by pytest where it fails
        plan = _random_plan(seed, strategy)
        execute(plan, seed)
        travelling += len(plan.transfers) > 0
    assert travelling > PAIRS // 2  # the generator makes work


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batches_are_planned_as_one(strategy: str) -> None:
    for seed in range(1000, 1000 + PAIRS // 4):
        print(f"seed {seed}")
        execute(_random_plan(seed, strategy, tensors=random.Random(seed).randint(2, 6)), seed)


@pytest.mark.parametrize("partial", ["sum", "avg", "min", "max", "product"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_partial_sources_are_reduced_on_the_way(strategy: str, partial: str) -> None:
    reducing = 0
    for seed in range(2000, 2000 + PAIRS // 4):
        print(f"seed {seed}")
        plan = _random_plan(seed, strategy, partial=partial)
        execute(plan, seed)
        reducing += any(transfer.reduce == partial for transfer in plan.transfers)
    assert reducing > PAIRS // 16


def test_meshes_of_four_and_five_dimensions() -> None:
    for seed in range(4000, 4000 + PAIRS // 2):
        print(f"seed {seed}")
        rng = random.Random(seed)
        shape = (rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 4))
        sides = []
        for _ in range(2):
            mesh = rng.choice(((2, 1, 2, 3), (3, 2, 1, 2), (2, 1, 2, 1, 3), (1, 2, 2, 2, 1)))
            ranks = rng.sample(range(24), math.prod(mesh))
            placements = planning_cases.placements(rng, mesh, len(shape), "sum" if not sides else None)
            sides.append(Layout(planning_cases.nested(ranks, mesh), placements))
        execute(meshcast.plan(shape, "int64", *sides, planning_cases.topology(rng), chunk_bytes=64), seed)


def test_equal_layouts_move_nothing() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        shape = planning_cases.tensor_shape(rng)
        src, _ = planning_cases.layout_pair(rng, len(shape))
        plan = meshcast.plan(shape, "float32", src, src, planning_cases.topology(rng))
        assert len(plan.transfers) == 0, f"seed {seed}"
        assert plan.makespan == plan.lower_bound == 0
        assert plan.ratio == 1


def test_auto_is_never_worse_than_a_strategy_of_its_own() -> None:
    for seed in range(3000, 3000 + PAIRS):
        auto = _random_plan(seed, "auto")
        for strategy in STRATEGIES[1:]:
            assert auto.makespan <= _random_plan(seed, strategy).makespan, (
                f"seed {seed}: {strategy} is faster"
            )


def test_an_unsound_plan_is_caught() -> None:
    """The interpreter itself: drop, repeat or redirect one transfer and it must object."""
    plan = meshcast.plan((8, 6), "float32", Layout.parse("2:S0R"), Layout.parse("2x2@2:S1R"))
    execute(plan, 0)
    transfers = list(plan.transfers)
    last = transfers[-1]
    changes = {
        "dropped": transfers[:-1],
        "repeated": [*transfers, last._replace(id=len(transfers))],
        "redirected": [*transfers[:-1], last._replace(dst=transfers[0].dst)],
        "from nowhere": [*transfers[:-1], last._replace(src=last.dst, dst=last.src)],
        "other box": [*transfers[:-1], last._replace(box=transfers[0].box)],
    }
    for name, listed in changes.items():
        spoiled = meshcast.Plan(plan.problems, plan.topology, plan.options)  # not the cached one
        vars(spoiled)["transfers"] = listed
        try:
            execute(spoiled, 0)
        except AssertionError:
            continue
        pytest.fail(f"the interpreter accepted a plan with a transfer {name}")


def test_partial_destinations_are_refused() -> None:
    with pytest.raises(LayoutError, match="Partial"):
        meshcast.plan((4,), "float32", Layout([0, 1], [Shard(0)]), Layout([0, 1], [Partial()]))
    mixed = Layout([[0, 1], [2, 3]], [Partial("sum"), Partial("max")])
    with pytest.raises(LayoutError, match="mixes Partial"):
        meshcast.plan((4,), "float32", mixed, Layout([0, 1], [Shard(0)]))
