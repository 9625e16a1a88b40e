"""The entries of a state dict: what each is and how it lies, on one rank and in the messages that the ranks
exchange.

Boxes that ranks have read from a checkpoint stand beside what they hold, in place of what lost ranks had.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..base import checks
from ..base.boxes import HeldBoxes, Piece, box_text, extents, read_boxes
from ..base.checks import Reader
from ..errors import LayoutError, PlanMismatchError
from ..layout import Box, Layout
from ..spec import TensorSpec
from ..transfers.medium import settled
from .compiled import source_of
from .meshes import Family, family_of, ranks_then, renumbered

__all__ = [
    "Held",
    "Loaded",
    "OP",
    "Output",
    "Reading",
    "StateSide",
    "Wanted",
    "decode",
    "encode",
    "held_text",
    "local_of",
    "memory_with",
    "mismatch",
    "names_text",
    "read_loaded",
    "same_memory",
    "text_digest",
    "wanted_text",
    "with_boxes",
]


_OP = "reshard_state_dict"


class Held(NamedTuple):
    """A tensor that this rank holds or has a spec of. layout None: a plain tensor, a copy of which is on
    every rank that has the name. plain: no DTensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None
    device_type: str
    family: Family | None
    plain: bool


class Wanted(NamedTuple):
    """A destination as this rank gives it. dtype: of the result, None as the source; plain: the result is a
    local tensor and no DTensor, of a Layout. floats: the dtype is for floating-point tensors alone."""

    layout: Layout
    device_type: str
    family: Family | None
    dtype: str | None
    plain: bool
    floats: bool


class Reading:
    """Reads entries for one rank, each distinct layout once."""

    def __init__(
        self, rank: int, layouts: Mapping[str, Any], numbers: Mapping[int, int] | None = None
    ) -> None:
        """numbers: of ranks in what is held, by what meshes and layouts there call them; None: the same."""
        self._rank = rank
        self._layouts = layouts
        self._numbers = numbers
        self._then = next((old for old, new in (numbers or {}).items() if new == rank), None)
        self._known: dict[Any, tuple[Layout, Family | None]] = {}

    def held(self, name: str, value: torch.Tensor | TensorSpec) -> Held:
        """Raises LayoutError for a tensor that cannot be described."""
        if isinstance(value, DTensor):
            spec = value._spec
            meta = spec.tensor_meta
            assert meta is not None  # of a DTensor there is one
            key = (spec.mesh, spec.placements, getattr(spec, "shard_order", None), len(meta.shape))
            found = self._known.get(key)
            if found is None:
                source = source_of(value, self._rank, False, _OP, ranks_of=self._ranks_of)
                found = self._known[key] = self._called(name, source.layout, family_of(spec.mesh))
            return Held(tuple(meta.shape), meta.dtype, found[0], spec.mesh.device_type, found[1], False)
        if isinstance(value, TensorSpec):
            renumbers = self._numbers is not None
            source = source_of(value, self._rank, False, _OP, spec_inside=renumbers, ranks_of=self._ranks_of)
            layout, family = self._called(name, source.layout, family_of(value.mesh))
            if self._rank in layout.ranks:
                raise LayoutError(
                    f"{_OP}: rank {self._rank} holds {name!r} and must pass its DTensor, not a spec"
                )
            return Held(source.shape, source.dtype, layout, source.device_type, family, False)
        device = value.device.type
        given = self._layouts.get(name)
        if given is None:
            return Held(tuple(value.shape), value.dtype, None, device, None, True)
        layout, shape = _given_layout(name, given, value)
        layout, _ = self._called(name, layout, None)
        local = layout.local_shapes(shape).get(self._rank)
        if local != tuple(value.shape):
            raise LayoutError(
                f"{_OP}: {name!r} has the local shape {tuple(value.shape)}, but {layout} of {shape} gives "
                f"rank {self._rank} {'nothing' if local is None else local}"
            )
        return Held(shape, value.dtype, layout, device, None, True)

    def _ranks_of(self, mesh: DeviceMesh) -> Any:
        return mesh if self._numbers is None else ranks_then(mesh, self._then)

    def _called(self, name: str, layout: Layout, family: Family | None) -> tuple[Layout, Family | None]:
        """With the numbers that ranks have now."""
        if self._numbers is None:
            return layout, family
        if layout.has_partial:
            raise LayoutError(
                f"{_OP}: {name!r} under {layout} holds Partial, whose values are reduced in the group of "
                "then; reduce it there"
            )
        layout = renumbered(layout, self._numbers, f"{_OP}: {name!r}")
        if family is not None:
            names, all_names, shape, ranks = family
            family = names, all_names, shape, tuple(self._numbers.get(rank, -1 - rank) for rank in ranks)
        return layout, family

    def wanted(
        self, name: str, where: Any, dtype: str | None, floats: bool
    ) -> tuple[Wanted, DeviceMesh | None, Any]:
        """A destination, with its mesh and placements where it has some."""
        if isinstance(where, Layout):
            where = (where, "cpu")
        pair = where if isinstance(where, tuple | list) and len(where) == 2 else (None, None)
        if isinstance(pair[0], Layout) and pair[1] in ("cpu", "cuda"):
            if pair[0].has_partial:
                raise LayoutError(f"{_OP}: the destination of {name!r}, {pair[0]}, holds Partial")
            return Wanted(pair[0], pair[1], None, dtype, True, floats), None, None
        if not isinstance(pair[0], DeviceMesh):
            raise LayoutError(
                f"{_OP}: the destination of {name!r} must be (mesh, placements) or a Layout, found "
                f"{checks.shown(where)}"
            )
        mesh, placements = pair[0], checks.listed(f"{_OP}: placements of {name!r}", pair[1])
        found = self._known.get((mesh, placements))
        if found is None:
            layout = Layout(mesh, placements)
            if layout.has_partial:
                raise LayoutError(
                    f"{_OP}: destination placements {placements} of {name!r} hold Partial; ask for Replicate "
                    "or Shard instead"
                )
            found = self._known[mesh, placements] = (layout, family_of(mesh))
        return Wanted(found[0], mesh.device_type, found[1], dtype, False, floats), mesh, placements


