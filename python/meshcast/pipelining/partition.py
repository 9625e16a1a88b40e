"""Proposes a pipeline for a model and a cluster: where to cut it, which ranks run each stage, and how.

Alpa (Zheng et al., OSDI 2022) chooses stages by their compute times and leaves the resharding between them
out. Here every candidate is simulated as a whole: the schedule's grid, with compute times from the layers,
transfer times from the plans of what crosses each cut, on the very ranks of the candidate, and the sums
inside of its stages: of tensor-parallel layers in each micro-batch, of gradients at the end of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from meshcast.base.checks import shown, typed_arguments
from meshcast.pipelining.candidates import Candidate, best_of
from meshcast.pipelining.classes import CLASSES
from meshcast.pipelining.errors import ScheduleError
from meshcast.pipelining.lower import Link
from meshcast.pipelining.orders import spec_of
from meshcast.pipelining.partition_costs import Evaluator, Job
from meshcast.pipelining.partition_layers import Layer, Value, uses_of
from meshcast.pipelining.partition_measure import measured_layers
from meshcast.pipelining.partition_search import Cut, even, search
from meshcast.pipelining.pipeline_stage import PipelineStage
from meshcast.pipelining.schedule import PipelineSchedule
from meshcast.pipelining.simulate import SimulationReport
from meshcast.topology import Topology

__all__ = ["Layer", "Partition", "Value", "partition"]

_MOST_RANKS = 1024
_COMPARED = 8  # cuts, the fastest of the search, for which all schedules are simulated


@dataclass(frozen=True, slots=True)
class Partition:
    """A proposal.

    Attributes:
        layers: the layers of each stage; names: those of their modules.
        ranks: the ranks of each stage; meshes: the same as rows of tensor-parallel ranks. Samples are split
            over the rows.
        schedule: with its options, micro-batches and bytes of activations.
        forward, backward: seconds of each stage per micro-batch, sums over tensor-parallel ranks included.
        gradient_sums: seconds of each stage per step.
        transfers: seconds per micro-batch from stage to stage, {(producer, consumer): seconds}.
        step_seconds: of a step, simulated.
        report: the simulated step, without the sums of gradients.
        alternatives: {name: seconds per step} of what else one might do, infinite where it does not fit.
        tried: cuts simulated; exhaustive: no other is faster under the schedule that they were compared by.
    """

    layers: list[range]
    names: list[list[str]]
    ranks: list[list[int]]
    meshes: list[list[list[int]]]
    schedule: Candidate
    forward: list[float]
    backward: list[float]
    gradient_sums: list[float]
    transfers: dict[Link, float]
    report: SimulationReport
    alternatives: dict[str, float]
    tried: int
    exhaustive: bool

    @property
    def step_seconds(self) -> float:
        return self.schedule.seconds

    def device_meshes(self, device_type: str) -> list[DeviceMesh]:
        """The meshes of all stages, with dimensions "data" and "tensor". Every rank of the job calls it."""
        return [DeviceMesh(device_type, mesh, mesh_dim_names=("data", "tensor")) for mesh in self.meshes]

    def make(
        self, stage: PipelineStage, loss_fn: Callable[..., Any] | None = None, **more: Any
    ) -> PipelineSchedule:
        """The schedule for this rank's stage. more: further arguments of its class."""
        made: Any = CLASSES[self.schedule.schedule]
        return made(stage, self.schedule.microbatches, loss_fn=loss_fn, **{**self.schedule.options, **more})

    def explain(self) -> str:
        """Explains the choice: each stage's share, what it sends, and what the alternatives would take."""
        lines = []
        for stage, (layers, ranks) in enumerate(zip(self.layers, self.ranks, strict=True)):
            tensor = len(self.meshes[stage][0])
            out = [f"{1e3 * t:.3g} ms to stage {b}" for (a, b), t in self.transfers.items() if a == stage]
            lines.append(
                f"stage {stage}: layers {_span(layers)} on ranks {_span(ranks)}"
                + (f", {len(ranks) // tensor} x {tensor} tensor parallel" if tensor > 1 else "")
                + f"; forward {1e3 * self.forward[stage]:.3g} ms, "
                + f"backward {1e3 * self.backward[stage]:.3g} ms"
                + (f", sums gradients in {1e3 * s:.3g} ms" if (s := self.gradient_sums[stage]) else "")
                + (", sends " + ", ".join(out) if out else "")
            )
        slowest = max(range(len(self.layers)), key=lambda i: self.forward[i] + self.backward[i])
        lines.append(
            f"{self.schedule.name} with {self.schedule.microbatches} micro-batches: "
            f"{1e3 * self.step_seconds:.4g} ms, bubble {self.report.bubble_fraction:.1%}, exposed "
            f"communication {self.report.exposed_fraction:.1%}; stage {slowest} computes longest"
        )
        lines += [
            f"{name}: "
            + (
                "does not fit into memory"
                if seconds == math.inf
                else f"{1e3 * seconds:.4g} ms, {seconds / self.step_seconds:.2f} times as long"
            )
            for name, seconds in self.alternatives.items()
        ]
        kind = (
            "no other can be faster under the schedule they are compared by"
            if self.exhaustive
            else "a search"
        )
        lines.append(f"{self.tried} cuts simulated: {kind}")
        return "\n".join(lines)


