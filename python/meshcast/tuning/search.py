"""Cuts of a model into stages, and the search for the fastest. A model is described by its layers, their
times and sizes, and their values.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations, pairwise, permutations, product

import torch

from ..pipelining.action import ScheduleError

__all__ = ["Cut", "Layer", "Search", "Value", "balanced", "even", "least_seconds", "uses_of"]


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

    def __post_init__(self) -> None:
        if not self.tensor:
            object.__setattr__(self, "tensor", (1,) * len(self.ranks))

    def layer_ranges(self) -> list[range]:
        return [range(end - n, end) for n, end in zip(self.layers, accumulate(self.layers), strict=True)]

    def rank_lists(self) -> list[list[int]]:
        return [list(range(end - n, end)) for n, end in zip(self.ranks, accumulate(self.ranks), strict=True)]


def even(layers: int, stages: int, ranks: int) -> Cut:
    """Returns the cut with both as even as possible; earlier stages get the odd ones."""
    shares = [tuple(n // stages + (i < n % stages) for i in range(stages)) for n in (layers, ranks)]
    return Cut(shares[0], shares[1])


def balanced(layers: int, stages: int, ranks: int, seconds: Callable[[int, range, int], float]) -> Cut:
    """Returns the cut whose slowest stage is fastest, by dynamic programming over (layers, ranks) prefixes.

    seconds: of a stage, with these layers, on so many ranks.
    """
    # The first l layers on the first r ranks: time of the slowest stage, cut.
    best: dict[tuple[int, int], tuple[float, Cut]] = {(0, 0): (0.0, Cut((), ()))}
    for stage in range(stages):
        left = stages - stage - 1
        following: dict[tuple[int, int], tuple[float, Cut]] = {}
        for (first, used), (slowest, cut) in best.items():
            for end in range(first + 1, layers - left + 1) if left else [layers]:
                for last in range(used + 1, ranks - left + 1) if left else [ranks]:
                    time = max(slowest, seconds(stage, range(first, end), last - used))
                    if time < following.get((end, last), (math.inf,))[0]:
                        grown = Cut((*cut.layers, end - first), (*cut.ranks, last - used))
                        following[end, last] = (time, grown)
        best = following
    return best[layers, ranks][1]


def least_seconds(microbatches: int, stages: Iterable[tuple[float, float, float]]) -> float:
    """Returns seconds that no step is shorter than under any schedule: a stage begins behind those before it.

    stages: for each, seconds that it computes for a micro-batch, seconds that it adds before and behind later
    stages, and seconds behind its last action.
    """
    longest = before = 0.0
    for own, added, after in stages:
        longest = max(longest, before + microbatches * own + after)
        before += added
    return longest


@dataclass(slots=True)
class Search:
    """A search for the cuts with the fewest `seconds`. Deterministic.

    Attributes:
        times: of each layer on one rank.
        ranks: of all stages.
        degrees: tensor-parallel degrees that a stage may have; 1 is one of them.
        samples: of a micro-batch, which the ranks of a stage share.
        bound: no more than the seconds of the cut, and quick to compute.
        seconds: of a step.
        starts: cuts to begin with, too; of equals the first of them wins, without any the even cut.
        most: so many cuts of a number of stages have their `seconds` looked at.
        tried: the cuts that were simulated, with their seconds.
        exhaustive: no other cut can be faster.
    """

    times: Sequence[float]
    ranks: int
    degrees: Sequence[int]
    samples: int
    bound: Callable[[Cut], float]
    seconds: Callable[[Cut], float]
    starts: Sequence[Cut] = ()
    most: float = math.inf
    tried: dict[Cut, float] = field(default_factory=dict)
    exhaustive: bool = True

    def run(self, stage_counts: Iterable[int]) -> None:
        for stages in stage_counts:
            if self._count(stages) <= _EXHAUSTIVE:
                self._by_bounds(stages)
            else:
                self._climb(stages)

    def best(self, count: int) -> list[Cut]:
        """Returns the fastest, those of equals that were tried first."""
        return sorted(self.tried, key=self.tried.__getitem__)[:count]

    def _count(self, stages: int) -> int:
        """Returns the number of cuts, or some number above `_EXHAUSTIVE`."""
        layer_cuts = math.comb(len(self.times) - 1, stages - 1)
        data_parallel = layer_cuts * math.comb(self.ranks - 1, stages - 1)
        if data_parallel > _EXHAUSTIVE or len(self.degrees) == 1:
            return data_parallel
        ways = [1] + [0] * self.ranks  # of the stages so far on so many ranks
        for _ in range(stages):
            ways = [
                sum(ways[used - count] * len(self._fitting(count)) for count in range(1, used + 1))
                for used in range(self.ranks + 1)
            ]
        return layer_cuts * ways[self.ranks]

    def _by_bounds(self, stages: int) -> None:
        """Simulates in the order of the bounds until none can be below the best. Among equals the first start
        wins."""
        first = next(iter(self.starts), even(len(self.times), stages, self.ranks))
        cuts = (
            Cut(layers, split, tensor)
            for layers in _compositions(len(self.times), stages)
            for split in _compositions(self.ranks, stages)
            for tensor in product(*map(self._fitting, split))
        )
        best = min(self.tried.values(), default=math.inf)
        listed = sorted((self.bound(cut), cut != first, number, cut) for number, cut in enumerate(cuts))
        for tries, (least, _, _, cut) in enumerate(listed):
            if least > best or least == math.inf:
                return
            if tries >= min(self.most, _MOST_TRIED):
                self.exhaustive = False
                return
            self.tried[cut] = self.seconds(cut)
            best = min(best, self.tried[cut])

    def _climb(self, stages: int) -> None:
        """Makes moves that help, from the given starts, the most balanced cut and the best of random ones.
        What cannot be better than the best so far is not simulated: its bound shows whether it is better than
        another one."""
        self.exhaustive = False
        best = min(self.tried.values(), default=math.inf)
        scores: dict[Cut, float] = {}
        tried: dict[Cut, float] = {}

        def score(cut: Cut) -> float:
            nonlocal best
            if cut not in scores:
                scores[cut] = self.bound(cut)
                if scores[cut] < best and len(tried) < self.most:
                    scores[cut] = tried[cut] = self.seconds(cut)
                    best = min(best, tried[cut])
            return scores[cut]

        count = len(self.times)
        before = [0.0, *accumulate(self.times)]

        def stage_seconds(_: int, layers: range, ranks: int) -> float:
            share = -(-self.samples // ranks) / self.samples
            return (before[layers.stop] - before[layers.start]) * share

        level = balanced(count, stages, self.ranks, stage_seconds)
        # Where little crosses is seen by trying, not by balancing: the best of random cuts are taken further.
        chance = random.Random(0)
        drawn = sorted((self._random(stages, chance) for _ in range(_DRAWN)), key=score)[:_TAKEN_FURTHER]
        for cut in (*self.starts, even(count, stages, self.ranks), level, *drawn):
            while len(tried) < _MOST_TRIED:  # the best move, until none helps
                moved = min(self._moves(cut), key=score, default=cut)
                if score(moved) >= score(cut):
                    break
                cut = moved
        self.tried |= tried

    def _random(self, stages: int, chance: random.Random) -> Cut:
        shares = []
        for total in (len(self.times), self.ranks):
            ends = [0, *sorted(chance.sample(range(1, total), stages - 1)), total]
            shares.append(tuple(b - a for a, b in pairwise(ends)))
        return Cut(shares[0], shares[1], tuple(chance.choice(self._fitting(n)) for n in shares[1]))

    def _moves(self, cut: Cut) -> Iterator[Cut]:
        """Yields cuts with one boundary between layers moved to anywhere; one rank from any stage to any
        other, or all ranks of two stages swapped; another degree of one stage; the first two at once where
        these are few."""
        layer_moves = list(_moved_boundaries(cut.layers))
        rank_moves = [
            (ranks, tuple(self._nearest(n, t) for n, t in zip(ranks, cut.tensor, strict=True)))
            for ranks in _moved_ranks(cut.ranks)
        ]
        for layers in layer_moves:
            yield replace(cut, layers=layers)
        for ranks, tensor in rank_moves:
            yield Cut(cut.layers, ranks, tensor)
        for stage, count in enumerate(cut.ranks):
            for degree in self._fitting(count):
                tensor = (*cut.tensor[:stage], degree, *cut.tensor[stage + 1 :])
                if tensor != cut.tensor:
                    yield replace(cut, tensor=tensor)
        if len(layer_moves) * len(rank_moves) <= _MOST_JOINT:
            for layers in layer_moves:
                for ranks, tensor in rank_moves:
                    yield Cut(layers, ranks, tensor)

    def _fitting(self, ranks: int) -> list[int]:
        return [degree for degree in self.degrees if ranks % degree == 0]

    def _nearest(self, ranks: int, degree: int) -> int:
        """Returns the largest degree up to this one that the ranks allow."""
        return max(each for each in self._fitting(ranks) if each <= degree)


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
