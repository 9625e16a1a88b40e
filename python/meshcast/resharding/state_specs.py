"""What the ranks of reshard_state_dict tell each other once: the tensors they hold and where these go."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base import checks
from ..base.json_reader import Reader
from ..errors import LayoutError, MeshcastError, PlanMismatchError
from ..layout import Layout
from ..transfers.gpu_offer import DeviceTypes, device_types_of

__all__ = ["Entry", "decode", "encode", "merge"]

_OP = "reshard_state_dict"


@dataclass(frozen=True)
class Entry:
    """One tensor as the ranks agree on it. dtype: of the source; result_dtype: of the result; rows: where
    source and result are."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    result_dtype: torch.dtype
    src: Layout
    dst: Layout
    device_types: DeviceTypes


def encode(
    held: Mapping[str, tuple[Sequence[int], torch.dtype, Layout, str]],
    wanted: Mapping[str, tuple[Layout, str]],
    outs: Mapping[str, tuple[Sequence[int], torch.dtype]],
    options: Mapping[str, Any],
    obstacles: Sequence[str],
) -> str:
    """One rank's side as JSON: tensors held and destinations, each with the device type of its mesh, outputs
    given, the options of the call, and why this rank can take no part in transfers between GPUs and in those
    between CPUs and GPUs, "" where it can."""
    return json.dumps(
        {
            "held": {
                name: [list(shape), checks.dtype_name(dtype), layout.to_wire(), device]
                for name, (shape, dtype, layout, device) in held.items()
            },
            "wanted": {name: [layout.to_wire(), device] for name, (layout, device) in wanted.items()},
            "outs": {name: [list(shape), checks.dtype_name(dtype)] for name, (shape, dtype) in outs.items()},
            "options": dict(options),
            "obstacles": list(obstacles),
        }
    )


def decode(text: str) -> dict[str, Any]:
    return json.loads(text)


def merge(rows: Mapping[int, Mapping[str, Any]], rank: int) -> list[Entry]:
    """The tensors in the order of the destinations. Every rank has the same rows, so that all raise alike:
    PlanMismatchError where ranks contradict each other, LayoutError where a name is missing or a rank has no
    GPU where it needs one."""
    ranks = sorted(rows)
    first = rows[ranks[0]]
    for other in ranks[1:]:
        _compare(ranks[0], first, other, rows[other], rank)
    dtype = first["options"]["dtype"]
    entries = []
    for name, (text, device) in first["wanted"].items():
        shape, source_dtype, layout, source_device = _held(name, rows, rank)
        src = _layout(layout)
        for holder in src.ranks:
            if holder not in rows:
                raise LayoutError(
                    f"{_OP}: {name!r} is on rank {holder}, which is not in the group; pass group= a group "
                    "that holds all meshes",
                    rank=rank,
                    op=_OP,
                )
            if name not in rows[holder]["held"]:
                raise LayoutError(
                    f"{_OP}: rank {holder} is in the mesh of {name!r} but its state_dict has no such key",
                    rank=rank,
                    op=_OP,
                )
        result = _result_dtype(name, source_dtype, dtype, shape, rows, rank)
        where = device_types_of(source_device, device, _OP)
        entry = Entry(name, tuple(shape), source_dtype, result, src, _layout(text), where)
        _check_gpus(entry, rows, rank)
        entries.append(entry)
    if first["options"]["strict"]:
        for holder in ranks:
            extra = [name for name in rows[holder]["held"] if name not in first["wanted"]]
            if extra:
                raise LayoutError(
                    f"{_OP}: rank {holder} holds {_names(extra)}, for which no destination is given; add one "
                    "or pass strict=False",
                    rank=rank,
                    op=_OP,
                )
    return entries


