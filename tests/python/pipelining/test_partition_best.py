"""partition() of a GPT and a U-Transformer on 8 ranks, beside all cuts, degrees and schedules there are."""

import math
import sys
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path

import meshcast
import pytest
from meshcast.pipelining import Layer, Partition, partition
from meshcast.tuning.partition import Evaluator, PlannedJob
from meshcast.tuning.search import Cut, uses_of

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.pipeline.partition import gpt, unet

pytestmark = pytest.mark.timeout(240)

RANKS, MICROBATCHES = 8, 8
WORSE = 0.02  # than the best there is, at most; steps within 1 % count as equally long, and hold less
NETWORKS = {
    "two on a host, 25 Gbit/s": meshcast.Topology.uniform(ranks_per_host=2, nic_gbps=25),
    "four on a host, 200 Gbit/s": meshcast.Topology.uniform(ranks_per_host=4, nic_gbps=200, local_gbps=2400),
}


def parts(total: int, count: int) -> Iterator[tuple[int, ...]]:
    for ends in combinations(range(1, total), count - 1):
        yield tuple(b - a for a, b in zip((0, *ends), (*ends, total), strict=True))


def everything(layers: list[Layer], stages: list[int], degrees: list[int]) -> Iterator[Cut]:
    for count in stages:
        for cut, ranks in product(parts(len(layers), count), parts(RANKS, count)):
            for tensor in product(*([t for t in degrees if n % t == 0] for n in ranks)):
                yield Cut(cut, ranks, tensor)


def exhaustive(found: Partition, layers: list[Layer], stages: list[int], job: PlannedJob) -> float:
    """The fastest step of all cuts under all schedules. Cuts are left out that cannot be faster than `found`:
    whose slowest stage alone computes for longer."""
    evaluator = Evaluator(layers, uses_of(layers), job)
    best = found.step_seconds
    listed = []
    for number, cut in enumerate(everything(layers, stages, evaluator.degrees)):
        costs = evaluator.stages(cut)
        fills = [sum(each.forward for each in costs[:i]) for i in range(len(costs))]
        least = max(
            fill + job.microbatches * (each.forward + each.backward) + each.summed
            for fill, each in zip(fills, costs, strict=True)
        )
        listed.append((least, number, cut))
    for least, _, cut in sorted(listed):
        if least >= best:
            break
        seconds = [each.seconds for each in evaluator.best(cut) if not each.why_not]
        best = min([best, *seconds])
    return best


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[list[Layer], int]]:
    """Layers, and the samples of a micro-batch; with fewer of these than ranks some share layers."""
    return {
        "gpt": (gpt("1.3B", 6, 8, (2, 4)), 8),
        "gpt, few samples": (gpt("1.3B", 6, 2, (2, 4)), 2),
        "unet": (unet("470M", 8), 8),
    }


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    ("model", "memory"),
    [
        pytest.param("gpt", None, marks=pytest.mark.slow),  # 20e9 bytes are the quick case of this model
        ("gpt", 20e9),
        ("gpt, few samples", 12e9),
        ("unet", None),
        pytest.param("unet", 4e9, marks=pytest.mark.slow),
    ],
)
def test_it_is_near_the_best_there_is_and_no_worse_than_obvious_choices(
    models: dict[str, tuple[list[Layer], int]], model: str, memory: float | None, network: str
) -> None:
    layers, samples = models[model]
    topology, stages = NETWORKS[network], [1, 2, 3, 4]
    options = {"microbatches": MICROBATCHES, "stages": stages, "memory": memory}
    found = partition(layers, samples, RANKS, topology, **options)
    best = exhaustive(
        found, layers, stages, PlannedJob(topology, MICROBATCHES, samples, None, False, memory, 4.0)
    )
    assert found.step_seconds <= (1 + WORSE) * best, f"{found.step_seconds / best - 1:.2%} worse"
    assert len(found.alternatives) >= 3
    fits = [seconds for seconds in found.alternatives.values() if seconds < math.inf]
    assert found.step_seconds <= 1.01 * min(fits, default=math.inf)
    if model == "gpt, few samples":
        assert any(len(mesh[0]) > 1 for mesh in found.meshes)
