"""BlockScaled: what is refused, and what is made of it. Calls: multiproc/test_quantize_own.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from meshcast import BlockScaled, LayoutError
from meshcast.base.wire import pack, unpack
from meshcast.transfers.block_scaled import Quantize, Quantizing, scheme_of


def by_something(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return part, part


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"quantize": 3}, "is no function"),
        ({"block": 64}, "expected a sequence"),
        ({"block": (64,)}, "expected \\(rows, columns\\)"),
        ({"block": (1, 2, 3)}, "expected \\(rows, columns\\)"),
        ({"block": (0, 64)}, "allowed are 1 to"),
        ({"block": (1, 64.0)}, "expected an integer"),
        ({"dtype": "weights"}, "expected a torch dtype"),
        ({"dtype": torch.uint4}, "uint4 cannot be copied"),
        ({"packed": 3}, "does not divide 64"),
        ({"packed": 128}, "allowed are 1 to 64"),
        ({"packed": True}, "expected an integer"),
        ({"scales": {}}, "a mapping of the suffixes"),
        ({"scales": {"": torch.float32}}, "a mapping of the suffixes"),
        ({"scales": {3: torch.float32}}, "a mapping of the suffixes"),
        ({"scales": {"_s": 4}}, "expected a torch dtype"),
        ({"scales": None}, "expected a torch dtype"),
        ({"name": 3}, "is no text"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], text: str) -> None:
    right = {"quantize": by_something, "block": (1, 64), "dtype": torch.int8}
    assert BlockScaled(**right).scheme.own
    with pytest.raises(LayoutError, match=text):
        BlockScaled(**(right | wrong))


def test_names_of_types() -> None:
    made = partial(BlockScaled, block=(2, 8), dtype=torch.uint8)
    assert repr(made(by_something)) == "<BlockScaled by_something (uint8 by blocks of 2x8)>"
    assert made(by_something, packed=2).scheme.text == "by_something (uint8 by blocks of 2x8, 2 in a value)"
    assert made(partial(by_something), name="mine").scheme.text.startswith("mine (")
    assert made(partial(by_something)).scheme.text.startswith("partial (")


def test_types_that_differ_are_no_equals() -> None:
    """As ranks compare them, in the text that they exchange."""
    made = partial(BlockScaled, by_something, block=(2, 8), dtype=torch.uint8)
    all_ = [
        made(),
        made(name="other"),
        made(block=(8, 2)),
        made(dtype=torch.int8),
        made(packed=2),
        made(scales=torch.bfloat16),
        made(scales={"_scale": torch.float32, "_zero": torch.float32}),
        made(scales={"_scales": torch.float32}),
    ]
    schemes = [each.scheme for each in all_] + [
        scheme_of(text) for text in ("mxfp8", "nvfp4", "fp8_e4m3:2x8")
    ]
    assert len({*schemes}) == len(schemes)
    for scheme in schemes:
        asked = Quantize(scheme, ("a",), False)
        assert unpack(Quantize, pack(asked)) == asked


def test_what_a_rank_asks_for() -> None:
    kind = BlockScaled(
        by_something, block=(1, 8), dtype=torch.int8, scales={"_s": torch.half, "_z": torch.int8}
    )
    for given in (kind, {"w": kind}, lambda name: kind if name == "w" else None):
        asked = Quantizing(given)
        assert asked.of("w") == Quantize(kind.scheme, ("w_s", "w_z"), given is kind)
        assert asked.own("w", kind.scheme) is kind
        assert given is kind or asked.of("v") is None
    named = Quantizing({"w": (kind, ("a", "b"))})
    assert named.of("w") == Quantize(kind.scheme, ("a", "b"), False)
    assert named.own("w", kind.scheme) is kind
    with pytest.raises(LayoutError, match="give all ranks that hold it the same BlockScaled"):
        named.own("w", BlockScaled(by_something, block=(1, 4), dtype=torch.int8).scheme)
    for given in (None, "mxfp8", {}, {"w": "mxfp8"}):
        with pytest.raises(LayoutError, match="this rank, which holds a part of it, was given"):
            Quantizing(given).own("w", kind.scheme)
    with pytest.raises(LayoutError, match="expected a block-scaled type"):
        Quantizing(3)
    with pytest.raises(LayoutError, match=r"and a meshcast\.BlockScaled"):
        Quantizing({"w": by_something}).of("w")


def test_memory_that_is_short_stays_what_it_is() -> None:
    def short(_: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        BlockScaled(short, block=(1, 8), dtype=torch.int8).made("w", torch.zeros(2, 8))
