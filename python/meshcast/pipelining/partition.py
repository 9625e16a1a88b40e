"""Proposes a pipeline for a model and a cluster: where to cut the layers, and which ranks run each stage.

Alpa (Zheng et al., OSDI 2022) chooses stages by their compute times and leaves the resharding between them
out. Here every candidate is simulated as a whole: the schedule's grid, with compute times from the layers and
transfer times from the plans of what crosses each cut, on the very ranks of the candidate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Shard

from meshcast.base.arguments import typed_arguments
from meshcast.layout import Layout
from meshcast.pipelining.errors import ScheduleError
from meshcast.pipelining.lower import Link
from meshcast.pipelining.orders import spec_of
from meshcast.pipelining.partition_search import Cut, best_cut, even
from meshcast.pipelining.simulate import SimulationReport, simulate
from meshcast.planning.plan import plan_many
from meshcast.topology import Topology

__all__ = ["Layer", "Partition", "Value", "partition"]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that a layer makes for later ones.

    shape: of a whole micro-batch; dimension 0 is the samples. used_by: layers that take it; empty: the next
    one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    used_by: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that is never cut. forward, backward: seconds for a whole micro-batch on one rank."""

    forward: float
    backward: float
    values: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True)
class Partition:
    """A proposal.

    Attributes:
        layers: the layers of each stage.
        ranks: the ranks of each stage, a one-dimensional mesh over which samples are split.
        forward, backward: seconds of each stage per micro-batch.
        transfers: seconds per micro-batch from stage to stage, {(producer, consumer): seconds}.
        report: the simulated step.
        alternatives: {name: seconds per step} of what else one might do.
        tried: candidates simulated; exhaustive: these were all there are.
    """

    layers: list[range]
    ranks: list[list[int]]
    forward: list[float]
    backward: list[float]
    transfers: dict[Link, float]
    report: SimulationReport
    alternatives: dict[str, float]
    tried: int
    exhaustive: bool

    @property
    def step_seconds(self) -> float:
        return self.report.makespan

    def explain(self) -> str:
        """Why this one: each stage's share, what crosses, and what the alternatives would take."""
        lines = []
        for stage, (layers, ranks) in enumerate(zip(self.layers, self.ranks, strict=True)):
            out = [f"{1e3 * t:.3g} ms to stage {b}" for (a, b), t in self.transfers.items() if a == stage]
            lines.append(
                f"stage {stage}: layers {_span(layers)} on ranks {_span(ranks)}; forward "
                f"{1e3 * self.forward[stage]:.3g} ms, backward {1e3 * self.backward[stage]:.3g} ms"
                + (", sends " + ", ".join(out) if out else "")
            )
        slowest = max(range(len(self.layers)), key=lambda i: self.forward[i] + self.backward[i])
        lines.append(
            f"step: {1e3 * self.step_seconds:.4g} ms, bubble {self.report.bubble_fraction:.1%}, exposed "
            f"communication {self.report.exposed_fraction:.1%}; stage {slowest} computes longest"
        )
        lines += [
            f"{name}: {1e3 * seconds:.4g} ms, {seconds / self.step_seconds:.2f} times as long"
            for name, seconds in self.alternatives.items()
        ]
        kind = "all there are" if self.exhaustive else "a search from several of them"
        lines.append(f"{self.tried} candidates simulated: {kind}")
        return "\n".join(lines)


@typed_arguments(ScheduleError)
def partition(
    layers: Sequence[Layer],
    stages: int,
    ranks: int,
    *,
    topology: Topology,
    microbatches: int,
    samples: int,
    schedule: str = "Eager1F1B",
    delay_weight_grad: bool = False,
) -> Partition:
    """The cut of `layers` into `stages` consecutive parts, and of ranks 0..ranks-1 into one mesh for each,
    that has the shortest simulated step, resharding included.

    Args:
        layers: in order, with times as measured on one rank.
        samples: of a micro-batch. A stage on d ranks takes ceil(samples / d) / samples of a layer's time.
        microbatches, schedule, delay_weight_grad: as for the schedule that will run.
        topology: of the cluster.

    Candidates are stages on consecutive ranks, data parallel. All of them are simulated where there are at
    most 1,000; else the search starts from the most balanced one and the best of 200 others and moves
    boundaries and ranks as long as that helps. The time to sum gradients over the ranks of a stage is not
    counted.

    Raises:
        ScheduleError: fewer layers or ranks than stages, times or values that cannot be, an unknown schedule.
    """
    if not 1 <= stages <= min(len(layers), ranks):
        raise ScheduleError(
            f"stages must be in 1..{min(len(layers), ranks)} for {len(layers)} layers on {ranks} ranks, "
            f"found {stages}"
        )
    if samples < 1:
        raise ScheduleError(f"samples must be at least 1, found {samples}")
    if spec_of(schedule).stacked:
        raise ScheduleError(f"{schedule} has several stages on a rank; partition() gives each stage its own")
    uses = _uses(layers)
    evaluator = _Evaluator(layers, uses, topology, microbatches, samples, schedule, delay_weight_grad)
    found, tried, exhaustive = best_cut(
        [layer.forward + layer.backward for layer in layers], stages, ranks, samples, evaluator.seconds
    )
    free = _Evaluator(layers, {}, topology, microbatches, samples, schedule, delay_weight_grad)
    blind, _, _ = best_cut(
        [layer.forward + layer.backward for layer in layers], stages, ranks, samples, free.seconds
    )
    alternatives = {
        "layers and ranks as even as possible": evaluator.seconds(even(len(layers), stages, ranks)),
        "best where transfers are taken for free": evaluator.seconds(blind),
    }
    forward, backward, transfers, report = evaluator.simulate(found)
    return Partition(
        found.layer_ranges(), found.rank_lists(), forward, backward, transfers, report, alternatives, tried,
        exhaustive,
    )  # fmt: skip


