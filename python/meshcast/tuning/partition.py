"""Proposes a pipeline for a model and a cluster: where to cut it, which ranks run each stage, and how.

Alpa (Zheng et al., OSDI 2022) chooses stages by their compute times and leaves the resharding between them
out. Here every candidate is simulated as a whole: the schedule's grid, with compute times from the layers,
transfer times from the plans of what crosses each cut, on the very ranks of the candidate, and the sums
inside of its stages: of tensor-parallel layers in each micro-batch, of gradients at the end of the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_flatten, tree_map_only

from ..base.checks import shown, typed_arguments
from ..errors import Caller, LayoutError
from ..layout import Layout
from ..pipelining.action import Actions, Link, ScheduleError
from ..pipelining.orders import build, spec_of
from ..pipelining.schedule import PipelineSchedule
from ..pipelining.schedules import CLASSES
from ..pipelining.simulate import SimulationReport
from ..pipelining.stage import PipelineStage
from ..planning.plan import plan_many
from ..topology import Topology
from .candidates import Candidate, Placed, Times, best_of, kept_bytes, restored
from .search import Cut, Layer, Search, Value, even, least_seconds, uses_of

__all__ = ["Evaluator", "Layer", "Partition", "PlannedJob", "Value", "measured_layers", "partition"]


_ROUNDS = 5  # behind one that is not counted
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(slots=True)
class _Call:
    """The model's call of a layer. Inputs and outputs are kept, so that no other tensor gets their place."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor] = field(default_factory=list)

    def inputs(self) -> list[torch.Tensor]:
        return _tensors((self.args, self.kwargs))


def measured_layers(
    model: nn.Module,
    example: tuple[Any, ...],
    names: Sequence[str] | None,
    degrees: Sequence[int],
    plan: Mapping[str, ParallelStyle],
) -> list[Layer]:
    """Returns the layers of the model in the order in which it calls them.

    The model runs once, and copies of its layers run with the inputs that these had. Buffers, gradients and
    random state of the model stay.

    Args:
        example: the arguments of a micro-batch.
        names: of the submodules that are layers; None: the children, those of containers instead of these.
        degrees: tensor-parallel degrees to measure, of at least 2.
        plan: {name of a submodule, "*" for any part: ColwiseParallel() or RowwiseParallel()}.

    Raises:
        LayoutError: names, degrees or plans that do not fit; layers that are not called once.
    """
    calls = _called(model, example, names)
    owned = {id(each) for call in calls for each in call.module.parameters()}
    left = [name for name, each in model.named_parameters() if id(each) not in owned]
    if left:
        raise LayoutError(f"parameter {left[0]} belongs to no layer: name its module in layers=")
    for pattern, style in plan.items():
        if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
            raise LayoutError(
                f"tensor_plan has {type(style).__name__} for {pattern!r}; it can measure "
                "ColwiseParallel and RowwiseParallel"
            )
        if not any(_planned(call, {pattern: style}) for call in calls):
            raise LayoutError(f"tensor_plan has {pattern!r}, which no submodule of a layer is called")
    values = _values(calls)
    found = []
    for call, made in zip(calls, values, strict=True):
        whole = _measured(call, call.module)
        shared = {degree: _shared(call, plan, degree) for degree in degrees if _planned(call, plan)}
        found.append(replace(whole, values=made, tensor=shared, name=call.name))
    return found


