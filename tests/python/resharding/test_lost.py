"""What lives and what is gone when ranks are lost, against masks of elements."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from meshcast import Layout, LayoutError
from meshcast.errors import Caller
from meshcast.resharding.meshes import gone, lost_ranks, raise_gone, renumbered, survivors
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

BY_BOXES = Layout.from_boxes(
    {0: [((0, 3), (0, 5))], 1: [((2, 7), (0, 2)), ((3, 7), (3, 5))], 2: [((3, 7), (2, 3))], 5: []}
)
LAYOUTS = [
    Layout([0, 1, 2, 3], [Shard(0)]),
    Layout([3, 1, 5], [Shard(1)]),
    Layout([[0, 1, 2], [3, 4, 5]], [Replicate(), Shard(0)]),
    Layout([[0, 1], [2, 3], [4, 5]], [Shard(1), Shard(0)]),
    Layout([[0, 1], [2, 3]], [_StridedShard(0, split_factor=2), Shard(0)]),
    Layout([0, 1, 2], [Replicate()]),
    BY_BOXES,
]


def mask(layout: Layout, shape: tuple[int, ...], ranks) -> torch.Tensor:
    """Elements that some of these ranks hold."""
    found = torch.zeros(shape, dtype=torch.bool)
    for rank, boxes in layout.shards(shape).items():
        for box in boxes if rank in ranks else ():
            found[tuple(slice(lo, hi) for lo, hi in box)] = True
    return found


@given(
    st.sampled_from(LAYOUTS),
    st.sets(st.integers(0, 6)),
    st.sampled_from([(7, 5), (2, 5), (1, 1), (0, 4)]),
    st.booleans(),
)
def test_what_lives_and_what_is_gone(layout: Layout, lost: set[int], shape, by_boxes: bool) -> None:
    if layout is BY_BOXES:
        shape = (7, 5)
    wanted = Layout([8, 9], [Shard(0)])
    if by_boxes and shape == (7, 5):
        wanted = Layout.from_boxes({8: [((1, 4), (0, 5))], 9: [((3, 6), (1, 2))]})
    left = survivors(layout, shape, lost, "test")
    if not lost.intersection(layout.ranks):
        assert left is layout
    elif lost.issuperset(layout.ranks):
        assert left is None
    else:
        assert left is not None
        assert left.ranks == tuple(sorted(set(layout.ranks) - lost))
        for rank in left.ranks:
            assert left.local_shapes(shape)[rank] == layout.local_shapes(shape)[rank]
            assert left.pieces(shape)[rank] == layout.pieces(shape)[rank]
    living = mask(layout, shape, set(layout.ranks) - lost)
    held = mask(layout, shape, layout.ranks)
    expected = held & ~living & mask(wanted, shape, wanted.ranks)
    found = torch.zeros(shape, dtype=torch.int64)
    for name, box, ranks in gone("w", shape, layout, {rank: rank for rank in lost}, wanted):
        assert name == "w"
        where = tuple(slice(lo, hi) for lo, hi in box)
        found[where] += 1
        holders = [rank for rank in layout.ranks if mask(layout, shape, [rank])[where].all()]
        assert sorted(ranks) == sorted(holders)
        assert set(holders) <= lost
    assert torch.equal(found, expected.long())  # each element once


def test_gone_are_called_as_messages_call_them() -> None:
    layout = Layout([0, 70, 2], [Shard(0)])
    (found,) = gone("w", (6,), layout, {70: 1}, Layout([0], [Replicate()]))
    assert found == ("w", ((2, 4),), (1,))


def test_the_error_lists_them_and_survives_a_pickle() -> None:
    found = gone("w", (6,), Layout([0, 1, 2], [Shard(0)]), {0: 0, 2: 2}, Layout([1], [Replicate()]))
    text = r"test on rank 1: 2 boxes are on no live rank: 'w' \[0:2\] of rank 0; 'w' \[4:6\]"
    with pytest.raises(LayoutError, match=text) as raised, Caller("test", 1):
        raise_gone(found)
    again = pickle.loads(pickle.dumps(raised.value))
    assert again.gone == raised.value.gone == (("w", ((0, 2),), (0,)), ("w", ((4, 6),), (2,)))
    assert (again.rank, again.op, str(again)) == (1, "test", str(raised.value))
    raise_gone([])
    assert LayoutError("other").gone == ()


def test_partial_values_need_all_ranks() -> None:
    layout = Layout([0, 1], [Partial("sum")])
    assert survivors(layout, (4,), {2}, "test") is layout
    with pytest.raises(LayoutError, match="holds Partial"):
        survivors(layout, (4,), {1}, "test")


def test_what_are_no_ranks() -> None:
    assert lost_ranks([3, 1, 3]) == (1, 3)
    assert lost_ranks(range(0)) == ()
    for bad in (3, "3", [-1], [1.5], [True], None):
        with pytest.raises(LayoutError, match="lost"):
            lost_ranks(bad)


def test_other_numbers() -> None:
    for layout in LAYOUTS:
        numbers = {rank: 10 + (7 * rank) % 11 for rank in layout.ranks}
        other = renumbered(layout, numbers, "test")
        assert other.ranks == tuple(numbers[rank] for rank in layout.ranks)
        assert {numbers[r]: p for r, p in layout.pieces((7, 5)).items()} == other.pieces((7, 5))
        with pytest.raises(LayoutError, match="no new rank"):
            renumbered(layout, {layout.ranks[0]: 0}, "test")
