"""Messages that the ranks of reshard_state_dict exchange once: what they hold, and where they want it."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..base import checks
from ..base.checks import Reader
from ..errors import PlanMismatchError
from ..layout import Layout
from .meshes import Family
from .state_entries import Held, Wanted

__all__ = [
    "OP",
    "Output",
    "Side",
    "decode",
    "encode",
    "held_text",
    "mismatch",
    "names_text",
    "text_digest",
    "wanted_text",
]

OP = "reshard_state_dict"


class Output(NamedTuple):
    """A tensor that one rank receives into. plain: a local tensor, whose shape this is."""

    shape: tuple[int, ...]
    dtype: str
    plain: bool


class Side(NamedTuple):
    """One rank's side of a call. ties, out_ties: tensors, and outputs,
    that are an earlier one. carried: entries that are no tensors, as text. renamed: {name before: name};
    unmatched: names that rename= or only= give and this rank does not know. selects: it has an only=. own:
    entries of which each rank has its own. loaded: {name: [dtype, device, boxes]} beside what is held. maps:
    as TensorMap.wire says them. scales: {name: [name of its scales, block]}. obstacles: why the rank can take
    no part in transfers between GPUs, and in those between CPUs and GPUs; "" where it can."""

    held: dict[str, Held]
    wanted: dict[str, Wanted]
    outs: dict[str, Output]
    ties: dict[str, str]
    out_ties: dict[str, str]
    carried: dict[str, Any]
    renamed: dict[str, str | None]
    unmatched: dict[str, list[str]]
    selects: bool
    own: list[str]
    loaded: dict[str, Any]
    maps: list[Any]
    scales: dict[str, Any]
    options: dict[str, Any]
    obstacles: list[str]


class _Table:
    """Values that many entries have in common, said once."""

    def __init__(self) -> None:
        self.places: dict[Any, int] = {}

    def place(self, value: Any) -> int:
        return -1 if value is None else self.places.setdefault(value, len(self.places))


_SAID_AS_THEY_ARE = [name for name in Side._fields if name not in ("held", "wanted", "outs")]


def encode(side: Side) -> str:
    """Returns a side as JSON."""
    layouts, families, dtypes = _Table(), _Table(), _Table()
    held = {
        name: [
            each.shape,
            dtypes.place(each.dtype),
            layouts.place(each.layout),
            each.device_type,
            families.place(each.family),
            int(each.plain),
        ]
        for name, each in side.held.items()
    }
    wanted = {
        name: [
            layouts.place(each.layout),
            each.device_type,
            families.place(each.family),
            each.dtype,
            int(each.plain),
            int(each.floats),
        ]
        for name, each in side.wanted.items()
    }
    return json.dumps(
        {
            "layouts": [layout.to_wire() for layout in layouts.places],
            "families": list(families.places),
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes.places],
            "held": held,
            "wanted": wanted,
            "outs": side.outs,
            **{name: getattr(side, name) for name in _SAID_AS_THEY_ARE},
        },
        separators=(",", ":"),
    )


def text_digest(text: str) -> tuple[int, int]:
    """Returns a digest of what a rank says: 128 bits in two int64; zeros for ""."""
    if not text:
        return 0, 0
    low, high = struct.unpack("<qq", hashlib.blake2b(text.encode(), digest_size=16).digest())
    return low, high


def decode(text: str, known: dict[Layout, Layout]) -> Side:
    """known: layouts that other sides have said, so that equal ones are one."""
    said = json.loads(text)
    layouts = [Layout.from_wire(Reader(wire, "layout")) for wire in said["layouts"]]
    layouts = [known.setdefault(layout, layout) for layout in layouts]
    families = [_family(each) for each in said["families"]]
    dtypes = [checks.dtype(name) for name in said["dtypes"]]
    held = {
        name: Held(
            tuple(shape),
            dtypes[dtype],
            None if layout < 0 else layouts[layout],
            device,
            None if family < 0 else families[family],
            bool(plain),
        )
        for name, (shape, dtype, layout, device, family, plain) in said["held"].items()
    }
    wanted = {
        name: Wanted(
            layouts[layout],
            device,
            None if family < 0 else families[family],
            dtype,
            bool(plain),
            bool(floats),
        )
        for name, (layout, device, family, dtype, plain, floats) in said["wanted"].items()
    }
    outs = {name: Output(tuple(shape), dtype, plain) for name, (shape, dtype, plain) in said["outs"].items()}
    return Side(held, wanted, outs, **{name: said[name] for name in _SAID_AS_THEY_ARE})


def _family(said: Any) -> Family:
    names, all_names, shape, ranks = said
    return tuple(names), tuple(all_names), tuple(shape), tuple(ranks)


def held_text(said: Held) -> str:
    where = "as a plain tensor" if said.layout is None else f"under {said.layout}"
    return f"{said.dtype} {said.shape} {where} on {said.device_type}"


def wanted_text(said: Wanted) -> str:
    dtype = "" if said.dtype is None else f" as {said.dtype}"
    return f"{said.layout} on {said.device_type}{dtype}"


def names_text(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def mismatch(text: str, rank: int) -> PlanMismatchError:
    return PlanMismatchError(f"{OP}: {text}", rank=rank, op=OP, phase="agree")