def _given_layout(name: str, given: Any, value: torch.Tensor) -> tuple[Layout, tuple[int, ...]]:
    """A layout of `layouts=` and the global shape."""
    layout, shape = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not isinstance(layout, Layout):
        raise LayoutError(
            f"{_OP}: layouts has {checks.shown(given)} for {name!r}: expected a Layout, or (Layout, shape)"
        )
    if shape is not None:
        return layout, checks.shape(shape)
    if layout.by_boxes:  # they end where the tensor does
        boxes = [box for _, pieces in layout._held for box, *_ in pieces]
        return layout, tuple(max(box[d][1] for box in boxes) for d in range(len(boxes[0])))
    if all(p.is_replicate() for p in layout.placements):
        return layout, tuple(value.shape)
    raise LayoutError(
        f"{_OP}: layouts has {layout} for {name!r}, which does not say how large the tensor is; give "
        "(Layout, shape)"
    )


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


OP = "reshard_state_dict"


class Output(NamedTuple):
    """A tensor that one rank receives into. plain: a local tensor, whose shape this is."""

    shape: tuple[int, ...]
    dtype: str
    plain: bool


class StateSide(NamedTuple):
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


_SAID_AS_THEY_ARE = [name for name in StateSide._fields if name not in ("held", "wanted", "outs")]


def encode(side: StateSide) -> str:
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


def decode(text: str, known: dict[Layout, Layout]) -> StateSide:
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
    return StateSide(held, wanted, outs, **{name: said[name] for name in _SAID_AS_THEY_ARE})


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


Loaded = dict[str, list[tuple[Box, torch.Tensor]]]


def read_loaded(given: Any, op: str) -> Loaded:
    """The argument {name: [(box, tensor)]}, checked. Raises LayoutError naming the entry that is wrong."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise LayoutError(f"{op}: loaded must be a mapping by name, found {type(given).__name__}")
    found: Loaded = {}
    for name, parts in given.items():
        pairs = [
            checks.listed(f"{op}: loaded {name!r}", pair) for pair in checks.listed(f"{op}: loaded", parts)
        ]
        if any(len(pair) != 2 or not isinstance(pair[1], torch.Tensor) for pair in pairs):
            raise LayoutError(
                f"{op}: loaded has {checks.shown(parts)} for {name!r}: expected (box, tensor) pairs"
            )
        if not pairs:
            continue
        try:
            _, read = read_boxes({0: [box for box, _ in pairs]})
        except LayoutError as error:
            raise LayoutError(f"{op}: loaded {name!r}: {error}") from None
        boxes = read[0]
        tensors = [tensor.detach() for _, tensor in pairs if tensor.numel()]
        if [extents(box) for box in boxes] != [tuple(tensor.shape) for tensor in tensors]:
            raise LayoutError(
                f"{op}: loaded {name!r} has boxes {', '.join(map(box_text, boxes))} for tensors of shapes "
                f"{[tuple(tensor.shape) for tensor in tensors]}; a tensor has just the elements of its box"
            )
        if len({(tensor.dtype, tensor.device.type) for tensor in tensors}) > 1:
            raise LayoutError(f"{op}: loaded {name!r} has tensors of different dtypes or devices")
        if tensors:
            found[name] = list(zip(boxes, tensors, strict=True))
    return found


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
                if all(a[0] < b[1] and b[0] < a[1] for a, b in zip(mine, box, strict=True)):
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
    """The local tensor that with_boxes() describes, made anew where it is not a single box."""
    held = own is not None and own.numel() > 0
    if not held and len(tensors) == 1:
        return tensors[0]
    parts = [own, *tensors] if held and own is not None else list(tensors)
    return torch.cat([part.reshape(-1) for part in parts])
