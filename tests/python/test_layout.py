"""Layouts against torch's own cutting, the notation of the paper, and bad input."""

import pickle
import random
from itertools import product

import planning_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshcast import Layout, LayoutError
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def _normalised(placements: tuple[Placement, ...], ndim: int) -> list[Placement]:
    out: list[Placement] = []
    for placement in placements:
        if isinstance(placement, _StridedShard):
            out.append(_StridedShard(placement.dim % ndim, split_factor=placement.split_factor))
        elif isinstance(placement, Shard):
            out.append(Shard(placement.dim % ndim))
        else:
            out.append(placement)
    return out


def test_shards_are_those_of_dtensor() -> None:
    """Shapes and offsets by torch's rule, and element by element what torch's placements cut from a
    tensor."""
    several_boxes = empty = 0
    for seed in range(400):
        rng = random.Random(seed)
        shape = planning_cases.tensor_shape(rng)
        layout, _ = planning_cases.layout_pair(rng, len(shape), rng.choice((None, "sum")))
        placements = _normalised(layout.placements, len(shape))
        numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
        shards = layout._core(shape).shards(shape)
        coordinates = product(*map(range, layout.mesh_shape))
        for (rank, local_shape, pieces), expected_rank, coordinate in zip(
            shards, layout.ranks, coordinates, strict=True
        ):
            where = f"seed {seed}: {layout} of {shape} on rank {rank}"
            assert rank == expected_rank
            torch_shape, offset = _compute_local_shape_and_global_offset(
                shape, layout.mesh_shape, list(coordinate), placements
            )
            assert local_shape == torch_shape, where
            if pieces:
                assert tuple(lo for lo, _ in pieces[0][0]) == offset, where
            assert bool(pieces) == (0 not in local_shape), where
            local = numbers
            for placement, parts, part in zip(placements, layout.mesh_shape, coordinate, strict=True):
                if placement.is_shard() or isinstance(placement, _StridedShard):
                    local = placement._split_tensor(local, parts, with_padding=False, contiguous=False)[0][
                        part
                    ]
            ours = torch.full(local_shape, -1)
            for box, at in pieces:
                window = tuple(slice(a, a + hi - lo) for a, (lo, hi) in zip(at, box, strict=True))
                assert (ours[window] == -1).all(), where
                ours[window] = numbers[tuple(slice(lo, hi) for lo, hi in box)]
            assert torch.equal(ours, local), where
            assert layout.shards(shape)[rank] == [box for box, _ in pieces]
            assert layout.local_shapes(shape)[rank] == local_shape
            several_boxes += len(pieces) > 1
            empty += not pieces
    assert several_boxes > 100  # the generator reaches the cases that matter
    assert empty > 100


def test_shards_examples() -> None:
    layout = Layout([[0, 1], [2, 3]], [Shard(0), Replicate()])
    assert layout.shards((5, 2)) == {
        0: [((0, 3), (0, 2))],
        1: [((0, 3), (0, 2))],
        2: [((3, 5), (0, 2))],
        3: [((3, 5), (0, 2))],
    }
    assert Layout([4, 7, 9], [Shard(-1)]).shards((2,)) == {4: [((0, 1),)], 7: [((1, 2),)], 9: []}
    assert Layout([3], [Replicate()]).shards(()) == {3: [()]}
    assert Layout([0, 1], [_StridedShard(0, split_factor=2)]).shards((8,)) == {
        0: [((0, 2),), ((4, 6),)],
        1: [((2, 4),), ((6, 8),)],
    }
    assert Layout([0, 1], [Shard(0)]).shards((1 << 40, 4))[1] == [((1 << 39, 1 << 40), (0, 4))]


@pytest.mark.parametrize(
    ("text", "mesh", "first", "placements"),
    [
        ("2x4:S0RR", (2, 4), 0, (Shard(0), Replicate())),
        ("1x4@8:S1RR", (1, 4), 8, (Replicate(), Shard(0))),
        ("2x4:RS01R", (2, 4), 0, (Shard(1), Shard(1))),
        ("2x3:S1S0", (2, 3), 0, (Shard(1), Shard(0))),
        ("4:", (4,), 0, (Replicate(),)),
        ("2x1x2x1x2@3:RRRS024", (2, 1, 2, 1, 2), 3, (Shard(3), Replicate(), Shard(3), Replicate(), Shard(3))),
    ],
)
def test_notation(text: str, mesh: tuple[int, ...], first: int, placements: tuple[Placement, ...]) -> None:
    layout = Layout.parse(text)
    assert layout.mesh_shape == mesh
    assert layout.ranks == tuple(range(first, first + torch.Size(mesh).numel()))
    assert layout.placements == placements


def test_first_rank_is_the_default_of_the_notation() -> None:
    assert Layout.parse("2x2:S0R", first_rank=6).ranks == (6, 7, 8, 9)
    assert Layout.parse("2x2@1:S0R", first_rank=6).ranks == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "allowed"),
        ("2x4", "2x4"),
        ("2x4:S2RR", "mesh axis 2"),
        ("2x4:S0S0R", "axis 0 shards twice"),
        ("2x4:S10R", "order"),
        ("2x4:Q", "allowed"),
        ("0x4:R", "0 ranks"),
        ("1x1x1x1x1x1:R", "6 mesh dimensions"),
        ("999999x999999:R", "999998000001 ranks"),
        ("2:RRRRRRRRR", "9 tensor dimensions"),
        ("\uff12:R", "allowed"),
        ("2x4:s0RR", "allowed"),
        ("2 x 4:R", "allowed"),
    ],
)
def test_bad_notation(text: str, names: str) -> None:
    with pytest.raises(LayoutError, match=names):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("text", "shape", "placements"),
    [
        ("2x4:Shard(0),Replicate()", (2, 4), (Shard(0), Replicate())),
        ("4@8: Shard(dim=-1)", (4,), (Shard(-1),)),
        (
            "2x2x2:Partial(), Partial(max) ,Partial('avg')",
            (2, 2, 2),
            (Partial(), Partial("max"), Partial("avg")),
        ),
        (
            "2x2:_StridedShard(1, split_factor=2),Shard(1)",
            (2, 2),
            (_StridedShard(1, split_factor=2), Shard(1)),
        ),
    ],
)
def test_torchs_words_are_read(text: str, shape: tuple[int, ...], placements: tuple[object, ...]) -> None:
    layout = Layout.parse(text)
    assert (layout.mesh_shape, layout.placements) == (shape, placements)
    assert layout == Layout(torch.arange(len(layout.ranks)).view(shape) + layout.ranks[0], placements)
    written = f"{'x'.join(map(str, shape))}@{layout.ranks[0]}:{','.join(layout.placement_texts)}"
    assert Layout.parse(written) == layout


