"""The candidates of `partition` and the search among them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise, permutations, product

__all__ = ["Cut", "Found", "even", "search"]

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
class Found:
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
) -> Found:
    """Looks for the cuts with the fewest `seconds`. Deterministic.

    Args:
        times: of each layer on one rank.
        degrees: tensor-parallel degrees that a stage may have; 1 is one of them.
        bound: no more than the seconds of the cut, and quick to tell.
        starts: cuts to begin with, too; of equals the first of them wins, without any the even cut.
        most: so many cuts of a number of stages have their `seconds` looked at.
    """
    found = Found({})
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
    found: Found,
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
    found: Found,
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
