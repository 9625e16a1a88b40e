"""What the benchmark of partition() measures, without its sleeps: every choice of a small model takes a step,
which checks its gradients. The ranks are four."""

from __future__ import annotations

import sys
from pathlib import Path

from meshcast.pipelining import Layer, Value

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.pipeline.partition import SAMPLES, Choice, choices, emulated, measure

SKIPPED = Value((SAMPLES, 500), used_by=(1, 3))
LAYERS = [
    Layer(0.1, 0.2, (Value((SAMPLES, 300)), SKIPPED), inputs=0.15, parameters=40000),
    Layer(0.2, 0.4, (Value((SAMPLES, 700)),), parameters=4000),
    Layer(0.1, 0.2, (Value((SAMPLES, 200)),), parameters=4000),
    Layer(0.3, 0.6, parameters=400000),
]
JOB = emulated(LAYERS, 0.02, 2000.0)


def obvious_ones_and_the_proposal(context) -> None:
    chosen = choices(JOB, context.world, 4)
    found = measure(JOB, chosen, 4, 2)
    assert [each["name"] for each in found] == [each.name for each in chosen]
    for each in found:
        assert len(each["seconds"]) == len(each["late"]) == len(each["others"]) == 2
        assert all(seconds > 0.5 * each["simulated"] for seconds in each["seconds"]), each


def uneven_ones(context) -> None:  # noqa: ARG001
    cuts = [((1, 3), (1, 3)), ((2, 2), (3, 1)), ((1, 1, 1, 1), (1, 1, 1, 1)), ((1, 2, 1), (1, 1, 2))]
    options = ({"delay_weight_grad": True}, {})
    for number, (layers, ranks) in enumerate(cuts):
        name = ("Eager1F1B", "ZBH1")[number % 2]
        measure(JOB, [Choice(name, layers, ranks, name, options[number % 2], 1.0)], 4, 1)


CASES = [obvious_ones_and_the_proposal, uneven_ones]
