"""The candidates of `partition` and the search among them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, permutations

__all__ = ["Cut", "best_cut", "even"]

_EXHAUSTIVE = 1000  # candidates
_MOST_TRIED = 1500
_MOST_JOINT = 200
_DRAWN = 200
_TAKEN_FURTHER = 3


@dataclass(frozen=True, slots=True)
class Cut:
    """Consecutive layers and consecutive ranks for each stage: how many of each, none empty."""

    layers: tuple[int, ...]
    ranks: tuple[int, ...]

    def layer_ranges(self) -> list[range]:
        return [range(end - n, end) for n, end in zip(self.layers, accumulate(self.layers), strict=True)]

    def rank_lists(self) -> list[list[int]]:
        return [list(range(end - n, end)) for n, end in zip(self.ranks, accumulate(self.ranks), strict=True)]


def best_cut(
    times: Sequence[float], stages: int, ranks: int, samples: int, seconds: Callable[[Cut], float]
) -> tuple[Cut, int, bool]:
    """(the cut with the fewest `seconds`, how many were tried, whether these were all).

    times: of each layer on one rank. Deterministic; of equals the first wins.
    """
    count = math.comb(len(times) - 1, stages - 1) * math.comb(ranks - 1, stages - 1)
    if count <= _EXHAUSTIVE:
        candidates = [
            Cut(layers, split)
            for layers in _compositions(len(times), stages)
            for split in _compositions(ranks, stages)
        ]
        # Of equals the even one, then the first.
        candidates.sort(key=lambda cut: cut != even(len(times), stages, ranks))
        return min(candidates, key=seconds), count, True
    tried: dict[Cut, float] = {}

    def score(cut: Cut) -> float:
        if cut not in tried:
            tried[cut] = seconds(cut)
        return tried[cut]

    starts = [even(len(times), stages, ranks), balanced(times, stages, ranks, samples)]
    # Where little crosses is seen by trying, not by balancing: the best of random cuts are taken further.
    chance = random.Random(0)
    drawn = [_random_cut(len(times), stages, ranks, chance) for _ in range(_DRAWN)]
    starts += sorted(drawn, key=score)[:_TAKEN_FURTHER]
    ends = [_descend(start, score, tried) for start in starts]
    return min(ends, key=score), len(tried), False


def even(layers: int, stages: int, ranks: int) -> Cut:
    """Both as even as possible; earlier stages get the odd ones."""
    shares = [tuple(n // stages + (i < n % stages) for i in range(stages)) for n in (layers, ranks)]
    return Cut(shares[0], shares[1])


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
    return best[len(times), ranks][1]


def _random_cut(layers: int, stages: int, ranks: int, chance: random.Random) -> Cut:
    shares = []
    for total in (layers, ranks):
        ends = [0, *sorted(chance.sample(range(1, total), stages - 1)), total]
        shares.append(tuple(b - a for a, b in pairwise(ends)))
    return Cut(shares[0], shares[1])


def _descend(cut: Cut, score: Callable[[Cut], float], tried: dict[Cut, float]) -> Cut:
    """Takes the best move until none helps."""
    while len(tried) < _MOST_TRIED:
        moved = min(_moves(cut), key=score, default=cut)
        if score(moved) >= score(cut):
            return cut
        cut = moved
    return cut


def _moves(cut: Cut) -> Iterator[Cut]:
    """One boundary between layers to anywhere; one rank from any stage to any other, or all ranks of two
    stages swapped; both kinds at once where these are few."""
    layer_moves = list(_moved_boundaries(cut.layers))
    rank_moves = list(_moved_ranks(cut.ranks))
    for layers in layer_moves:
        yield Cut(layers, cut.ranks)
    for ranks in rank_moves:
        yield Cut(cut.layers, ranks)
    if len(layer_moves) * len(rank_moves) <= _MOST_JOINT:
        for layers in layer_moves:
            for ranks in rank_moves:
                yield Cut(layers, ranks)


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