@typed_arguments(ScheduleError)
def partition(
    model: torch.nn.Module | Sequence[Layer],
    example: Any,
    ranks: int,
    topology: Topology,
    *,
    microbatches: int = 16,
    stages: int | Sequence[int] | None = None,
    layers: Sequence[str] | None = None,
    tensor: Sequence[int] = (),
    tensor_plan: Mapping[str, ParallelStyle] | None = None,
    schedule: str | None = None,
    delay_weight_grad: bool = False,
    memory: float | None = None,
    copies: float = 4.0,
) -> Partition:
    """The cut of a model into consecutive stages, and of ranks 0..ranks-1 into one mesh for each, that has
    the shortest simulated step, resharding and sums inside the stages included.

    One process calls it, which measures alone; what it finds can be pickled and sent to the ranks of a job.

    Args:
        model: a module, which is measured here, in one process; or its layers in order, with times as
            measured on one rank.
        example: of a module one micro-batch, a tensor or a tuple of arguments; of layers the number of
            samples that their times are of. A stage whose samples are split over d ranks takes
            ceil(samples / d) / samples of a layer's time.
        topology: of the cluster.
        microbatches: of a step.
        stages: how many, or several numbers to choose from; None: any.
        layers: names of the submodules of a module that are not cut; None: its children, and instead of a
            Sequential, ModuleList or ModuleDict those of it. Each is called once.
        tensor: tensor-parallel degrees that stages may have besides 1.
        tensor_plan: what these share, {name: ColwiseParallel() or RowwiseParallel()}, names as of the model
            with "*" for any part, as in "layers.*.up". Each degree is measured, with the part of the weights
            that a rank has.
        schedule: that will run; None: it is chosen, with weights delayed or not and warm-ups in between.
        delay_weight_grad: as for the schedule, where that is given.
        memory: bytes that a rank may fill with parameters and activations; None: any number.
        copies: how often the bytes of its parameters are there: with gradient and two averages of Adam, 4.

    Candidates are stages on consecutive ranks, whose tensor-parallel ranks follow each other. For each number
    of stages that has at most 50,000 of them all are listed, and simulated in the order of a bound until
    none that is left can be faster; else a search starts from balanced and random ones and moves boundaries,
    ranks and degrees as long as that helps. They are compared by the eager schedule (1F1B where it does not
    fit into memory), and the fastest by all schedules. Steps within one percent count as equally long, and
    the one that holds least is taken of these.

    Raises:
        ScheduleError: fewer layers or ranks than stages, times or values that cannot be, an unknown schedule,
            too little memory for every candidate.
        LayoutError: a module that cannot be measured like that.

    Example::

        import meshcast
        import torch
        from meshcast.pipelining import partition

        model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
        topology = meshcast.Topology.uniform(ranks_per_host=2, nic_gbps=10)
        found = partition(model, torch.randn(8, 16), 4, topology, microbatches=8, stages=2)
        assert sum(map(len, found.ranks)) == 4
    """
    if tensor and not tensor_plan and isinstance(model, torch.nn.Module):
        raise ScheduleError("tensor-parallel degrees of a module need tensor_plan=: what its ranks share")
    if any(not isinstance(degree, int) or degree < 1 for degree in tensor):
        raise ScheduleError(f"tensor-parallel degrees are numbers of at least 1, found {shown(tensor)}")
    degrees = sorted({degree for degree in tensor if degree > 1})
    if isinstance(model, torch.nn.Module):
        given = example if isinstance(example, tuple) else (example,)
        samples = next((len(each) for each in given if isinstance(each, torch.Tensor) and each.dim()), 0)
        known = measured_layers(model, given, layers, degrees, tensor_plan or {})
    else:
        known, samples = list(model), example
        if layers is not None or tensor_plan:
            raise ScheduleError("layers= and tensor_plan= are of a module; these are layers with their times")
        if degrees:
            raise ScheduleError("layers have the degrees that their tensor= names: leave tensor= out")
    if not isinstance(samples, int) or samples < 1:
        raise ScheduleError(f"samples must be at least 1, found {shown(samples)}")
    if not (copies >= 0 and (memory is None or memory > 0)):
        raise ScheduleError(f"memory must be above 0 and copies at least 0, found {memory} and {copies}")
    if not isinstance(ranks, int) or not 1 <= ranks <= _MOST_RANKS:
        raise ScheduleError(f"ranks must be in 1..{_MOST_RANKS}, found {shown(ranks)}")
    most = min(len(known), ranks)
    counts = (
        list(range(1, most + 1)) if stages is None else [stages] if isinstance(stages, int) else list(stages)
    )
    if not counts or not all(1 <= count <= most for count in counts):
        wrong = next((count for count in counts if not 1 <= count <= most), None)
        raise ScheduleError(
            f"stages must be in 1..{most} for {len(known)} layers on {ranks} ranks, found {wrong}"
        )
    if schedule is not None and spec_of(schedule).stacked:
        raise ScheduleError(f"{schedule} has several stages on a rank; partition() gives each stage its own")
    job = Job(topology, microbatches, samples, schedule, delay_weight_grad, memory, copies)
    return _proposed(Evaluator(known, uses_of(known), job), counts, ranks)