def _called(model: nn.Module, example: tuple[Any, ...], names: Sequence[str] | None) -> list[_Call]:
    """Runs the model once."""
    modules = (
        dict(_children(model, "")) if names is None else {name: _submodule(model, name) for name in names}
    )
    if not modules:
        raise LayoutError(f"{type(model).__name__} has no submodules to cut between")
    calls: list[_Call] = []

    def before(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append(_Call(name, module, args, kwargs))

        return note

    def after(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        calls[-1].outputs = _tensors(output)

    with restored([model], _device(model)), ExitStack() as hooks:
        for name, module in modules.items():
            for handle in (
                module.register_forward_pre_hook(before(name), with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True),
            ):
                hooks.callback(handle.remove)
        with torch.enable_grad():
            model(*example)
    called = [call.name for call in calls]
    for name in modules:
        if called.count(name) != 1:
            raise LayoutError(
                f"the model calls layer {name} {called.count(name)} times, and a layer is called "
                "once: name other layers in layers="
            )
    return calls


def _children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, _CONTAINERS):
            yield from _children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise LayoutError(f"the model has no submodule {name!r}, which layers= names") from None


def _values(calls: Sequence[_Call]) -> list[tuple[Value, ...]]:
    """Returns the values that each layer makes for later ones. What the model itself computes between two
    layers counts as a part of the first of them, since a stage would do it there."""
    first_known: dict[int, int] = {}
    made: list[dict[int, tuple[torch.Tensor, list[int]]]] = [{} for _ in calls]
    for index, call in enumerate(calls):
        for value in call.inputs():
            maker = first_known.setdefault(id(value), max(0, index - 1))
            if maker < index:
                _, users = made[maker].setdefault(id(value), (value, []))
                users.append(index)
        for value in call.outputs:
            first_known.setdefault(id(value), index)
    return [
        tuple(
            Value(tuple(value.shape), value.dtype, tuple(sorted(set(users))))
            for value, users in each.values()
        )
        for each in made
    ]


# ---- a layer -------------------------------------------------------------------------------------------


def _measured(call: _Call, module: nn.Module) -> Layer:
    """Returns what a module takes and holds instead of the one that was called."""
    module = deepcopy(module)
    device = _device(module, *call.inputs())
    times: list[tuple[float, float, float]] = []
    held = 0
    with torch.random.fork_rng(enabled=True), torch.enable_grad():
        for _ in range(1 + _ROUNDS):
            args, kwargs = tree_map_only(torch.Tensor, _fresh, (call.args, call.kwargs))
            with kept_bytes(module) as sizes:
                begin = _now(device)
                made = _tensors(module(*args, **kwargs))
                forward = _now(device) - begin
            held = sum(sizes.values())
            starts, given, trained = (
                [each for each in tensors if each.requires_grad]
                for tensors in (made, _tensors((args, kwargs)), module.parameters())
            )
            inputs = _backward(starts, given, device, keep=True)
            times.append((forward, _backward(starts, [*given, *trained], device, keep=False), inputs))
    forward, backward, inputs = map(median, zip(*times[1:], strict=True))
    parameters = sum(each.nbytes for each in trained)
    return Layer(forward, backward, inputs=min(inputs, backward), parameters=parameters, held=held)


def _backward(
    starts: list[torch.Tensor], ends: list[torch.Tensor], device: torch.device, *, keep: bool
) -> float:
    """Returns the seconds of the gradients of `ends`."""
    if not starts or not ends:
        return 0.0
    seeds = [torch.ones_like(each) for each in starts]
    begin = _now(device)
    torch.autograd.grad(starts, ends, seeds, retain_graph=keep, allow_unused=True)
    return _now(device) - begin


def _fresh(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)


def _device(module: nn.Module, *inputs: torch.Tensor) -> torch.device:
    return next((each.device for each in (*module.parameters(), *inputs)), torch.device("cpu"))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(values)[0] if isinstance(each, torch.Tensor)]


# ---- tensor parallelism --------------------------------------------------------------------------------


def _shared(call: _Call, plan: Mapping[str, ParallelStyle], degree: int) -> Layer:
    """Returns the layer as the first of `degree` ranks has it."""
    module = deepcopy(call.module)
    cut = _planned(replace(call, module=module), plan)
    for name, (linear, style) in cut.items():
        _keep_first_part(linear, isinstance(style, ColwiseParallel), degree, name)
    try:
        forward, backward = _sums(call, module, cut)
        return replace(_measured(call, module), sums_forward=forward, sums_backward=backward)
    except Exception as error:
        raise LayoutError(
            f"layer {call.name} does not run as one of {degree} tensor-parallel ranks has it: "
            f"{error}; leave {degree} out of tensor=, or change tensor_plan="
        ) from error


def _planned(call: _Call, plan: Mapping[str, ParallelStyle]) -> dict[str, tuple[nn.Module, ParallelStyle]]:
    """{name in the model: (module, its style)} of what the plan names in a layer. "*" is a part of a name."""
    found = {}
    for own, module in call.module.named_modules():
        name = f"{call.name}.{own}" if own else call.name
        parts = name.split(".")
        for pattern, style in plan.items():
            wanted = pattern.split(".")
            if len(wanted) == len(parts) and all(map(fnmatch, parts, wanted)):
                found[name] = (module, style)
    return found