def _compare(a: int, first: Mapping[str, Any], b: int, second: Mapping[str, Any], rank: int) -> None:
    if list(first["wanted"]) != list(second["wanted"]):
        odd = sorted(set(first["wanted"]) ^ set(second["wanted"]))
        raise _mismatch(
            f"ranks {a} and {b} ask for different tensors: "
            + (f"only one of them names {_names(odd)}" if odd else "their names come in another order"),
            rank,
        )
    for name, text in first["wanted"].items():
        if text != second["wanted"][name]:
            raise _mismatch(
                f"the destination of {name!r} is {_target(text)} on rank {a}, but "
                f"{_target(second['wanted'][name])} on rank {b}",
                rank,
            )
    if first["options"] != second["options"]:
        raise _mismatch(
            f"the options are {first['options']} on rank {a}, but {second['options']} on rank {b}", rank
        )


def _check_gpus(entry: Entry, rows: Mapping[int, Mapping[str, Any]], rank: int) -> None:
    """Raises LayoutError where one of the tensor's ranks cannot use the GPU that it should be on."""
    for layout, device in zip((entry.src, entry.dst), entry.device_types, strict=True):
        for other in layout.ranks if device == "cuda" else ():
            # A destination outside the group has said nothing; it is refused where the call is compiled.
            reason = rows[other]["obstacles"][entry.device_types != ("cuda", "cuda")] if other in rows else ""
            if reason:
                raise LayoutError(
                    f"{_OP}: {entry.name!r} is to be on cuda on rank {other}, but there {reason}",
                    rank=rank,
                    peer=other,
                    op=_OP,
                )


def _held(
    name: str, rows: Mapping[int, Mapping[str, Any]], rank: int
) -> tuple[list[int], torch.dtype, Any, str]:
    """Shape, dtype, layout and device type of a tensor, as all its holders say."""
    holders = [other for other in sorted(rows) if name in rows[other]["held"]]
    if not holders:
        raise LayoutError(
            f"{_OP}: no rank's state_dict has the key {name!r}, for which a destination is given",
            rank=rank,
            op=_OP,
        )
    said = rows[holders[0]]["held"][name]
    for other in holders[1:]:
        if rows[other]["held"][name] != said:
            raise _mismatch(
                f"{name!r} is {_text(said)} on rank {holders[0]}, but {_text(rows[other]['held'][name])} "
                f"on rank {other}",
                rank,
            )
    shape, dtype, layout, device = said
    return shape, checks.dtype(dtype), layout, device


def _result_dtype(
    name: str,
    dtype: torch.dtype,
    asked: str | None,
    shape: Sequence[int],
    rows: Mapping[int, Mapping[str, Any]],
    rank: int,
) -> torch.dtype:
    """`asked` for floating-point tensors, that of the outputs where given, else that of the source."""
    result = checks.dtype(asked) if asked is not None and dtype.is_floating_point else dtype
    given = {other: side["outs"][name] for other, side in rows.items() if name in side["outs"]}
    for index, (other, (out_shape, out_name)) in enumerate(given.items()):
        out_dtype = checks.dtype(out_name)
        if index == 0 and asked is None and out_dtype.is_floating_point == dtype.is_floating_point:
            result = out_dtype
        if out_dtype != result or list(out_shape) != list(shape):
            raise LayoutError(
                f"{_OP}: the output of {name!r} on rank {other} has dtype {out_name} and shape "
                f"{tuple(out_shape)}; expected {checks.dtype_name(result)} and {tuple(shape)}",
                rank=rank,
                op=_OP,
            )
    if result != dtype and not (result.is_floating_point and dtype.is_floating_point):
        raise LayoutError(
            f"{_OP}: {name!r} is {dtype}, its output {result}; only floating-point tensors are cast",
            rank=rank,
            op=_OP,
        )
    return result


def _layout(wire: Any) -> Layout:
    return Layout.from_wire(Reader(wire, "layout"))


def _text(said: Any) -> str:
    shape, dtype, layout, device = said
    return f"{dtype} {tuple(shape)} under {_layout(layout)} on {device}"


def _target(text: Any) -> str:
    layout, device = text
    return f"{_layout(layout)} on {device}"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _mismatch(text: str, rank: int) -> MeshcastError:
    return PlanMismatchError(f"{_OP}: {text}", rank=rank, op=_OP, phase="agree")
