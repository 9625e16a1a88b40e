"""The forms of an entry of a state dict between what a rank was given and the transfer: `Held` and `Wanted`,
the text of a `StateSide`, and the `Move`s into a `Target`, each with the `Problem` that the transfer solves.

Boxes that ranks have read from a checkpoint are listed with what they hold, and replace what lost ranks had.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ..base.boxes import HeldBoxes, Piece, box_text, common, extents
from ..base.checks import dtype_name
from ..base.wire import once
from ..errors import LayoutError, PlanMismatchError
from ..layout import Box, Layout
from ..planning.plan import Problem
from ..transfers.medium import DeviceTypes, Ends, settled
from .meshes import Family
from .recorded import Landing
from .tensor_map import TensorMap

__all__ = [
    "Agreed",
    "Held",
    "LoadedBoxes",
    "Move",
    "OP",
    "Output",
    "StateSide",
    "Target",
    "Terms",
    "Wanted",
    "held_text",
    "local_of",
    "memory_with",
    "mismatch",
    "names_text",
    "recorded_name",
    "same_memory",
    "wanted_text",
    "with_boxes",
]

OP = "reshard_state_dict"


@once
class Held(NamedTuple):
    """A tensor that is held: as one rank describes what it holds or has a spec of, or as all of them
    together. layout None, on one rank: a plain tensor, a copy of which is on every rank that has the name."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None
    device_type: str
    family: Family | None = None

    @property
    def where(self) -> Layout:
        """The layout, once the ranks have agreed on it."""
        assert self.layout is not None
        return self.layout


@once
class Wanted(NamedTuple):
    """A destination, as one rank gives it or as all of them together. layout None, on one rank: a whole copy
    on every rank that gives None. dtype: of the result, None as the source; plain: the result is a local
    tensor and no DTensor, of a Layout. floats: the dtype is for floating-point tensors alone."""

    layout: Layout | None
    device_type: str
    family: Family | None
    dtype: torch.dtype | None
    plain: bool
    floats: bool

    @property
    def where(self) -> Layout:
        """The layout, once the ranks that want a copy are known."""
        assert self.layout is not None
        return self.layout


@once
class Output(NamedTuple):
    """A tensor that one rank receives into. plain: a local tensor, whose shape this is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    plain: bool


class LoadedBoxes(NamedTuple):
    """Boxes of a tensor that one rank has read from a checkpoint, in addition to what it holds."""

    dtype: torch.dtype
    device_type: str
    boxes: tuple[Box, ...]


class Terms(NamedTuple):
    """Options that all ranks give the same. dtype: of all floating-point tensors. lost: ranks that are lost:
    the number of each in layouts of what is held, and what messages call it."""

    max_bytes_in_flight: int | None
    digest: bool
    strict: bool
    strategy: str
    dtype: torch.dtype | None
    lost: tuple[tuple[int, int], ...]


class StateSide(NamedTuple):
    """One rank's side of a call, by the names that entries travel under. ties, out_ties: tensors, and
    outputs, that are an earlier one. carried: entries that are no tensors, as text. renamed: {previous name:
    name}; unmatched: names that rename= or only= give and this rank does not know. selects: it has an only=.
    own: entries of which each rank has its own. recorded: {parameter: what arrives in its memory}; skipped:
    entries that the loader of these leaves out. scales: {name: (name of its scales, block)}. obstacles: why
    the rank can take no part in transfers between GPUs, and in those between CPUs and GPUs; "" where it can.
    """

    held: dict[str, Held]
    wanted: dict[str, Wanted]
    outs: dict[str, Output]
    ties: dict[str, str]
    out_ties: dict[str, str]
    carried: dict[str, str]
    renamed: dict[str, str | None]
    unmatched: dict[str, tuple[str, ...]]
    selects: bool
    own: tuple[str, ...]
    loaded: dict[str, LoadedBoxes]
    recorded: dict[str, Landing]
    skipped: tuple[str, ...]
    maps: tuple[TensorMap, ...]
    scales: dict[str, tuple[str, tuple[int, ...]]]
    options: Terms
    obstacles: tuple[str, str]


class Move(NamedTuple):
    """The part of a source that goes into a target, the same on all ranks.

    problem: as it travels, in the coordinates of the source; its destination says as well where that lies in
    the local tensors of the target. ends: what the transfer is given and fills. reduces: partial values are
    reduced in the mesh of the source before. through_host: the transfer is between tensors on the host; those
    on GPUs are copied by torch, before and after.
    """

    source: str
    target: str
    problem: Problem
    ends: Ends
    device_types: DeviceTypes
    reduces: bool = False
    through_host: bool = False


@dataclass
class Target:
    """A tensor that arrives. alias: the name of another that it is, as at the source. recorded: memory of
    parameters, of its own size on each rank."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    device_type: str
    alias: str | None = None
    recorded: bool = False
    moves: list[Move] = field(default_factory=list)


