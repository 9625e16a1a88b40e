"""The search for a cut that makes the steps of a running pipeline shorter, on the meshes that it has.

A layer is known by what it costs compared to the others, and the ranks of a stage by how long they took for
the layers that they have: ranks that have become slow take longer for any layer. Each candidate is simulated
by the actions of the schedule that runs. All of it is arithmetic: no process group, no tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate

from .. import errors
from ..base import checks
from ..base.wire import pack, unpack
from ..errors import AbortedError, Caller, LayoutError, MeshcastError
from ..layout import Layout
from ..pipelining.action import ActionKind, Actions, Costs
from ..pipelining.simulate import simulate_actions
from ..pipelining.trace import StageTimes
from ..planning.plan import plan_many
from ..topology import Topology
from .search import Cut, Layer, Search, balanced, least_seconds, uses_of

if TYPE_CHECKING:
    from ..pipelining.schedule import PipelineSchedule

__all__ = ["RebalanceRequest", "Recut", "RunningPipeline", "agreed_cut", "all_well", "better_cut"]


_SIMULATED = 300  # cuts at most: training waits for it
_COMPARED = 8  # cuts, the fastest of the search, whose moves are planned
_UNKNOWN = 1.0  # the cost of every layer, if none is known


@dataclass(frozen=True)
class RunningPipeline:
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
    running: RunningPipeline,
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
        layers: what each costs; None: all the same.
        overhead: seconds to get to any other cut, apart from those in which state is sent.
    """
    model = _Model(running, layers)
    before = model.seconds(model.present)
    limit = (1 - threshold) * before
    start = balanced(len(model.layers), len(running.cut), len(running.cut), model.stage_seconds)
    # Where stages share no ranks, none is faster than that whose slowest stage is fastest.
    if not before > 0 or (model.apart and model.busiest(start) > limit):
        return None
    count = len(running.cut)
    found = Search(
        times=[each.forward + each.backward for each in model.layers],
        ranks=count,  # a mesh counts as one rank: all stay where they are
        degrees=[1],
        samples=1,
        bound=model.bound,
        seconds=model.seconds,
        starts=[model.present, start],
        most=_SIMULATED,
    )
    found.run([count])
    listed = [
        Recut(cut.layers, before, found.tried[cut], overhead + model.moving(cut, topology))
        for cut in found.best(_COMPARED)
        if cut != model.present and found.tried[cut] <= limit
    ]
    able = [each for each in listed if each.after + each.moving / horizon <= limit]
    return min(able, key=lambda each: each.after + each.moving / horizon, default=None)


