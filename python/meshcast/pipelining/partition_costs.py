"""The simulated costs of candidates of `partition`: compute, transfers between stages, sums inside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshcast.layout import Layout
from meshcast.pipelining.candidates import Candidate, Times, candidates, ended
from meshcast.pipelining.lower import Link
from meshcast.pipelining.partition_layers import Layer, Value
from meshcast.pipelining.partition_search import Cut
from meshcast.pipelining.simulate import SimulationReport, simulate
from meshcast.planning.plan import plan_many
from meshcast.topology import Topology

__all__ = ["Evaluator", "Job", "StageCost"]


@dataclass(frozen=True, slots=True)
class Job:
    """The job that is planned. samples: of a micro-batch. schedule: by name, or None where it is chosen too.
    memory: bytes of a rank, or None. copies: how often a rank holds the bytes of its parameters."""

    topology: Topology
    microbatches: int
    samples: int
    schedule: str | None
    delay_weight_grad: bool
    memory: float | None
    copies: float


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of a micro-batch, but for `summed`: of the gradients in a step. Bytes are those of a rank."""

    forward: float
    backward: float
    inputs: float
    summed: float
    parameters: int
    held: float


@dataclass(frozen=True)
class _Mesh:
    """first, first + 1, ... as (data, tensor) ranks."""

    first: int
    data: int
    tensor: int

    @cached_property
    def rows(self) -> list[list[int]]:
        return [[self.first + row * self.tensor + i for i in range(self.tensor)] for row in range(self.data)]

    def layout(self, *placements: Placement) -> Layout:
        return Layout(self.rows, list(placements))