@dataclass
class Agreed:
    """The agreement of the ranks of a call. own: entries of which each rank has its own. twins: sources that
    several meshes hold, each with the shape and the layouts whose values have to be equal."""

    targets: dict[str, Target]
    own: frozenset[str] = frozenset()
    twins: dict[str, tuple[tuple[int, ...], tuple[Layout, ...]]] = field(default_factory=dict)

    @cached_property
    def moves(self) -> list[Move]:
        return [move for target in self.targets.values() for move in target.moves]

    @cached_property
    def sources(self) -> list[str]:
        """Names of what travels, each once."""
        return list(dict.fromkeys(move.source for move in self.moves))


def recorded_name(parameter: str) -> str:
    """The name of a target that is memory of a parameter: an entry may have the parameter's own name."""
    return f"parameter {parameter}"


def held_text(held: Held) -> str:
    where = "as a plain tensor" if held.layout is None else f"under {held.layout}"
    return f"{held.dtype} {held.shape} {where} on {held.device_type}"


def wanted_text(wanted: Wanted) -> str:
    dtype = "" if wanted.dtype is None else f" as {dtype_name(wanted.dtype)}"
    where = "a whole copy" if wanted.layout is None else wanted.layout
    return f"{where} on {wanted.device_type}{dtype}"


def names_text(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def mismatch(text: str) -> PlanMismatchError:
    return PlanMismatchError(text, phase="agree")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of an entry on this rank."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return settled(local.detach() if local.requires_grad else local)


def same_memory(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """{name: an earlier name} of tensors that are one: they share all of their memory, element by element."""
    first: dict[Any, tuple[str, Any]] = {}
    ties: dict[str, str] = {}
    for name, tensor in tensors:
        local = local_of(tensor)
        if local.numel():
            spec = tensor._spec if isinstance(tensor, DTensor) else None
            key = (local.data_ptr(), local.dtype, local.shape, local.stride())
            earlier, its = first.setdefault(key, (name, spec))
            if earlier != name and its == spec:
                ties[name] = earlier
    return ties


def with_boxes(
    layout: Layout, shape: tuple[int, ...], more: Mapping[int, Sequence[Box]], what: str
) -> Layout:
    """The layout in which ranks hold more boxes, by rank. Raises LayoutError for a box that its rank holds
    already, and for values that are partial."""
    if layout.has_partial:
        raise LayoutError(f"{what}: {layout} holds Partial, of which no part can be loaded")
    pieces = layout.pieces(shape)
    for rank, boxes in more.items():
        own = pieces.get(rank)
        for mine, *_ in own[1] if own is not None else ():
            for box in boxes:
                if common(mine, box) is not None:
                    raise LayoutError(
                        f"{what}: rank {rank} has loaded {box_text(box)}, and holds {box_text(mine)} already"
                    )
        pieces[rank] = _held_with(own, boxes)
    ordered = dict(sorted(pieces.items()))
    made = Layout._of_held(tuple(ordered), tuple(ordered.values()), len(shape))
    try:
        made.shards(shape)
    except LayoutError as error:
        raise LayoutError(f"{what}: {error}") from None
    return made


def _held_with(own: HeldBoxes | None, boxes: Sequence[Box]) -> HeldBoxes:
    """Returns where what a rank holds and its other boxes lie in the tensor of memory_with(). A single box is
    a local tensor; others lie one after the other in a tensor of one dimension."""
    local, pieces = own if own is not None else ((), ())
    if not pieces and len(boxes) == 1:
        return extents(boxes[0]), ((boxes[0], (0,) * len(boxes[0]), (), ()),)
    strides = _strides(local)
    flat: list[Piece] = []
    for box, at, axes, steps in pieces:
        along, step = axes or range(len(box)), steps or (1,) * len(box)
        first = sum(index * strides[dim] for dim, index in enumerate(at))
        by = tuple(strides[axis] * each for axis, each in zip(along, step, strict=True))
        flat.append((box, (first,), (0,) * len(box), by))
    end = math.prod(local) if pieces else 0
    for box in boxes:
        flat.append((box, (end,), (0,) * len(box), _strides(extents(box))))
        end += math.prod(extents(box))
    return (end,), tuple(flat)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def memory_with(own: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The local tensor that with_boxes() describes, made again where it is not a single box."""
    held = own is not None and own.numel() > 0
    if not held and len(tensors) == 1:
        return tensors[0]
    parts = [own, *tensors] if held and own is not None else list(tensors)
    return torch.cat([part.reshape(-1) for part in parts])
