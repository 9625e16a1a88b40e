"""The sides of a state dict that ranks send each other: whatever goes in comes out, and what entries have in
common stands once."""

from __future__ import annotations

import torch
from meshcast import Layout, TensorMap
from meshcast.base.boxes import common
from meshcast.base.wire import pack, unpack
from meshcast.resharding.meshes import Family
from meshcast.resharding.recorded import Landing, LandingSource
from meshcast.resharding.state_arguments import Given, checked_call
from meshcast.resharding.state_entries import (
    Held,
    LoadedBoxes,
    Output,
    StateSide,
    Terms,
    Wanted,
)
from torch.distributed.tensor import Replicate, Shard

HELD, WANTED = Layout([0, 1], [Shard(0)]), Layout([2, 3], [Replicate()])
FAMILY = Family(("tp",), ("dp", "tp"), (2, 2), (0, 1, 2, 3))


def side(count: int) -> StateSide:
    names = [f"layers.{number}.weight" for number in range(count)]
    inner = TensorMap(["a", "b"], stack=True)
    return StateSide(
        held={name: Held((4, 2), torch.bfloat16, HELD, "cuda", FAMILY) for name in names},
        wanted={name: Wanted(WANTED, "cpu", None, torch.float32, False, True) for name in names},
        outs={"layers.0.weight": Output((4, 2), torch.float32, True)},
        ties={"x": "y"},
        out_ties={},
        carried={"step": "3"},
        renamed={"old": "new", "left out": None},
        unmatched={"only": ("z",), "dtype": ()},
        selects=True,
        own=("seed",),
        dtypes={"x": torch.bfloat16},
        loaded={"x": LoadedBoxes(torch.int8, "cpu", (((0, 1), (2, 3)),))},
        recorded={
            "w": Landing(torch.float32, 8, "cpu", (LandingSource("x", (2, 4), ((0, 0, 2, 4, 0, 4, 1),)),))
        },
        skipped=("y",),
        maps=(
            TensorMap([inner, "c"], "d", permute=(1, 0)),
            TensorMap("e", ["f", "g"], sizes=[1, 3]),
        ),
        scales={"x": ("x scales", (128, 1))},
        options=Terms(1 << 20, True, False, "auto", torch.float16, ((7, 3),)),
        obstacles=("no GPU", ""),
    )


def test_sides_come_back() -> None:
    again = unpack(StateSide, pack(side(3)))
    assert again == side(3)
    assert isinstance(again.maps[0].sources[0], TensorMap)


def test_what_entries_have_in_common_stands_once() -> None:
    text = pack(side(200))
    for each in ("bfloat16", "shard", "dp", "cuda", "replicate"):
        assert text.count(each) == 1, each
    assert len(text) < 200 * 2 * len('"layers.100.weight":99,') + 1500
    known: dict = {}
    sides = [unpack(StateSide, text, known) for _ in range(2)]
    assert len({id(held) for each in sides for held in each.held.values()}) == 1


def test_calls_of_one_kind_differ_in_values_alone() -> None:
    def key(shape: int, step: int):
        return checked_call(0, Given({"w": torch.zeros(shape), "step": step}, {"w": WANTED})).key()

    assert key(2, 1) == key(2, 5)
    assert hash(key(2, 1)) == hash(key(2, 5))
    assert key(2, 1) != key(3, 1)


def test_elements_of_both_boxes() -> None:
    assert common(((0, 4), (1, 3)), ((2, 9), (0, 2))) == ((2, 4), (1, 2))
    assert common(((0, 4),), ((4, 5),)) is None
    assert common((), ()) == ()