def _keep_first_part(module: nn.Module, by_outputs: bool, degree: int, name: str) -> None:
    if not isinstance(module, nn.Linear):
        raise LayoutError(
            f"tensor_plan names {name}, a {type(module).__name__}; it can measure torch.nn.Linear"
        )
    dim = 0 if by_outputs else 1
    part = module.weight.shape[dim] // degree
    if part * degree != module.weight.shape[dim]:
        raise LayoutError(
            f"{degree} tensor-parallel ranks do not divide the {module.weight.shape[dim]} "
            f"{('inputs', 'outputs')[by_outputs]} of {name}: leave {degree} out of tensor="
        )
    with torch.no_grad():
        trained = module.weight.requires_grad
        module.weight = nn.Parameter(module.weight.narrow(dim, 0, part).clone(), trained)
        if by_outputs and module.bias is not None:
            module.bias = nn.Parameter(module.bias[:part].clone(), module.bias.requires_grad)


def _sums(
    call: _Call, module: nn.Module, cut: Mapping[str, tuple[nn.Module, ParallelStyle]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Runs the layer once. Returns the bytes of each sum in the forward and in the backward: outputs of
    row-wise modules, and gradients of inputs of column-wise ones."""
    forward: list[int] = []
    backward: list[int] = []

    def column_wise(_module: Any, args: Any, _output: torch.Tensor) -> None:
        backward.extend([args[0].nbytes] if args[0].requires_grad else [])

    def row_wise(_module: Any, _args: Any, output: torch.Tensor) -> None:
        forward.append(output.nbytes)

    with ExitStack() as hooks, torch.random.fork_rng(enabled=True):
        for linear, style in cut.values():
            note = column_wise if isinstance(style, ColwiseParallel) else row_wise
            hooks.callback(linear.register_forward_hook(note).remove)
        args, kwargs = tree_map_only(torch.Tensor, _fresh, (call.args, call.kwargs))
        module(*args, **kwargs)
    return tuple(forward), tuple(backward)


@dataclass(frozen=True, slots=True)
class PlannedJob:
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
    """Seconds of a micro-batch, except for `summed`: of the gradients in a step. Bytes are those of a
    rank."""

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
        self, layers: Sequence[Layer], uses: Mapping[tuple[int, int], list[Value]], job: PlannedJob
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
        """Returns seconds to sum tensors of `size` bytes on each rank over its data-parallel or its
        tensor-parallel ranks, in the whole mesh at once. The sum is a plan from Partial to Replicate, which
        moves as little as an all-reduce can. Times are interpolated between the powers of four elements
        around the size."""
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
        """Returns seconds that no schedule of the cut is below: each stage begins behind one forward of those
        before it, and ends with the sum of its gradients. Infinite where the parameters do not fit."""
        stages = self.stages(cut)
        if any(self._room(each) < 0 for each in stages):
            return math.inf
        costs = [(each.forward + each.backward, each.forward, each.summed) for each in stages]
        return least_seconds(self.job.microbatches, costs)

    def _room(self, stage: StageCost) -> float:
        """Returns the bytes left for activations."""
        if self.job.memory is None:
            return math.inf
        return self.job.memory - self.job.copies * stage.parameters

    def seconds(self, cut: Cut) -> float:
        """Returns seconds of a step under the schedule that was asked for; else under the eager one, or under
        1F1B, which holds less, where the eager one does not fit."""
        names = ["1F1B"] if len(cut.layers) == 1 else ["Eager1F1B", "1F1B"]
        for name in names if self.job.schedule is None else [self.job.schedule]:
            found = self._rated(cut, name)
            if not found.why_not:
                return found.seconds
        return math.inf

    def best(self, cut: Cut) -> list[Candidate]:
        """Returns the schedules that there are for it, or the one that was asked for."""
        if self.job.schedule is not None:
            return [self._rated(cut, self.job.schedule)]
        samples = self.job.samples * self.job.microbatches
        return self._placed(cut).candidates([self.job.microbatches], samples, [self.times(cut)])

    def _rated(self, cut: Cut, name: str) -> Candidate:
        options = {"delay_weight_grad": True} if self.job.delay_weight_grad else {}
        candidate = Candidate(name, self.job.microbatches, options)
        return self._placed(cut).rated(candidate, self._actions(cut, candidate), self.times(cut))

    def _placed(self, cut: Cut) -> Placed:
        stages = self.stages(cut)
        rooms = [None if self.job.memory is None else self._room(stage) for stage in stages]
        return Placed([[stage] for stage in range(len(stages))], rooms, [stage.summed for stage in stages])

    def _actions(self, cut: Cut, candidate: Candidate) -> Actions:
        return build(candidate.schedule, len(cut.layers), candidate.microbatches, **candidate.options)

    def report(self, cut: Cut, candidate: Candidate) -> SimulationReport:
        """Returns the step, without the sums of gradients."""
        return self.times(cut).simulated(self._actions(cut, candidate))

    def times(self, cut: Cut) -> Times:
        """Returns what the stages cost."""
        stages = self.stages(cut)
        return Times(
            self.job.samples,
            forward=[stage.forward for stage in stages],
            backward=[stage.backward for stage in stages],
            inputs=[stage.inputs for stage in stages],
            weights=[stage.backward - stage.inputs for stage in stages],
            transfer=self._transfers(cut),
            held=[stage.held for stage in stages],
            between=[0.0] * len(stages),
        )

    def _transfers(self, cut: Cut) -> dict[Link, float]:
        """Returns seconds of a micro-batch over each link."""
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
        for ranks, degree in zip(cut.rank_lists(), cut.tensor, strict=True)
    ]


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
    with Caller("partition"):
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
                raise ScheduleError(
                    "layers= and tensor_plan= are of a module; these are layers with their times"
                )
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
            list(range(1, most + 1))
            if stages is None
            else [stages]
            if isinstance(stages, int)
            else list(stages)
        )
        if not counts or not all(1 <= count <= most for count in counts):
            wrong = next((count for count in counts if not 1 <= count <= most), None)
            raise ScheduleError(
                f"stages must be in 1..{most} for {len(known)} layers on {ranks} ranks, found {wrong}"
            )
        if schedule is not None and spec_of(schedule).stacked:
            raise ScheduleError(
                f"{schedule} has several stages on a rank; partition() gives each stage its own"
            )
        job = PlannedJob(topology, microbatches, samples, schedule, delay_weight_grad, memory, copies)
        return _proposed(Evaluator(known, uses_of(known), job), counts, ranks)


def _proposed(evaluator: Evaluator, counts: Sequence[int], ranks: int) -> Partition:
    known, job = evaluator.layers, evaluator.job

    def looked(by: Evaluator, numbers: Sequence[int]) -> tuple[Cut | None, Candidate | None, Search]:
        """Returns the best of the evaluator's cuts, with its schedule."""
        times = [layer.forward + layer.backward for layer in known]
        found = Search(times, ranks, by.degrees, job.samples, by.bound, by.seconds)
        found.run(numbers)
        listed = [(each, cut) for cut in found.best(_COMPARED) for each in by.best(cut) if not each.why_not]
        if not listed:
            return None, None, found
        chosen = best_of([each for each, _ in listed])
        return next(cut for each, cut in listed if each is chosen), chosen, found

    cut, chosen, search = looked(evaluator, counts)
    if cut is None or chosen is None:
        raise ScheduleError(
            f"no cut into {', '.join(map(str, counts))} stages on {ranks} ranks fits into {job.memory:.4g} "
            "bytes of a rank, with activations: give more ranks, smaller micro-batches or more memory="
        )

    def alternative(cut: Cut) -> float:
        return min((each.seconds for each in evaluator.best(cut) if not each.why_not), default=math.inf)

    count = len(cut.layers)
    alternatives = {"layers and ranks as even as possible": alternative(even(len(known), count, ranks))}
    if count > 1:
        blind = looked(Evaluator(known, {}, job), [count])[0]
        if blind is not None:
            alternatives["best if transfers were free"] = alternative(blind)
    if 1 in counts:
        alternatives["one stage, data parallel"] = alternative(even(len(known), 1, ranks))
    if (most := min(len(known), ranks)) in counts:
        alternatives["as many stages as there can be"] = alternative(even(len(known), most, ranks))
    times = evaluator.times(cut)
    return Partition(
        layers=cut.layer_ranges(),
        names=[[known[i].name for i in layers] for layers in cut.layer_ranges()],
        ranks=cut.rank_lists(),
        meshes=[mesh.rows for mesh in _meshes(cut)],
        schedule=chosen,
        forward=times.forward,
        backward=times.backward,
        gradient_sums=[each.summed for each in evaluator.stages(cut)],
        transfers=times.transfer,
        report=evaluator.report(cut, chosen),
        alternatives=alternatives,
        tried=len(search.tried),
        exhaustive=search.exhaustive,
    )


def _span(items: Sequence[int]) -> str:
    return str(items[0]) if len(items) == 1 else f"{items[0]} to {items[-1]}"
