"""What is compared: the proposal of `partition` and three obvious choices, each with its best schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from meshcast import Topology
from meshcast.pipelining import Layer, partition
from meshcast.tuning.candidates import best_of
from meshcast.tuning.partition import Evaluator, PlannedJob
from meshcast.tuning.search import Cut, even, uses_of

from .models import gpt, scaled, unet

__all__ = ["MODELS", "Choice", "Emulated", "choices", "emulated"]

SAMPLES = 8  # of a micro-batch
GBIT, HOST_RANKS = 25.0, 2  # of the cluster that is emulated
_MOST_STAGES = 4
_PAYLOAD = 1448 / 1514  # of a link's rate: the rest are headers

MODELS = {
    "GPT, width 2048, 6 layers": lambda: gpt("1.3B", 6, SAMPLES),
    "U-Transformer 470M": lambda: unet("470M", SAMPLES),
}


@dataclass(frozen=True)
class Emulated:
    """Layers whose times are stretched and whose bytes are shrunk, so that compute and transfers keep their
    proportion on a slower network."""

    layers: list[Layer]
    topology: Topology
    stretch: float


def emulated(layers: list[Layer], forward: float, mbit: float) -> Emulated:
    """forward: seconds of a micro-batch through all layers. mbit: of a link of a host, each way."""
    stretch = forward / sum(layer.forward for layer in layers)
    nbytes = stretch * mbit * _PAYLOAD / 1e3 / GBIT
    topology = Topology.uniform(ranks_per_host=HOST_RANKS, nic_gbps=mbit * _PAYLOAD / 1e3)
    return Emulated(scaled(layers, stretch, nbytes), topology, stretch)


@dataclass(frozen=True)
class Choice:
    """name: of the choice; layers, ranks: how many each stage has; simulated: seconds of a step."""

    name: str
    layers: tuple[int, ...]
    ranks: tuple[int, ...]
    schedule: str
    options: dict[str, Any]
    simulated: float


def choices(job: Emulated, ranks: int, microbatches: int) -> list[Choice]:
    """The proposal first."""
    layers, topology, hosts = job.layers, job.topology, ranks // HOST_RANKS
    stages = range(1, min(_MOST_STAGES, len(layers), ranks) + 1)
    found = partition(layers, SAMPLES, ranks, topology, microbatches=microbatches, stages=stages)
    evaluator = Evaluator(
        layers, uses_of(layers), PlannedJob(topology, microbatches, SAMPLES, None, False, None, 4.0)
    )

    def choice(name: str, cut: Cut) -> Choice:
        best = best_of([each for each in evaluator.best(cut) if not each.why_not])
        return Choice(name, cut.layers, cut.ranks, best.schedule, dict(best.options), best.seconds)

    proposed = found.schedule
    mine = [len(each) for each in found.layers], [len(each) for each in found.ranks]
    return [
        Choice(
            "partition",
            tuple(mine[0]),
            tuple(mine[1]),
            proposed.schedule,
            dict(proposed.options),
            proposed.seconds,
        ),
        choice("equal layers, a stage for each host", even(len(layers), hosts, ranks)),
        choice("equal parameters, a stage for each host", equal_parameters(layers, hosts, ranks)),
        choice("one stage, data parallel", even(len(layers), 1, ranks)),
    ]


def equal_parameters(layers: list[Layer], stages: int, ranks: int) -> Cut:
    """The cut whose largest stage is smallest, then that whose next largest is."""
    best: tuple[list[float], tuple[int, ...]] = ([math.inf], ())
    for counts in _compositions(len(layers), stages):
        cut = Cut(counts, even(len(layers), stages, ranks).ranks)
        sizes = [sum(layers[i].parameters for i in each) for each in cut.layer_ranges()]
        best = min(best, (sorted(sizes, reverse=True), counts))
    return Cut(best[1], even(len(layers), stages, ranks).ranks)


def _compositions(total: int, count: int) -> Iterator[tuple[int, ...]]:
    for ends in combinations(range(1, total), count - 1):
        yield tuple(b - a for a, b in pairwise((0, *ends, total)))
