"""Which rank keeps copies of what, and what is gone without ranks; plain Python as oracle."""

from __future__ import annotations

import itertools

import pytest
import torch
from meshcast import Layout
from meshcast.base.boxes import piece_view
from meshcast.elastic.replicas import Keepers
from meshcast.resharding.state_entries import Held
from torch.distributed.tensor import Replicate, Shard

pytestmark = pytest.mark.timeout(60)

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c"}


def origin(layout: Layout, *shape: int, dtype: torch.dtype = torch.float32) -> Held:
    return Held(shape, dtype, layout, "cpu")


ORIGINS = {
    "fsdp": origin(Layout([0, 1, 2, 3, 4], [Shard(0)]), 7, 3),  # uneven, and an empty shard
    "half": origin(Layout([0, 1, 2, 3, 4], [Shard(1)]), 2, 10, dtype=torch.bfloat16),
    "across": origin(Layout([[0, 1], [2, 3]], [Replicate(), Shard(0)]), 5),  # a replica on each host
    "inside": origin(Layout([[0, 2], [1, 3]], [Replicate(), Shard(0)]), 5),  # both replicas on one host
    "stage": origin(Layout([3], [Replicate()]), 4, 4),
    "scalar": origin(Layout([0, 1], [Replicate()])),
    "nothing": origin(Layout([2], [Replicate()]), 0, 3),
}


def holders(name: str) -> dict[tuple, list[int]]:
    """{box: ranks that hold it}, as `shards` says."""
    found: dict[tuple, list[int]] = {}
    for rank, boxes in ORIGINS[name].layout.shards(ORIGINS[name].shape).items():
        for box in boxes:
            if all(lo < hi for lo, hi in box):
                found.setdefault(box, []).append(rank)
    return found


def test_what_is_on_one_host_alone_has_a_keeper_on_another() -> None:
    keepers = Keepers(ORIGINS, HOSTS)
    for name in ORIGINS:
        for box, ranks in holders(name).items():
            keeper = keepers.keeper.get((name, box))
            if len({HOSTS[rank] for rank in ranks}) > 1:
                assert keeper is None
            else:
                assert HOSTS[keeper] != HOSTS[ranks[0]]
    assert {name for name, _ in keepers.keeper} == {"fsdp", "half", "inside", "stage", "scalar"}


def test_keepers_keep_about_as_much_each() -> None:
    layout = Layout([0, 1, 2, 3, 4], [Shard(0)])
    keepers = Keepers({str(n): origin(layout, 10, 2 + n) for n in range(9)}, HOSTS)
    kept = [list(keepers.keeper.values()).count(rank) for rank in range(5)]
    assert sum(kept) == 45
    assert kept == [9] * 5


def test_on_one_host_any_one_rank() -> None:
    keepers = Keepers(ORIGINS, dict.fromkeys(range(5), "a"))
    for rank in range(5):
        assert keepers.gone([rank]) == []
    assert {name for name, _ in keepers.keeper} == {"fsdp", "half", "stage"}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_what_is_gone_and_what_keepers_give(count: int) -> None:
    keepers = Keepers(ORIGINS, HOSTS)
    for lost in itertools.combinations(range(5), count):
        gone, given = set(), {}
        for name in ORIGINS:
            for box, ranks in holders(name).items():
                keeper = keepers.keeper.get((name, box))
                if not set(ranks) <= set(lost):
                    continue
                if keeper is None or keeper in lost:
                    had = sorted({*ranks, keeper} - {None})
                    gone.add((name, box, tuple(had)))
                else:
                    given.setdefault(name, {}).setdefault(keeper, []).append(box)
        assert set(map(tuple, keepers.gone(lost))) == gone
        found = keepers.in_place_of(lost)
        assert {n: {r: sorted(b) for r, b in of.items()} for n, of in found.items()} == {
            n: {r: sorted(b) for r, b in of.items()} for n, of in given.items()
        }
        if count == 1 or set(lost) in ({0, 1}, {2, 3}):
            assert not gone  # any one host
        for name, boxes in found.items():
            pieces = keepers.layout(name, boxes).shards(ORIGINS[name].shape)
            for rank, more in boxes.items():
                assert set(more) <= set(pieces[rank])


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 2), (1, 3))],
        [((0, 2), (1, 3)), ((3, 5), (1, 3))],
        [((0, 2), (1, 3)), ((2, 3), (0, 4))],
    ],
    ids=["one", "joined", "flat"],
)
def test_boxes_are_found_in_local_tensors(boxes: list) -> None:
    full = torch.arange(20).reshape(5, 4)
    layout = Layout.from_boxes({1: boxes})
    parts = [full[tuple(slice(*side) for side in box)] for box in boxes]
    flat = len(boxes) > 1 and boxes[0][1] != boxes[1][1]
    local = torch.cat([part.reshape(-1) for part in parts]) if flat else torch.cat(parts)
    held = layout.pieces((5, 4))[1]
    assert [box for box, *_ in held[1]] == boxes
    for piece, part in zip(held[1], parts, strict=True):
        view = piece_view(local, piece)
        assert torch.equal(view, part)
        assert view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