class _Model:
    """Costs of cuts of what runs. Seconds of a stage are those that its ranks take now, in proportion to what
    its layers cost compared to each other."""

    def __init__(self, running: RunningPipeline, layers: Sequence[Layer] | None) -> None:
        self._running = running
        self.layers = [Layer(_UNKNOWN, _UNKNOWN)] * sum(running.cut) if layers is None else list(layers)
        self.present = _cut(running.cut)
        self.apart = all(len(row) == 1 for row in running.rows)
        self._split = any(each.kind is ActionKind.W for row in running.actions.values() for each in row)
        backward = [0.0, *accumulate(each.backward for each in self.layers)]
        self._before = {
            ActionKind.F: [0.0, *accumulate(each.forward for each in self.layers)],
            ActionKind.B: backward,
            ActionKind.W: backward,
        }
        known = Costs.of(len(running.cut), **running.times)
        self._transfer = known.transfer
        ranges = self.present.layer_ranges()
        self._own: dict[ActionKind, list[float]] = {}  # seconds of each stage per unit of its layers' cost
        for kind in self._before:
            self._own[kind] = [0.0] * len(ranges)
            for row in running.rows:
                cost = sum(self._cost(kind, ranges[stage]) for stage in row)
                for stage in row:
                    self._own[kind][stage] = sum(known.compute[kind][each] for each in row) / cost

    def _cost(self, kind: ActionKind, layers: range) -> float:
        prefix = self._before[kind]
        return prefix[layers.stop] - prefix[layers.start]

    def _times(self, kind: ActionKind, cut: Cut) -> list[float]:
        """Returns the seconds of each stage."""
        return [
            own * self._cost(kind, layers)
            for own, layers in zip(self._own[kind], cut.layer_ranges(), strict=True)
        ]

    def stage_seconds(self, stage: int, layers: range, _: int) -> float:
        """Returns the seconds that a stage computes for a micro-batch if it has these layers."""
        kinds = (ActionKind.F, ActionKind.B)
        return sum(self._own[kind][stage] * self._cost(kind, layers) for kind in kinds)

    def seconds(self, cut: Cut) -> float:
        """Returns the seconds of a step."""
        forward, backward, weight = (self._times(kind, cut) for kind in self._before)
        costs = Costs.of(len(cut.layers), forward, backward, weight, self._transfer)
        return simulate_actions(self._running.actions, costs).makespan

    def busiest(self, cut: Cut) -> float:
        """Returns the seconds that the ranks of some stages compute in a step."""
        ranges = cut.layer_ranges()
        return self._running.microbatches * max(
            sum(self.stage_seconds(stage, ranges[stage], 1) for stage in row) for row in self._running.rows
        )

    def bound(self, cut: Cut) -> float:
        """Returns seconds that no step is shorter than: a stage begins behind one forward of those before it,
        and what it ends with still goes back through these."""
        if not self.apart:
            return self.busiest(cut)
        times = zip(*(self._times(kind, cut) for kind in self._before), strict=True)
        costs = [(f + b, f + b - (w if self._split else 0.0), 0.0) for f, b, w in times]
        return least_seconds(self._running.microbatches, costs)

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


def _cut(layers: Sequence[int]) -> Cut:
    return Cut(tuple(layers), (1,) * len(layers))


_TIMES = ("forward", "backward", "weight", "transfer")
_SHOWN = 160  # characters of an argument that ranks disagree on
_MOST_STEPS = 10**9


@dataclass(frozen=True)
class RebalanceRequest:
    """The arguments of `meshcast.elastic.rebalance` on this rank, which documents them."""

    optimizer: Any
    cut: Any
    layers: Any
    times: Any
    threshold: Any
    horizon: Any
    overhead: Any
    topology: Any
    build: Any
    named: bool

    def checked(self, schedule: PipelineSchedule) -> dict[str, Any]:
        """Checks the arguments, and returns what must be the same on all ranks, {argument: text}. Raises
        LayoutError or ScheduleError."""
        stages = next(iter(schedule._mine.values())).num_stages
        cut = checks.listed("cut", self.cut)
        if len(cut) != stages or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in cut):
            raise LayoutError(
                f"cut {checks.shown(self.cut)}: expected a number of layers for each of the {stages} stages, "
                "at least 1"
            )
        checks.positive("threshold", self.threshold, 1.0)
        checks.integer("horizon", self.horizon, 1, _MOST_STEPS)
        checks.not_negative("overhead", self.overhead)
        if not isinstance(self.topology, Topology | None):
            raise LayoutError(f"topology must be a meshcast.Topology, found {checks.shown(self.topology)}")
        if not isinstance(self.optimizer, torch.optim.Optimizer | None):
            raise LayoutError(
                f"optimizer must be a torch.optim.Optimizer, found {checks.shown(self.optimizer)}"
            )
        if not callable(self.build):
            raise LayoutError(f"build must be a function of a cut, found {checks.shown(self.build)}")
        self._check_layers(sum(cut))
        self._check_times(stages)
        kind = None if self.optimizer is None else type(self.optimizer).__name__
        stepped = self.optimizer is not None and any(self.optimizer.state.values())
        return {
            "cut": _text(list(cut)),
            "layers": _text(self.layers),
            "times": _text(self.times),
            "threshold": _text(float(self.threshold)),
            "horizon": _text(self.horizon),
            "overhead": _text(float(self.overhead)),
            "topology": _text(self.topology),
            "names": "given" if self.named else "None",
            "optimizer": f"{kind}, which has {'' if stepped else 'no '}state",
            "measured steps": _text(None if schedule._recent is None else schedule._recent.last),
        }

    def _check_layers(self, count: int) -> None:
        if self.layers is None:
            return
        layers = checks.listed("layers", self.layers)
        wrong = next((each for each in layers if not isinstance(each, Layer)), None)
        if wrong is not None:
            raise LayoutError(f"layers must be of meshcast.pipelining.Layer, found {checks.shown(wrong)}")
        if len(layers) != count:
            raise LayoutError(f"layers has {len(layers)} layers, but cut has {count}")
        uses_of(layers)
        for index, each in enumerate(layers):
            if not (each.forward > 0 and each.backward > 0):
                raise LayoutError(
                    f"layers: layer {index} takes {each.forward} and {each.backward} s; times of the forward "
                    "and the backward must be above 0"
                )

    def _check_times(self, stages: int) -> None:
        if self.times is None:
            return
        if not isinstance(self.times, Mapping) or not {"forward", "backward"} <= set(self.times) <= set(
            _TIMES
        ):
            raise LayoutError(
                f"times {checks.shown(self.times)}: expected a mapping with forward and backward, and weight "
                "and transfer where known, as simulate() takes them"
            )
        Costs.of(stages, **{"weight": None, "transfer": 0.0, **self.times})


