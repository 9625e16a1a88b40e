"""Layouts by boxes: what they hold, what they refuse, and that plans between them move every element."""

from __future__ import annotations

import itertools
import json
import pickle
import random

import meshcast
import pytest
import torch
from meshcast import Layout, LayoutError
from meshcast.base.checks import Reader
from meshcast.cli import main
from plan_interpreter import execute
from torch.distributed.tensor import Partial, Replicate, Shard


def rows(*intervals: tuple[int, int], columns: int = 4):
    return [(interval, (0, columns)) for interval in intervals]


def test_boxes_in_local_memory() -> None:
    layout = Layout.from_boxes(
        {
            3: [((0, 2), (0, 6))],
            1: rows((4, 6), (0, 2), columns=6),
            2: [((2, 4), (4, 6)), ((2, 4), (0, 2))],
            0: [((2, 3), (0, 2)), ((4, 6), (2, 4))],
            7: [],
            8: [((0, 0), (0, 6)), ((1, 2), (0, 6))],
        }
    )
    assert layout.ranks == (0, 1, 2, 3, 7, 8)
    assert layout.local_shapes((6, 6)) == {
        0: (6,),  # different in both dimensions: flat
        1: (4, 6),
        2: (2, 4),
        3: (2, 6),
        7: (0, 0),
        8: (1, 6),
    }
    assert layout.shards((6, 6))[1] == [((4, 6), (0, 6)), ((0, 2), (0, 6))]
    assert layout.shards((6, 6))[7] == []
    assert layout.by_boxes
    assert layout.placements == ()
    assert "8 boxes" in repr(layout)


def test_boxes_compare_and_travel() -> None:
    given = {0: rows((0, 2)), 1: rows((2, 4))}
    layout = Layout.from_boxes(given)
    assert layout == Layout.from_boxes(dict(reversed(given.items())))
    assert hash(layout) == hash(
        Layout.from_boxes({0: [[[0, 2], [0, 4]]], 1: torch.tensor([[[2, 4], [0, 4]]])})
    )
    for other in ({0: rows((0, 2)), 1: rows((2, 3))}, {0: rows((0, 2)), 2: rows((2, 4))}, {0: rows((0, 2))}):
        assert layout != Layout.from_boxes(other)
    assert Layout.from_boxes({0: rows((0, 1), (2, 3))}) != Layout.from_boxes({0: rows((2, 3), (0, 1))})
    wire = json.loads(json.dumps(layout.to_wire()))
    assert Layout.from_wire(Reader(wire, "layout")) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert layout != Layout([0, 1], [Shard(0)])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "mapping"),
        ([], "mapping"),
        ({0: [], 1: []}, "no rank has a box"),
        ({-1: rows((0, 1))}, "rank -1"),
        ({0: rows((0, 2), (1, 3))}, "rank 0 overlap"),
        ({0: [((0, 4), (0, 1)), ((2, 3), (0, 4))]}, "overlap"),
        ({0: [(), ()]}, "twice"),
        ({0: [((2, 1),)]}, "hi 1"),
        ({0: [((0, 1, 2),)]}, "(lo, hi)"),
        ({0: [((-1, 1),)]}, "lo -1"),
        ({0: [((0, 1),)], 1: [((0, 1), (0, 1))]}, "dimensions"),
        ({0: [((0, 1),) * 9]}, "9 dimensions"),
        ({0: 3}, "boxes of rank 0"),
        ({"0": rows((0, 1))}, "rank '0'"),
    ],
)
def test_boxes_that_are_wrong(given, text: str) -> None:
    with pytest.raises(LayoutError, match=text.replace("(", r"\(").replace(")", r"\)")):
        Layout.from_boxes(given)


def test_boxes_out_of_range() -> None:
    layout = Layout.from_boxes({0: rows((0, 2)), 4: rows((2, 5))})
    for shape in ((4, 4), (5, 3), (5,), (5, 4, 1)):
        with pytest.raises(LayoutError, match="rank"):
            layout.shards(shape)
    assert layout.local_shapes((5, 4)) == {0: (2, 4), 4: (3, 4)}


