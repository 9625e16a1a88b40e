"""The search for a cut that makes the steps of a running pipeline shorter, on the meshes that it has.

A layer is known by what it costs beside the others, and the ranks of a stage by how long they took for the
layers that they have: ranks that have become slow take longer for any layer. Each candidate is simulated by
the actions of the schedule that runs. All of it is arithmetic: no process group, no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from meshcast.layout import Layout
from meshcast.pipelining.action import Actions
from meshcast.pipelining.costs import Costs
from meshcast.pipelining.partition_layers import Layer
from meshcast.pipelining.partition_search import Cut, search
from meshcast.pipelining.simulate import simulate_actions
from meshcast.planning.plan import plan_many
from meshcast.topology import Topology

__all__ = ["Recut", "Running", "better_cut"]

_SIMULATED = 300  # cuts at most: training waits for it
_COMPARED = 8  # cuts, the fastest of the search, whose moves are planned
_ALIKE = 1.0  # what every layer costs where nothing is known of them


@dataclass(frozen=True)
class Running:
    """The pipeline that runs. Times are seconds of a micro-batch, for each stage on its slowest rank.

    Attributes:
        cut: how many layers each stage has.
        actions: lowered, of a step.
        rows: the stages of each set of ranks; ranks: of each stage.
        times: forward, backward, weight and transfer, as `simulate` takes them.
        nbytes: of the model's and the optimizer's state of each stage, on one rank.
    """

    cut: tuple[int, ...]
    actions: Actions
    microbatches: int
    rows: Sequence[Sequence[int]]
    ranks: Sequence[Sequence[int]]
    times: Mapping[str, Any]
    nbytes: Sequence[int]


@dataclass(frozen=True)
class Recut:
    """Another cut. before, after: seconds of a step, simulated; moving: seconds to get there."""

    cut: tuple[int, ...]
    before: float
    after: float
    moving: float


def better_cut(
    running: Running,
    layers: Sequence[Layer] | None,
    *,
    threshold: float,
    horizon: int,
    overhead: float,
    topology: Topology | None,
) -> Recut | None:
    """The cut with the shortest step, what it takes to get there shared out over `horizon` steps. None unless
    its step is shorter by the part `threshold` of the present one.

    Args:
        layers: what each costs; None: all alike.
        overhead: seconds to get to any other cut, beside those in which state is sent.
    """
    model = _Model(running, layers)
    before = model.seconds(model.present)
    limit = (1 - threshold) * before
    start = model.balanced()
    # Where stages share no ranks, none is faster than that whose slowest stage is fastest.
    if not before > 0 or (model.apart and model.busiest(start) > limit):
        return None
    count = len(running.cut)
    found = search(
        [each.forward + each.backward for each in model.layers],
        [count],
        count,  # a mesh counts as one rank: all stay where they are
        [1],
        1,
        model.bound,
        model.seconds,
        [model.present, start],
        _SIMULATED,
    )
    listed = [
        Recut(cut.layers, before, found.tried[cut], overhead + model.moving(cut, topology))
        for cut in found.best(_COMPARED)
        if cut != model.present and found.tried[cut] <= limit
    ]
    able = [each for each in listed if each.after + each.moving / horizon <= limit]
    return min(able, key=lambda each: each.after + each.moving / horizon, default=None)


class _Model:
    """Costs of cuts of what runs."""

    def __init__(self, running: Running, layers: Sequence[Layer] | None) -> None:
        self._running = running
        count = sum(running.cut)
        self.layers = [Layer(_ALIKE, _ALIKE)] * count if layers is None else list(layers)
        self.present = self._cut(running.cut)
        self.apart = all(len(row) == 1 for row in running.rows)
        self._before = {
            "forward": [0.0, *accumulate(each.forward for each in self.layers)],
            "backward": [0.0, *accumulate(each.backward for each in self.layers)],
        }
        known = Costs.of(len(running.cut), **running.times)
        self._transfer = known.transfer
        self._own: dict[str, list[float]] = {}  # seconds of each stage per unit of its layers' cost
        ranges = self.present.layer_ranges()
        for name in ("forward", "backward", "weight"):
            own = _per_stage(running.times.get(name), len(ranges))
            if own is None:
                continue
            prefix = self._before["backward" if name == "weight" else name]
            self._own[name] = [0.0] * len(ranges)
            for row in running.rows:
                cost = sum(prefix[ranges[stage].stop] - prefix[ranges[stage].start] for stage in row)
                for stage in row:
                    self._own[name][stage] = sum(own[each] for each in row) / cost

    @staticmethod
    def _cut(layers: Sequence[int]) -> Cut:
        return Cut(tuple(layers), (1,) * len(layers))

    def _times(self, cut: Cut) -> dict[str, list[float]]:
        ranges = cut.layer_ranges()
        found = {}
        for name, own in self._own.items():
            prefix = self._before["backward" if name == "weight" else name]
            found[name] = [
                each * (prefix[layers.stop] - prefix[layers.start])
                for each, layers in zip(own, ranges, strict=True)
            ]
        return found

    def seconds(self, cut: Cut) -> float:
        """Seconds of a step."""
        times: dict[str, Any] = {"weight": None, **self._times(cut)}
        costs = Costs.of(len(cut.layers), **times, transfer=self._transfer)
        return simulate_actions(self._running.actions, costs).makespan

    def busiest(self, cut: Cut) -> float:
        """Seconds that the ranks of some stages compute in a step."""
        times = self._times(cut)
        return self._running.microbatches * max(
            sum(times["forward"][stage] + times["backward"][stage] for stage in row)
            for row in self._running.rows
        )

    def bound(self, cut: Cut) -> float:
        """No step is shorter: a stage begins behind one forward of those before it, and what it ends with
        still goes back through these."""
        if not self.apart:
            return self.busiest(cut)
        times = self._times(cut)
        late = times.get("weight", [0.0] * len(cut.layers))
        longest = around = 0.0
        for forward, backward, weight in zip(times["forward"], times["backward"], late, strict=True):
            longest = max(longest, around + self._running.microbatches * (forward + backward))
            around += forward + backward - weight
        return longest

    def balanced(self) -> Cut:
        """The cut whose slowest stage is fastest, by dynamic programming over the first layers on the first
        stages."""
        forward, backward = self._before["forward"], self._before["backward"]
        count, total = len(self._running.cut), len(self.layers)
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for stage in range(count):
            a, b = self._own["forward"][stage], self._own["backward"][stage]
            following: dict[int, tuple[float, tuple[int, ...]]] = {}
            for begin, (slowest, cut) in best.items():
                left = count - stage - 1
                for end in range(begin + 1, total - left + 1) if left else [total]:
                    own = a * (forward[end] - forward[begin]) + b * (backward[end] - backward[begin])
                    if max(slowest, own) < following.get(end, (math.inf,))[0]:
                        following[end] = (max(slowest, own), (*cut, end - begin))
            best = following
        return self._cut(best[total][1])

    def moving(self, cut: Cut, topology: Topology | None) -> float:
        """Seconds in which the state of layers is sent to other stages, as if every rank of a stage had all
        of it."""
        running = self._running
        before, after = (
            [stage for stage, layers in enumerate(each.layer_ranges()) for _ in layers]
            for each in (self.present, cut)
        )
        problems = []
        for layer, (source, target) in enumerate(zip(before, after, strict=True)):
            nbytes = self._nbytes(layer, source)
            if running.ranks[source] != running.ranks[target] and nbytes:
                here, there = (Layout(list(running.ranks[each]), [Replicate()]) for each in (source, target))
                problems.append(((nbytes,), torch.uint8, here, there))
        return plan_many(problems, topology=topology).makespan if problems else 0.0

    def _nbytes(self, layer: int, stage: int) -> int:
        """Its part of what its stage holds."""
        own = self.present.layer_ranges()[stage]
        whole = sum(self.layers[each].parameters for each in own)
        part = self.layers[layer].parameters / whole if whole else 1 / len(own)
        return math.ceil(self._running.nbytes[stage] * part)


def _per_stage(times: Any, stages: int) -> list[float] | None:
    if times is None:
        return None
    return [float(times)] * stages if isinstance(times, int | float) else [float(each) for each in times]