def test_both_notations_say_the_same() -> None:
    for paper, words in (("2x4:S0R", "Shard(0),Replicate()"), ("2x4:S1R", "Replicate(),Shard(0)")):
        both = [Layout.parse(paper), Layout.parse(f"2x4:{words}")]
        assert both[0].shards((8, 6)) == both[1].shards((8, 6))


@pytest.mark.parametrize(
    "text",
    [
        "2x4:Shard(0)",
        "2:Shard(0),Replicate()",
        "2:Shard()",
        "2:Shard(0)Shard(1)",
        "2:Partial(mean)",
        "2:Replicate(0)",
        "2:(",
        "2:Shard(0)S0",
        "2:_StridedShard(0)",
        "2:_StridedShard(0, split_factor=0)",
        "2:Shard(99999999999999)",
    ],
)
def test_wrong_words_are_refused(text: str) -> None:
    with pytest.raises(LayoutError, match=r"placement|split_factor|Shard\(dim\)"):
        Layout.parse(text)


@given(st.text(alphabet="0123456789xX@:SR -", max_size=24) | st.text(max_size=12))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        layout = Layout.parse(text)
    except LayoutError:
        return
    assert len(layout.ranks) == torch.Size(layout.mesh_shape).numel()


@pytest.mark.parametrize(
    ("mesh", "placements", "names"),
    [
        ([0, 1], [], "0 placements for a mesh of 1 dimensions"),
        ([[0, 1]], [Shard(0)], "1 placements for a mesh of 2"),
        ([], [Shard(0)], "no ranks"),
        ([[0, 1], [2]], [Shard(0), Shard(0)], "ragged"),
        ([[0, 1], 2], [Shard(0), Shard(0)], "ragged"),
        ([0, 0], [Shard(0)], "rank 0 appears twice"),
        ([0, -1], [Shard(0)], "mesh rank -1"),
        ([0, 1 << 31], [Shard(0)], "mesh rank 2147483648"),
        ([0, 1.5], [Shard(0)], "1.5"),
        ([True, False], [Shard(0)], "True"),
        (7, [Shard(0)], "nested list"),
        ("01", [Shard(0)], "'01'"),
        ([[[[[[0]]]]]], [Shard(0)] * 6, "more than 5 dimensions"),
        ([0, 1], ["S0"], "'S0'"),
        ([0, 1], "S", "one placement per mesh dimension"),
        ([0, 1], [Shard], "Shard"),
        ([0, 1], [Partial("bogus")], "bogus"),
        ([0, 1], [_StridedShard(0, split_factor=0)], "split_factor"),
        ([0, 1], [None], "None"),
    ],
)
def test_bad_layout(mesh: object, placements: list[Placement], names: str) -> None:
    with pytest.raises(LayoutError, match=names) as caught:
        Layout(mesh, placements)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("layout", "shape", "names"),
    [
        (Layout([0, 1], [Shard(1)]), (4,), "-1 to 0"),
        (Layout([0, 1], [Shard(-3)]), (4, 4), "-2 to 1"),
        (Layout([0, 1], [Shard(0)]), (), "scalar"),
        (Layout([0, 1], [Shard(0)]), (-1,), "-1"),
        (Layout([0, 1], [Shard(0)]), (2.0,), "2.0"),
        (Layout([0, 1], [Shard(0)]), "12", "shape"),
        (Layout([0, 1], [Shard(0)]), (1,) * 9, "9 dimensions"),
        (Layout.parse("2:RS0"), (4,), "2 dimensions"),
    ],
)
def test_bad_shape(layout: Layout, shape: tuple[int, ...], names: str) -> None:
    with pytest.raises(LayoutError, match=names):
        layout.shards(shape)


def test_layouts_are_values() -> None:
    a = Layout(torch.tensor([[0, 1], [2, 3]]), (Shard(0), Replicate()))
    b = Layout([[0, 1], [2, 3]], [Shard(0), Replicate()])
    assert a == b
    assert hash(a) == hash(b)
    assert pickle.loads(pickle.dumps(a)) == a
    others = [
        Layout([[0, 1], [3, 2]], [Shard(0), Replicate()]),
        Layout([[0, 1], [2, 3]], [Shard(1), Replicate()]),
        Layout([0, 1, 2, 3], [Shard(0)]),
        Layout([[0, 1], [2, 3]], [_StridedShard(0, split_factor=2), Replicate()]),
        Layout([[0, 1], [2, 3]], [Partial("sum"), Replicate()]),
    ]
    assert len({a, *others}) == 6
    assert repr(a) == "Layout(2x2 ranks [0..3], (Shard(0), Replicate()))"
    assert a.placements == (Shard(0), Replicate())
    assert others[4].has_partial
    assert not a.has_partial
