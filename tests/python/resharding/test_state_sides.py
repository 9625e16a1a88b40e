"""The sides of a state dict that ranks send each other: whatever goes in comes out, and what entries have in
common stands once."""

from __future__ import annotations

import copy

import pytest
import torch
from meshcast import Layout, LayoutError, TensorMap
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
    recorded_name,
)
from meshcast.resharding.state_moves import agree
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


WHOLE, HALVES = Layout([0, 1, 2, 3], [Shard(0)]), [Layout([r, r + 1], [Shard(0)]) for r in (0, 2)]
RECORDED, LOST = (7, 9, 10, 11, 12), 8
DTYPES = (torch.float32, torch.bfloat16, torch.float32, torch.float32)
PLACES = {
    "whole": WHOLE,
    "twins": HALVES,
    "spare": Layout([[0, 1], [2, LOST]], [Replicate(), Shard(0)]),
    "loaded": Layout([0, LOST], [Shard(0)]),
    "copies": None,
    "own": None,
}


def held_by(rank: int) -> dict[str, Held]:
    """Tensors of each kind. One has another dtype; another one of "whole" is on ranks 0 and 1."""
    found = {}
    for kind, place in PLACES.items():
        for at, dtype in enumerate(DTYPES):
            where = place[rank // 2] if isinstance(place, list) else place
            if (kind, at) == ("whole", 2):
                where = HALVES[0]
            if (kind, at) != ("whole", 2) or rank < 2:
                found[f"{kind}.{at}"] = Held((8, 3), dtype, where, "cpu")
    return found


def wanted_by(rank: int) -> dict[str, Wanted]:
    wide = Wanted(Layout([4, 5, 6], [Shard(0)]), "cpu", None, None, False, False)
    kinds = {"copies": wide._replace(layout=None), "spare": wide._replace(layout=None)}
    found = {name: kinds.get(name.split(".")[0], wide) for name in held_by(0)}
    if rank == 6:
        del found["copies.2"]
    return found | {name: each._replace(dtype=torch.float16) for name, each in found.items() if "2" in name}


def landings_of(rank: int) -> dict[str, Landing]:
    """Rows of two tensors: the same for ranks of one parity, in memory of other sizes."""
    piece = ((1, 4 * (rank % 2), 4 * (rank % 2) + 4, 3, 0, 3, 1),)
    return {
        f"parameter {at}": Landing(
            torch.float32, 13 + (at == 2), "cpu", (LandingSource(f"twins.{at}", (8, 3), piece),)
        )
        for at in range(4)
    }


def test_what_names_share_changes_nothing() -> None:
    """Ranks agree on the same where equal entries are one object, and where each is its own."""
    terms = Terms(None, False, False, "auto", None, ((LOST, LOST),))
    empty = checked_call(0, Given({}, {})).side._replace(options=terms)
    sides = {rank: empty._replace(held=held_by(rank), own=("own.0", "own.1")) for rank in range(4)}
    for at, dtype in enumerate(DTYPES):
        loaded = {f"loaded.{at}": LoadedBoxes(dtype, "cpu", (((4, 8), (0, 3)),))}
        sides[3 - at] = sides[3 - at]._replace(loaded=loaded)
    sides |= {rank: empty._replace(wanted=wanted_by(rank)) for rank in range(4, 7)}
    sides |= {rank: empty._replace(recorded=landings_of(rank)) for rank in RECORDED}

    known: dict = {}
    by_text = {text: unpack(StateSide, text, known) for text in map(pack, sides.values())}
    unpacked = {rank: by_text[pack(side)] for rank, side in sides.items()}
    shared = agree(unpacked)
    for rank, each in sides.items():
        held, wanted = (
            {name: copy.deepcopy(entry) for name, entry in part.items()} for part in (each.held, each.wanted)
        )
        sides[rank] = each._replace(held=held, wanted=wanted)
    apart = agree(sides)
    assert len(apart.twins) == 4
    assert shared.twins == apart.twins
    assert shared.targets == apart.targets
    assert list(shared.targets) == list(apart.targets)
    for at in range(4):
        (move,) = shared.targets[recorded_name(f"parameter {at}")].moves
        pieces = {rank: (13 + (at == 2), 4 * (rank % 2)) for rank in RECORDED}
        found = move.problem.dst.pieces((8, 3)).items()
        assert {rank: (numel, boxes[0][0][0][0]) for rank, ((numel,), boxes) in found} == pieces

    with pytest.raises(LayoutError) as error:
        agree({rank: side._replace(loaded={}) for rank, side in unpacked.items()})
    assert [name for name, *_ in error.value.gone] == [f"loaded.{at}" for at in range(4)]