def _text(value: Any) -> str:
    """The whole of it, if not in full."""
    text = repr(value)
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}... ({hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})"


def agreed_cut(schedule: PipelineSchedule, request: RebalanceRequest) -> Recut | None:
    """Returns the same on every rank of the pipeline: the first rank decides, by what all have measured.

    Raises LayoutError on all ranks where one cannot continue or the ranks contradict each other.
    """

    def said() -> dict[str, Any]:
        if schedule._failed is not None:
            raise AbortedError(f"the pipeline failed before: {schedule._failed}", op="pipeline")
        arguments = request.checked(schedule)
        if schedule._wirings.last is None or not schedule._agreed().trains:
            raise LayoutError("there was no training step yet: call it between two steps")
        times = {} if request.times is not None else schedule.stage_times()
        facts = {
            index: _StageFacts(times.get(index), _nbytes(stage.submod, request.optimizer))
            for index, stage in schedule._mine.items()
        }
        return {"arguments": arguments, "stages": pack(facts, dict[int, _StageFacts])}

    answer = _agree(schedule, said, lambda found: _decided(schedule, request, found))
    return None if answer["recut"] is None else unpack(Recut, answer["recut"])


class _StageFacts(NamedTuple):
    """times: as measured on one rank. nbytes: of the model's and the optimizer's state there."""

    times: StageTimes | None
    nbytes: int


def all_well(schedule: PipelineSchedule, failed: Exception | None) -> None:
    """Compares whether ranks have failed. Raises on all ranks if one has: its own error there, and one of the
    same type and text on the others."""

    def said() -> dict[str, Any]:
        if failed is not None:
            raise failed
        return {}

    _agree(schedule, said, lambda _: {})