def _uses(layers: Sequence[Layer]) -> dict[tuple[int, int], list[Value]]:
    """{(layer that makes it, layer that takes it): values}."""
    found: dict[tuple[int, int], list[Value]] = {}
    for index, layer in enumerate(layers):
        if not (layer.forward >= 0 and layer.backward >= 0):
            raise ScheduleError(
                f"layer {index}: times must be >= 0, found {layer.forward} and {layer.backward}"
            )
        for value in layer.values:
            for user in value.used_by or (index + 1,):
                if not index < user < len(layers) + (not value.used_by):
                    raise ScheduleError(
                        f"layer {index}: its value cannot be used by layer {user}; use {index + 1} to "
                        f"{len(layers) - 1}"
                    )
                found.setdefault((index, user), []).append(value)
    return found


class _Evaluator:
    """Simulates candidates; a transfer between two meshes is planned once."""

    def __init__(
        self,
        layers: Sequence[Layer],
        uses: Mapping[tuple[int, int], list[Value]],
        topology: Topology,
        microbatches: int,
        samples: int,
        schedule: str,
        delay_weight_grad: bool,
    ) -> None:
        self.layers, self.uses, self.topology = layers, uses, topology
        self.microbatches, self.samples = microbatches, samples
        self.schedule, self.delay_weight_grad = schedule, delay_weight_grad
        self._planned: dict[tuple[object, ...], float] = {}

    def seconds(self, cut: Cut) -> float:
        return self.simulate(cut)[3].makespan

    def simulate(self, cut: Cut) -> tuple[list[float], list[float], dict[Link, float], SimulationReport]:
        forward, backward = [], []
        for layers, ranks in zip(cut.layer_ranges(), cut.rank_lists(), strict=True):
            share = -(-self.samples // len(ranks)) / self.samples
            forward.append(share * sum(self.layers[i].forward for i in layers))
            backward.append(share * sum(self.layers[i].backward for i in layers))
        transfers = self._transfers(cut)
        report = simulate(
            self.schedule,
            len(forward),
            self.microbatches,
            forward,
            backward,
            transfer=transfers,
            links=sorted(transfers) if transfers else None,
            delay_weight_grad=self.delay_weight_grad,
        )
        return forward, backward, transfers, report

    def _transfers(self, cut: Cut) -> dict[Link, float]:
        stage_of = [stage for stage, layers in enumerate(cut.layer_ranges()) for _ in layers]
        crossing: dict[Link, dict[int, Value]] = {}
        for (maker, user), values in self.uses.items():
            if user < len(stage_of) and stage_of[maker] != stage_of[user]:
                link = stage_of[maker], stage_of[user]
                crossing.setdefault(link, {}).update({id(value): value for value in values})
        # Each stage is linked to the next, if only by an order: the simulator needs no more than that.
        found: dict[Link, float] = {(stage, stage + 1): 0.0 for stage in range(stage_of[-1])}
        meshes = cut.rank_lists()
        for (a, b), across in crossing.items():
            found[a, b] = self._planned_seconds(list(across.values()), meshes[a], meshes[b])
        return found

    def _planned_seconds(self, values: list[Value], src: list[int], dst: list[int]) -> float:
        key = (*map(id, values), src[0], len(src), dst[0], len(dst))
        if key not in self._planned:
            layouts = Layout(src, [Shard(0)]), Layout(dst, [Shard(0)])
            problems = [(value.shape, value.dtype, *layouts) for value in values]
            self._planned[key] = plan_many(problems, topology=self.topology).makespan
        return self._planned[key]


def _span(items: Sequence[int]) -> str:
    return str(items[0]) if len(items) == 1 else f"{items[0]} to {items[-1]}"