class Evaluator:
    """Simulates candidates; a transfer between two meshes is planned once, as is a sum over one."""

    def __init__(
        self, layers: Sequence[Layer], uses: Mapping[tuple[int, int], list[Value]], job: Job
    ) -> None:
        self.layers, self.uses, self.job = layers, uses, job
        self.degrees = sorted({1, *(degree for layer in layers for degree in layer.tensor)})
        self._stages: dict[tuple[range, _Mesh], StageCost] = {}
        self._planned: dict[tuple[object, ...], float] = {}
        self._lines: dict[tuple[_Mesh, bool, int], tuple[float, float]] = {}

    # ---- of a stage ------------------------------------------------------------------------------------

    def stages(self, cut: Cut) -> list[StageCost]:
        return [self._stage(*each) for each in zip(cut.layer_ranges(), _meshes(cut), strict=True)]

    def _stage(self, layers: range, mesh: _Mesh) -> StageCost:
        key = layers, mesh
        if key not in self._stages:
            share = -(-self.job.samples // mesh.data) / self.job.samples
            own = [self.layers[i].tensor.get(mesh.tensor, self.layers[i]) for i in layers]

            def sums(each: Sequence[int]) -> float:
                return sum(self._sum_seconds(mesh, size * share, over_data=False) for size in each)

            late = sum(sums(layer.sums_backward) for layer in own)
            inputs = sum(layer.backward / 2 if layer.inputs is None else layer.inputs for layer in own)
            parameters = sum(layer.parameters for layer in own)
            self._stages[key] = StageCost(
                share * sum(layer.forward for layer in own) + sum(sums(layer.sums_forward) for layer in own),
                share * sum(layer.backward for layer in own) + late,
                share * inputs + late,
                self._sum_seconds(mesh, parameters, over_data=True),
                parameters,
                share * sum(layer.held for layer in own),
            )
        return self._stages[key]

    def _sum_seconds(self, mesh: _Mesh, size: float, *, over_data: bool) -> float:
        """Seconds to sum tensors of `size` bytes on each rank over its data-parallel or its tensor-parallel
        ranks, in the whole mesh at once. The sum is a plan from Partial to Replicate, which moves as little
        as an all-reduce can. Times are interpolated between the powers of four elements around the size."""
        if size == 0 or (mesh.data if over_data else mesh.tensor) == 1:
            return 0.0
        power = (max(1, int(size) // 4).bit_length() - 1) // 2 * 2
        key = mesh, over_data, power
        if key not in self._lines:
            others = mesh.tensor if over_data else mesh.data
            before, after = (
                [each, Shard(0)] if over_data else [Shard(0), each] for each in (Partial(), Replicate())
            )
            layouts = mesh.layout(*before), mesh.layout(*after)
            low, high = (
                plan_many(
                    [((others * elements,), torch.float32, *layouts)], topology=self.job.topology
                ).makespan
                for elements in (1 << power, 4 << power)
            )
            self._lines[key] = low, high
        low, high = self._lines[key]
        return low + (high - low) * (size / 4 - (1 << power)) / (3 << power)

    # ---- of a cut --------------------------------------------------------------------------------------

    def bound(self, cut: Cut) -> float:
        """No schedule of the cut is faster: each stage starts behind one forward of those before it, computes
        all micro-batches, and sums its gradients. Infinite where the parameters do not fit."""
        longest = before = 0.0
        for stage in self.stages(cut):
            if self._room(stage) < 0:
                return math.inf
            longest = max(
                longest, before + self.job.microbatches * (stage.forward + stage.backward) + stage.summed
            )
            before += stage.forward
        return longest

    def _room(self, stage: StageCost) -> float:
        """Bytes left for activations."""
        if self.job.memory is None:
            return math.inf
        return self.job.memory - self.job.copies * stage.parameters

    def seconds(self, cut: Cut) -> float:
        """Seconds of a step under the schedule that was asked for; else under the eager one, or under 1F1B,
        which holds less, where the eager one does not fit."""
        orders = ("Eager1F1B", "1F1B") if self.job.schedule is None else (self.job.schedule,)
        if len(cut.layers) == 1 and self.job.schedule is None:
            orders = ("1F1B",)
        stages, transfers = self.stages(cut), self.transfers(cut)
        for name in orders:
            report = self._report(name, stages, transfers, delay_weight_grad=self.job.delay_weight_grad)
            if all(
                peak * stage.held <= self._room(stage)
                for peak, stage in zip(report.peak_activations, stages, strict=True)
            ):
                return ended(report, [stage.summed for stage in stages])
        return math.inf

    def best(self, cut: Cut) -> list[Candidate]:
        """The schedules that there are for it, or the one that was asked for."""
        stages, transfers = self.stages(cut), self.transfers(cut)
        if self.job.schedule is not None:
            seconds = self.seconds(cut)
            name, options = self.job.schedule, {"delay_weight_grad": True}
            chosen = options if self.job.delay_weight_grad else {}
            report = self._report(name, stages, transfers, **chosen)
            held = [peak * stage.held for peak, stage in zip(report.peak_activations, stages, strict=True)]
            why_not = "too little memory" if seconds == math.inf else ""
            return [
                Candidate(name, self.job.microbatches, chosen, seconds, report.bubble_fraction, held, why_not)
            ]
        times = Times(
            self.job.samples,
            [stage.forward for stage in stages],
            [stage.backward for stage in stages],
            [stage.inputs for stage in stages],
            [stage.backward - stage.inputs for stage in stages],
            transfers,
            [stage.held for stage in stages],
            [0.0] * len(stages),
        )
        rooms = [self._room(stage) for stage in stages]
        return candidates(
            [[stage] for stage in range(len(stages))],
            [self.job.microbatches],
            self.job.samples * self.job.microbatches,
            [times],
            sorted(transfers) if transfers else None,
            [None if room == math.inf else room for room in rooms],
            [stage.summed for stage in stages],
        )

    def report(self, cut: Cut, candidate: Candidate) -> SimulationReport:
        return self._report(candidate.schedule, self.stages(cut), self.transfers(cut), **candidate.options)

    def _report(
        self, name: str, stages: Sequence[StageCost], transfers: Mapping[Link, float], **options: bool
    ) -> SimulationReport:
        more: dict[str, object] = dict(options)
        return simulate(
            name,
            len(stages),
            self.job.microbatches,
            [stage.forward for stage in stages],
            [stage.backward for stage in stages],
            [stage.backward - stage.inputs for stage in stages],
            transfers,
            links=sorted(transfers) if transfers else None,
            **more,  # type: ignore[arg-type]
        )

    def transfers(self, cut: Cut) -> dict[Link, float]:
        """Seconds of a micro-batch over each link."""
        stage_of = [stage for stage, layers in enumerate(cut.layer_ranges()) for _ in layers]
        crossing: dict[Link, dict[int, Value]] = {}
        for (maker, user), values in self.uses.items():
            if user < len(stage_of) and stage_of[maker] != stage_of[user]:
                link = stage_of[maker], stage_of[user]
                crossing.setdefault(link, {}).update({id(value): value for value in values})
        # Each stage is linked to the next, if only by an order: the simulator needs no more than that.
        found: dict[Link, float] = dict.fromkeys(pairwise(range(stage_of[-1] + 1)), 0.0)
        meshes = _meshes(cut)
        for (a, b), across in crossing.items():
            found[a, b] = self._planned_seconds(list(across.values()), meshes[a], meshes[b])
        return found

    def _planned_seconds(self, values: list[Value], src: _Mesh, dst: _Mesh) -> float:
        key = (*((value.shape, value.dtype) for value in values), src, dst)
        if key not in self._planned:
            layouts = src.layout(Shard(0), Replicate()), dst.layout(Shard(0), Replicate())
            problems = [(value.shape, value.dtype, *layouts) for value in values]
            self._planned[key] = plan_many(problems, topology=self.job.topology).makespan
        return self._planned[key]


def _meshes(cut: Cut) -> list[_Mesh]:
    return [
        _Mesh(ranks[0], len(ranks) // degree, degree)
        for ranks, degree in zip(cut.rank_lists(), cut.degrees(), strict=True)
    ]
