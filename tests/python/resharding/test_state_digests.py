"""The digests of a source of which boxes are wanted: each element counts as often as ranks want it, and one
of its holders counts it."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import meshcast
import pytest
import torch
from meshcast import Layout
from meshcast.base.boxes import Box, common, piece_view
from meshcast.planning.plan import Problem
from meshcast.resharding.state_batches import Digests
from meshcast.resharding.state_entries import Move
from meshcast.transfers.digest import added
from meshcast.transfers.medium import Ends
from torch.distributed.tensor import Replicate, Shard


def drawn(draw: random.Random, shape: tuple[int, ...], ranks: list[int], whole: bool) -> Layout:
    """A layout by boxes. whole: every element is on one of the ranks, or on two."""
    cuts = [sorted({0, size, *draw.choices(range(size), k=draw.randrange(4))}) for size in shape]
    boxes: dict[int, list[Box]] = {rank: [] for rank in ranks}
    for cell in itertools.product(*([*itertools.pairwise(each)] for each in cuts)):
        for rank in draw.sample(ranks, draw.randint(1 if whole else 0, 2)):
            boxes[rank].append(cell)
    order = draw.random()
    for each in boxes.values():
        random.Random(order).shuffle(each)
    boxes = boxes if any(boxes.values()) else {ranks[0]: [tuple((0, size) for size in shape)]}
    return Layout.from_boxes(boxes)


def pairwise(problem: Problem, rank: int) -> Counter[tuple[Box, int]]:
    """The boxes that a rank counts, and how often, from all pairs of boxes."""
    shape, _, src, dst = problem
    pairs = itertools.product(src._core(shape).tiles(shape), dst._core(shape).tiles(shape))
    return Counter(
        (both, len(ranks))
        for (box, holders), (other, ranks) in pairs
        if holders[0] == rank and (both := common(box, other)) is not None
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_counted(dtype: torch.dtype) -> None:
    draw = random.Random(5)
    for turn in range(80):
        shape = ((13, 6), (31,), (5, 4, 7), ())[turn % 4]
        src = drawn(draw, shape, [0, 1, 2], whole=True)
        if turn % 3 == 0 and shape:
            placements = ([Shard(draw.randrange(len(shape)))], [Replicate()])[turn % 2]
            src = Layout([2, 0, 1], placements)
        dst = drawn(draw, shape, [1, 2, 3, 4, 5], whole=False)
        problem = Problem(shape, dtype, src, dst)
        move = Move("w", "w", problem, Ends(dtype, dtype), ("cpu", "cpu"))
        full = torch.randn(shape, generator=torch.Generator().manual_seed(turn)).to(dtype)
        seen: dict[str, list[int]] = {"src": [], "dst": []}
        for rank in range(6):
            for side, layout in (("src", src), ("dst", dst)):
                if rank not in layout.ranks:
                    continue
                size, pieces = layout.pieces(shape)[rank]
                local = torch.zeros(size, dtype=dtype)
                for piece in pieces:
                    piece_view(local, piece).copy_(full[tuple(slice(*each) for each in piece[0])])
                digests = Digests(rank, [move])
                digests.observe(move, side, local)
                seen[side].append(digests.row()[side == "dst"])
            counted = src._core(shape).counted(dst._core(shape), shape, rank)
            assert Counter((box, times) for box, _, times in counted) == pairwise(problem, rank)
            own = src.pieces(shape)[rank][1] if rank in src.ranks else ()
            assert all(common(own[piece][0], box) == box for box, piece, _ in counted)
        assert added(seen["src"]) == added(seen["dst"])


def test_thousands_of_boxes() -> None:
    """A rank counts its boxes of 100,000 without a look at all pairs, which are 5e9."""
    count = 50_000
    shape = (4 * count, 2)
    src, dst = (
        Layout.from_boxes(
            {
                rank: [((low, min(low + by, shape[0])), (0, 2)) for low in range(rank * by, shape[0], 2 * by)]
                for rank in (0, 1)
            }
        )
        for by in (4, 5)
    )
    counted = [src._core(shape).counted(dst._core(shape), shape, rank) for rank in (0, 1)]
    rows = sorted(box[0] for each in counted for box, _, times in each for _ in range(times))
    assert rows[0][0] == 0 and rows[-1][1] == shape[0]
    assert all(high == low for (_, high), (low, _) in itertools.pairwise(rows))
    assert meshcast.plan(shape, "int8", src, dst).ratio <= 1.05