def _nbytes(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of all that moves with the module."""
    tensors: list[Any] = [*module.parameters(), *module.buffers()]
    if optimizer is not None:
        for parameter in module.parameters():
            tensors += optimizer.state[parameter].values() if parameter in optimizer.state else ()
    return sum(each.numel() * each.element_size() for each in tensors if isinstance(each, torch.Tensor))


def _agree(
    schedule: PipelineSchedule,
    say: Callable[[], dict[str, Any]],
    decide: Callable[[dict[int, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """The answer. Raises on all ranks what one has raised."""
    board = schedule._board
    caller = Caller("rebalance", board.rank)
    mine: Exception | None = None
    try:
        value = say()
    except Exception as error:
        mine = error
        value = _refusal(error)
    value["opened"] = board.opened

    def answered(found: dict[int, Any]) -> dict[str, Any]:
        more = {"opened": max(said["opened"] for said in found.values())}
        for rank, said in sorted(found.items()):
            if "refused" in said:
                return {**more, "rank": rank, "refused": said["refused"], "kind": said["kind"]}
        try:
            return {**more, **decide(found)}
        except Exception as error:  # the others must not wait for it
            return {**more, **_refusal(error), "rank": board.rank}

    answer = board.agree(f"recut/{schedule._recuts}", value, answered)
    board.forget_past()
    schedule._recuts += 1
    board.skip_to(answer["opened"])
    if "refused" not in answer:
        return answer
    kind: type[MeshcastError] = vars(errors)[answer["kind"]]
    if mine is None:
        raise caller.error(kind, f"rank {answer['rank']}: {answer['refused']}", peer=answer["rank"])
    if isinstance(mine, MeshcastError) and type(mine).__name__ in errors.__all__:
        raise caller.typed(mine)
    raise caller.error(kind, str(mine) or type(mine).__name__) from mine


def _refusal(error: Exception) -> dict[str, Any]:
    kind = type(error).__name__
    return {
        "refused": str(error) or kind,
        "kind": kind if isinstance(error, MeshcastError) and kind in errors.__all__ else "LayoutError",
    }


def _decided(
    schedule: PipelineSchedule, request: RebalanceRequest, found: Mapping[int, Any]
) -> dict[str, Any]:
    """On the first rank. Raises LayoutError where the ranks contradict each other."""
    first = min(found)
    for rank, said in sorted(found.items()):
        for what, text in said["arguments"].items():
            other = found[first]["arguments"][what]
            if text != other:
                raise LayoutError(
                    f"the ranks disagree on {what}: rank {first} has {other}, rank {rank} has {text}; give "
                    "the same on every rank"
                )
    table = schedule._agreed()
    listed: list[list[_StageFacts]] = [[] for _ in table.ranks]
    for said in found.values():
        for stage, facts in unpack(dict[int, _StageFacts], said["stages"]).items():
            listed[stage].append(facts)
    times = dict(request.times or {})
    if request.times is None:
        measured = [[each.times for each in facts if each.times is not None] for facts in listed]
        if any(len(each) < len(facts) for each, facts in zip(measured, listed, strict=True)):
            return {"recut": None}  # nothing has been measured of this schedule yet
        times = _slowest(measured)
    topology = request.topology or next(iter(schedule._mine.values())).topology
    times.setdefault("transfer", schedule.transfer_times(topology))
    recut = better_cut(
        RunningPipeline(
            tuple(request.cut),
            schedule._recipe.lowered(len(table.rows), train=True),
            schedule._n_microbatches,
            table.rows,
            table.ranks,
            {"weight": None, **times},
            [max(each.nbytes for each in facts) for facts in listed],
        ),
        request.layers,
        threshold=request.threshold,
        horizon=request.horizon,
        overhead=request.overhead,
        topology=topology,
    )
    return {"recut": None if recut is None else pack(recut)}


def _slowest(stages: Sequence[Sequence[StageTimes]]) -> dict[str, Any]:
    """Returns the longest time of each kind among the ranks of each stage, as `simulate` takes them."""
    late = [[each.weight for each in ranks if each.weight is not None] for ranks in stages]
    return {
        "forward": [max(each.forward for each in ranks) for ranks in stages],
        "backward": [max(each.backward for each in ranks) for ranks in stages],
        # In a schedule that splits backwards, a stage that is not split computes all of it early.
        "weight": [max(each, default=0.0) for each in late] if any(late) else None,
    }
