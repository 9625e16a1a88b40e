"""The candidates of `partition`, their simulated costs, and the search among them. A model is described by
its layers, their times and sizes, and their values.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, combinations, pairwise, permutations, product

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..layout import Layout
from ..pipelining.action import Link, ScheduleError
from ..pipelining.simulate import SimulationReport, simulate
from ..planning.plan import plan_many
from ..topology import Topology
from .candidates import Candidate, Times, candidates, ended

__all__ = [
    "Cut",
    "Evaluator",
    "Layer",
    "PlannedJob",
    "Searched",
    "StageCost",
    "Value",
    "even",
    "search",
    "uses_of",
]


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
    """A layer that is never cut.

    Attributes:
        forward, backward: seconds for a whole micro-batch on one rank.
        values: what later layers take.
        inputs: the part of the backward that the gradients of its inputs take, in seconds; None: half.
        parameters: bytes of the parameters that are trained, on one rank.
        held: bytes that are kept of a whole micro-batch from the forward to the backward.
        sums_forward, sums_backward: bytes, for a whole micro-batch, of what tensor-parallel ranks sum in the
            forward and in the backward; one number for each sum.
        tensor: {degree: the same layer as one of so many tensor-parallel ranks has it}. Its values count no
            further. With a degree that is not there it is whole on each of the ranks.
        name: of the module.
    """

    forward: float
    backward: float
    values: tuple[Value, ...] = ()
    inputs: float | None = None
    parameters: int = 0
    held: int = 0
    sums_forward: tuple[int, ...] = ()
    sums_backward: tuple[int, ...] = ()
    tensor: Mapping[int, Layer] = field(default_factory=dict)
    name: str = ""


def uses_of(layers: Sequence[Layer]) -> dict[tuple[int, int], list[Value]]:
    """{(layer that makes it, layer that takes it): values}. Raises ScheduleError on what cannot be."""
    found: dict[tuple[int, int], list[Value]] = {}
    for index, layer in enumerate(layers):
        for degree, each in {1: layer, **layer.tensor}.items():
            where = f"layer {index}" + ("" if degree == 1 else f" with tensor-parallel degree {degree}")
            if not (each.forward >= 0 and each.backward >= 0):
                raise ScheduleError(f"{where}: times must be >= 0, found {each.forward} and {each.backward}")
            if each.inputs is not None and not 0 <= each.inputs <= each.backward:
                raise ScheduleError(
                    f"{where}: inputs is a part of its backward, {each.backward}, found {each.inputs}"
                )
            if min(each.parameters, each.held, *each.sums_forward, *each.sums_backward) < 0:
                raise ScheduleError(f"{where}: bytes must be >= 0")
            if degree < 1:
                raise ScheduleError(f"{where}: degrees are at least 2")
        for value in layer.values:
            for user in value.used_by or (index + 1,):
                if not index < user < len(layers) + (not value.used_by):
                    raise ScheduleError(
                        f"layer {index}: its value cannot be used by layer {user}; use {index + 1} to "
                        f"{len(layers) - 1}"
                    )
                found.setdefault((index, user), []).append(value)
    return found


_EXHAUSTIVE = 50_000  # candidates of one number of stages: so many are listed with their bounds
_MOST_TRIED = 1500  # simulated of one number of stages
_MOST_JOINT = 200
_DRAWN = 200
_TAKEN_FURTHER = 3


@dataclass(frozen=True, slots=True)
class Cut:
    """Consecutive layers and consecutive ranks for each stage: how many of each, none empty.

    tensor: for each stage how many of its ranks share every layer, a divisor of their number; empty: 1.
    """

    layers: tuple[int, ...]
    ranks: tuple[int, ...]
    tensor: tuple[int, ...] = ()

    def layer_ranges(self) -> list[range]:
        return [range(end - n, end) for n, end in zip(self.layers, accumulate(self.layers), strict=True)]

    def rank_lists(self) -> list[list[int]]:
        return [list(range(end - n, end)) for n, end in zip(self.ranks, accumulate(self.ranks), strict=True)]

    def degrees(self) -> tuple[int, ...]:
        return self.tensor or (1,) * len(self.ranks)


@dataclass(slots=True)
class Searched:
    """The cuts that were simulated, {cut: seconds of a step}. exhaustive: no other cut can be faster."""

    tried: dict[Cut, float]
    exhaustive: bool = True

    def best(self, count: int) -> list[Cut]:
        """The fastest, those of equals that were tried first."""
        return sorted(self.tried, key=self.tried.__getitem__)[:count]


def search(
    times: Sequence[float],
    stage_counts: Iterable[int],
    ranks: int,
    degrees: Sequence[int],
    samples: int,
    bound: Callable[[Cut], float],
    seconds: Callable[[Cut], float],
    starts: Sequence[Cut] = (),
    most: float = math.inf,
) -> Searched:
    """Looks for the cuts with the fewest `seconds`. Deterministic.

    Args:
        times: of each layer on one rank.
        degrees: tensor-parallel degrees that a stage may have; 1 is one of them.
        bound: no more than the seconds of the cut, and quick to tell.
        starts: cuts to begin with, too; of equals the first of them wins, without any the even cut.
        most: so many cuts of a number of stages have their `seconds` looked at.
    """
    found = Searched({})
    for stages in stage_counts:
        if _count(len(times), ranks, stages, degrees) <= _EXHAUSTIVE:
            cuts = (
                Cut(layers, split, tensor)
                for layers in _compositions(len(times), stages)
                for split, tensor in _splits(ranks, stages, degrees)
            )
            first = next(iter(starts), even(len(times), stages, ranks))
            _by_bounds(cuts, first, bound, seconds, found, most)
        else:
            _climb(times, stages, ranks, degrees, samples, bound, seconds, found, starts, most)
    return found


def _by_bounds(
    cuts: Iterable[Cut],
    first: Cut,
    bound: Callable[[Cut], float],
    seconds: Callable[[Cut], float],
    found: Searched,
    most: float,
) -> None:
    """Simulates in the order of the bounds until none can be below the best. Of equals `first` wins."""
    best = min(found.tried.values(), default=math.inf)
    listed = sorted(((bound(cut), cut != first, number, cut) for number, cut in enumerate(cuts)))
    for tries, (least, _, _, cut) in enumerate(listed):
        if least > best or least == math.inf:
            return
        if tries >= min(most, _MOST_TRIED):
            found.exhaustive = False
            return
        found.tried[cut] = seconds(cut)
        best = min(best, found.tried[cut])


def _climb(
    times: Sequence[float],
    stages: int,
    ranks: int,
    degrees: Sequence[int],
    samples: int,
    bound: Callable[[Cut], float],
    seconds: Callable[[Cut], float],
    found: Searched,
    given: Sequence[Cut],
    most: float,
) -> None:
    """From those given, the most balanced cut and the best of random ones, moves that help. What cannot be
    better than the best so far is not simulated: its bound tells whether it is better than another one."""
    found.exhaustive = False
    best = min(found.tried.values(), default=math.inf)
    scores: dict[Cut, float] = {}
    tried: dict[Cut, float] = {}

    def score(cut: Cut) -> float:
        nonlocal best
        if cut not in scores:
            scores[cut] = bound(cut)
            if scores[cut] < best and len(tried) < most:
                scores[cut] = tried[cut] = seconds(cut)
                best = min(best, tried[cut])
        return scores[cut]

    starts = [*given, even(len(times), stages, ranks), balanced(times, stages, ranks, samples)]
    # Where little crosses is seen by trying, not by balancing: the best of random cuts are taken further.
    chance = random.Random(0)
    drawn = [_random_cut(len(times), stages, ranks, degrees, chance) for _ in range(_DRAWN)]
    starts += sorted(drawn, key=score)[:_TAKEN_FURTHER]
    for start in starts:
        _descend(start, degrees, score, tried)
    found.tried |= tried


def even(layers: int, stages: int, ranks: int) -> Cut:
    """Both as even as possible; earlier stages get the odd ones."""
    shares = [tuple(n // stages + (i < n % stages) for i in range(stages)) for n in (layers, ranks)]
    return Cut(shares[0], shares[1], (1,) * stages)


def balanced(times: Sequence[float], stages: int, ranks: int, samples: int) -> Cut:
    """The cut whose slowest stage is fastest, by dynamic programming over (layers, ranks) prefixes."""
    before = [0.0, *accumulate(times)]
    share = [math.inf, *(-(-samples // d) / samples for d in range(1, ranks + 1))]
    # best[l][r]: (time of the slowest stage, cut) of the first l layers on the first r ranks.
    best: dict[tuple[int, int], tuple[float, Cut]] = {(0, 0): (0.0, Cut((), ()))}
    for stage in range(stages):
        left = stages - stage - 1
        following: dict[tuple[int, int], tuple[float, Cut]] = {}
        for (layers, used), (slowest, cut) in best.items():
            most_layers, most_ranks = len(times) - left, ranks - left
            for end in range(layers + 1, most_layers + 1) if left else [len(times)]:
                for last in range(used + 1, most_ranks + 1) if left else [ranks]:
                    time = max(slowest, (before[end] - before[layers]) * share[last - used])
                    if time < following.get((end, last), (math.inf,))[0]:
                        grown = Cut((*cut.layers, end - layers), (*cut.ranks, last - used))
                        following[end, last] = (time, grown)
        best = following
    return replace(best[len(times), ranks][1], tensor=(1,) * stages)


def _random_cut(layers: int, stages: int, ranks: int, degrees: Sequence[int], chance: random.Random) -> Cut:
    shares = []
    for total in (layers, ranks):
        ends = [0, *sorted(chance.sample(range(1, total), stages - 1)), total]
        shares.append(tuple(b - a for a, b in pairwise(ends)))
    return Cut(shares[0], shares[1], tuple(chance.choice(_fitting(n, degrees)) for n in shares[1]))


def _descend(
    cut: Cut, degrees: Sequence[int], score: Callable[[Cut], float], tried: dict[Cut, float]
) -> None:
    """Takes the best move until none helps."""
    while len(tried) < _MOST_TRIED:
        moved = min(_moves(cut, degrees), key=score, default=cut)
        if score(moved) >= score(cut):
            return
        cut = moved


def _moves(cut: Cut, degrees: Sequence[int]) -> Iterator[Cut]:
    """One boundary between layers to anywhere; one rank from any stage to any other, or all ranks of two
    stages swapped; another degree of one stage; the first two at once where these are few."""
    layer_moves = list(_moved_boundaries(cut.layers))
    rank_moves = [
        (ranks, tuple(_nearest(n, t, degrees) for n, t in zip(ranks, cut.degrees(), strict=True)))
        for ranks in _moved_ranks(cut.ranks)
    ]
    for layers in layer_moves:
        yield replace(cut, layers=layers)
    for ranks, tensor in rank_moves:
        yield Cut(cut.layers, ranks, tensor)
    for stage, count in enumerate(cut.ranks):
        for degree in _fitting(count, degrees):
            tensor = (*cut.degrees()[:stage], degree, *cut.degrees()[stage + 1 :])
            if tensor != cut.degrees():
                yield replace(cut, tensor=tensor)
    if len(layer_moves) * len(rank_moves) <= _MOST_JOINT:
        for layers in layer_moves:
            for ranks, tensor in rank_moves:
                yield Cut(layers, ranks, tensor)


def _fitting(ranks: int, degrees: Sequence[int]) -> list[int]:
    return [degree for degree in degrees if ranks % degree == 0]


def _nearest(ranks: int, degree: int, degrees: Sequence[int]) -> int:
    """The largest degree up to this one that the ranks allow."""
    return max(each for each in _fitting(ranks, degrees) if each <= degree)


def _moved_boundaries(layers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for i, (a, b) in enumerate(pairwise(layers)):
        for part in range(1, a + b):
            if part != a:
                yield (*layers[:i], part, a + b - part, *layers[i + 2 :])


def _moved_ranks(ranks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for i, j in permutations(range(len(ranks)), 2):
        if ranks[i] > 1:
            yield tuple(n - (k == i) + (k == j) for k, n in enumerate(ranks))
        if i < j and ranks[i] != ranks[j]:
            swapped = list(ranks)
            swapped[i], swapped[j] = ranks[j], ranks[i]
            yield tuple(swapped)


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write total as a sum of so many positive numbers."""
    for ends in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in zip((0, *ends), (*ends, total), strict=True))


def _splits(
    ranks: int, stages: int, degrees: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Ranks and tensor-parallel degree of each stage."""
    for split in _compositions(ranks, stages):
        for tensor in product(*(_fitting(count, degrees) for count in split)):
            yield split, tensor


def _count(layers: int, ranks: int, stages: int, degrees: Sequence[int]) -> int:
    """The number of cuts, or some number above `_EXHAUSTIVE`."""
    data_parallel = math.comb(layers - 1, stages - 1) * math.comb(ranks - 1, stages - 1)
    if data_parallel > _EXHAUSTIVE or len(degrees) == 1:
        return data_parallel
    ways = [1] + [0] * ranks  # of the stages so far on so many ranks
    for _ in range(stages):
        ways = [
            sum(ways[used - count] * len(_fitting(count, degrees)) for count in range(1, used + 1))
            for used in range(ranks + 1)
        ]
    return math.comb(layers - 1, stages - 1) * ways[ranks]


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