def test_boxes_that_no_rank_holds() -> None:
    source = Layout.from_boxes({0: rows((0, 2)), 1: rows((3, 4))})
    with pytest.raises(LayoutError, match=r"wanted by rank 5.*4 of its elements"):
        meshcast.plan((4, 4), "float32", source, Layout([5], [Replicate()]))
    meshcast.plan((4, 4), "float32", source, Layout.from_boxes({5: rows((0, 2), (3, 4))}))


def test_wires_that_are_wrong() -> None:
    wire = Layout.from_boxes({0: rows((0, 2)), 1: [((0, 1), (0, 1)), ((2, 3), (2, 4))]}).to_wire()
    good = json.dumps(wire)
    for change in (
        lambda w: w["held"].pop(),
        lambda w: w.update(placements=[["replicate"]]),
        lambda w: w.pop("ndim"),
        lambda w: w["held"][0].pop(),
        lambda w: w["held"][0][1][0].pop(),
        lambda w: w["held"][0][1][0].__setitem__(0, [[0, 2, 3], [0, 4]]),
        lambda w: w["held"][1][1][0].__setitem__(2, [0, -1]),
    ):
        bad = json.loads(good)
        change(bad)
        with pytest.raises(LayoutError):
            Layout.from_wire(Reader(bad, "layout"))
    bad = json.loads(good)
    bad["held"][1][1][1][1] = [99]  # behind the end of its local tensor
    with pytest.raises(LayoutError, match="local tensor"):
        Layout.from_wire(Reader(bad, "layout")).shards((4, 4))


def cut_up(rng: random.Random, shape: tuple[int, ...], ranks: list[int], copies: bool) -> Layout:
    """Every element on one rank or more, in boxes at random."""
    cuts = [sorted({0, size, *(rng.randint(0, size) for _ in range(rng.randint(0, 3)))}) for size in shape]
    held: dict[int, list] = {rank: [] for rank in ranks}
    for box in itertools.product(*(list(itertools.pairwise(each)) for each in cuts)):
        for rank in rng.sample(ranks, rng.randint(1, 2) if copies else 1):
            held[rank].append(box)
    for boxes in held.values():
        rng.shuffle(boxes)
    return Layout.from_boxes(held)


def test_plans_between_boxes() -> None:
    """Random boxes to random boxes and to placements and back, checked by an interpreter of plans."""
    rng = random.Random(5)
    for seed in range(120):
        shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))
        a = cut_up(rng, shape, [0, 1, 2, 3], copies=bool(seed % 2))
        b = cut_up(rng, shape, [2, 3, 4], copies=bool(seed % 3))
        dim = rng.randrange(len(shape))
        c = Layout([[1, 2], [5, 6]], rng.choice([[Shard(dim), Replicate()], [Replicate(), Shard(dim)]]))
        d = Layout([0, 3], [Partial("sum")])
        src, dst = [(a, b), (a, c), (c, b), (d, b), (a, a)][seed % 5]
        strategy = rng.choice(["auto", "send_recv", "broadcast", "multicast"])
        if src is d and strategy not in ("auto", "multicast"):
            strategy = "auto"
        plan = meshcast.plan(shape, "float32", src, dst, meshcast.Topology.uniform(2, 10), strategy)
        execute(plan, seed)
        assert meshcast.Plan.from_json(plan.to_json()) == plan


def test_partly_overlapping_boxes() -> None:
    """Ranks with KV heads in common hold boxes that overlap in part: every element travels once to each."""
    source = Layout.from_boxes({0: rows((0, 6)), 1: rows((4, 10)), 2: rows((2, 5))})
    target = Layout.from_boxes({3: rows((1, 7)), 4: rows((3, 9))})
    plan = meshcast.plan((10, 4), "bfloat16", source, target)
    execute(plan, 1)
    assert sum(plan.bytes_received(rank) for rank in (3, 4)) == 2 * (6 + 6) * 4


def test_boxes_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    boxes = '{"0": [[[0, 2], [0, 4]]], "1": [[[2, 4], [0, 4]]]}'
    arguments = ["plan", "--shape", "4,4", "--dtype", "int32", "--dst", "1x2@2:RS1", "--src"]
    assert main([*arguments, boxes]) == 0
    assert "Layout(2 boxes on ranks [0..1])" in capsys.readouterr().out
    assert main([*arguments, '{"0": [[[0, 9], [0, 4]]]}']) != 0
    assert "--src" in capsys.readouterr().err
    assert main([*arguments, '{"a": []}']) != 0
