"""Where a call that changes the dtype converts: with torch, before and after the transfer, or within it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..base.checks import dtype_name
from .element_types import CASTS

if TYPE_CHECKING:
    from .gpu_offer import DeviceTypes

__all__ = ["Casts", "Ends", "Types", "ends_of", "types_of", "types_text"]

Types = tuple[torch.dtype, torch.dtype, torch.dtype]  # of a tensor: source, on the way, destination


class Ends(NamedTuple):
    """What a transfer is given of a tensor, at its source, and what it fills, at its destination."""

    source: torch.dtype
    destination: torch.dtype


class Casts(NamedTuple):
    """Ends of the tensors of a transfer and of its backward, which has none where there is no gradient; alike
    on all ranks. Their types on the way are those of the problems."""

    forth: tuple[Ends, ...]
    back: tuple[Ends, ...] = ()


def ends_of(
    source: torch.dtype,
    wire: torch.dtype,
    destination: torch.dtype,
    device_types: DeviceTypes,
    scale: float = 1.0,
) -> Ends:
    """Decides what a transfer casts: between GPUs, and between floats of 32 bits or less, all of it, so that
    no tensor is made in between. Elsewhere the ends are what travels, and the caller converts with torch. A
    function of what all ranks know.

    wire: what travels, the type of either end. scale: what the caller multiplies with afterwards, in the type
    that travelled. float16 that becomes bfloat16 only where it arrives, as after a sum in float16, is left to
    torch too: a rank forwards what it has unpacked, and 65504 would become infinite there.
    """
    cast_by_kernels = device_types == ("cuda", "cuda") and CASTS.issuperset({source, destination})
    too_wide = source == wire == torch.float16 and destination == torch.bfloat16
    if not cast_by_kernels or too_wide or scale != 1.0:
        return Ends(wire, wire)
    return Ends(source, destination)


def types_of(wires: Iterable[torch.dtype], ends: Sequence[Ends]) -> tuple[Types, ...]:
    """By tensor; empty where the transfer casts none."""
    if all(end.source == end.destination for end in ends):
        return ()
    return tuple((end.source, wire, end.destination) for wire, end in zip(wires, ends, strict=True))


def types_text(types: Sequence[Types]) -> str:
    """Which casts there are, and of which of the tensors; equal texts mean equal casts."""
    found: dict[str, list[int]] = {}
    for index, (source, wire, destination) in enumerate(types):
        if source != destination:
            text = f"{dtype_name(source)} to {dtype_name(destination)} as {dtype_name(wire)}"
            found.setdefault(text, []).append(index)
    return "; ".join(f"casts {text}: tensors {_ranges(indices)}" for text, indices in found.items())


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs as "3-7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