def _proposed(evaluator: Evaluator, counts: Sequence[int], ranks: int) -> Partition:
    known, job = evaluator.layers, evaluator.job
    times = [layer.forward + layer.backward for layer in known]

    def looked(by: Evaluator, numbers: Sequence[int]) -> tuple[Cut | None, Candidate | None, int, bool]:
        """The best of the evaluator's cuts, with its schedule."""
        found = search(times, numbers, ranks, by.degrees, job.samples, by.bound, by.seconds)
        listed = {id(each): (each, cut) for cut in found.best(_COMPARED) for each in by.best(cut)}
        able = [each for each, _ in listed.values() if not each.why_not]
        chosen = best_of(able) if able else None
        best = None if chosen is None else listed[id(chosen)][1]
        return best, chosen, len(found.tried), found.exhaustive

    cut, chosen, tried, exhaustive = looked(evaluator, counts)
    if cut is None or chosen is None:
        raise ScheduleError(
            f"no cut into {', '.join(map(str, counts))} stages on {ranks} ranks fits into {job.memory:.4g} "
            "bytes of a rank, with activations: give more ranks, smaller micro-batches or more memory="
        )

    def alternative(cut: Cut) -> float:
        able = [each.seconds for each in evaluator.best(cut) if not each.why_not]
        return min(able, default=math.inf)

    count = len(cut.layers)
    alternatives = {"layers and ranks as even as possible": alternative(even(len(known), count, ranks))}
    if count > 1:
        blind = looked(Evaluator(known, {}, job), [count])[0]
        if blind is not None:
            alternatives["best where transfers are taken for free"] = alternative(blind)
    if 1 in counts:
        alternatives["one stage, data parallel"] = alternative(even(len(known), 1, ranks))
    if (most := min(len(known), ranks)) in counts:
        alternatives["as many stages as there can be"] = alternative(even(len(known), most, ranks))
    costs = evaluator.stages(cut)
    lists = cut.rank_lists()
    meshes = [
        [ranks[i : i + degree] for i in range(0, len(ranks), degree)]
        for ranks, degree in zip(lists, cut.degrees(), strict=True)
    ]
    return Partition(
        cut.layer_ranges(),
        [[known[i].name for i in layers] for layers in cut.layer_ranges()],
        lists,
        meshes,
        chosen,
        [each.forward for each in costs],
        [each.backward for each in costs],
        [each.summed for each in costs],
        evaluator.transfers(cut),
        evaluator.report(cut, chosen),
        alternatives,
        tried,
        exhaustive,
    )


def _span(items: Sequence[int]) -> str:
    return str(items[0]) if len(items) == 1 else f"{items[0]} to {items[-1]}"
