"""The forms of an entry of a state dict between what a rank was given and the transfer: `Held` and `Wanted`,
the text of a `StateSide`, and the `Move`s into a `Target`, each with the `Problem` that the transfer solves;
the memory that targets arrive in, and the result.

Boxes that ranks have read from a checkpoint are listed with what they hold, and replace what lost ranks had.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate

from ..base.boxes import HeldBoxes, Piece, box_text, common, extents
from ..base.checks import dtype_name
from ..base.wire import once
from ..errors import LayoutError, PlanMismatchError
from ..layout import Box, Layout
from ..planning.plan import Problem
from ..transfers.block_scaled import Quantize
from ..transfers.medium import DeviceTypes, Ends, settled
from .meshes import (
    Family,
    check_not_wanted,
    everywhere,
    joined,
    positive_placements,
    scales_layout,
    separate,
    survivors,
)
from .recorded import Landing
from .tensor_map import Block, TensorMap, mapped

__all__ = [
    "Agreed",
    "Held",
    "LoadedBoxes",
    "Memory",
    "Move",
    "OP",
    "Output",
    "ReshardedState",
    "Sides",
    "check_holds",
    "copies_on",
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
    tensor and no DTensor, of a Layout. floats: the dtype is for floating-point tensors alone. quantize: its
    values and scales are made on the way."""

    layout: Layout | None
    device_type: str
    family: Family | None
    dtype: torch.dtype | None
    plain: bool
    floats: bool
    quantize: Quantize | None = None

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
    the number of each in layouts of what is held, and what messages call it. delta: versions travel as their
    changes. lost_any: lost ranks may have held nothing, since they received. readers: processes outside
    may read what is held, and nothing else need want it."""

    max_bytes_in_flight: int | None
    digest: bool
    strict: bool
    strategy: str
    dtype: torch.dtype | None
    lost: tuple[tuple[int, int], ...]
    delta: bool = False
    lost_any: bool = False
    readers: bool = False


class StateSide(NamedTuple):
    """One rank's side of a call, by the names that entries travel under. ties, out_ties: tensors, and
    outputs, that are an earlier one. carried: entries that are no tensors, as text. renamed: {previous name:
    name}; unmatched: names that rename= or only= give and this rank does not know. selects: it has an only=.
    own: entries of which each rank has its own. dtypes: in which readers get entries. recorded: {parameter:
    what arrives in its memory}; skipped: entries that the loader of these leaves out. scales: {name: (name of
    its scales, block)}. obstacles: why the rank can take no part in transfers between GPUs, and in those
    between CPUs and GPUs; "" where it can.
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
    dtypes: dict[str, torch.dtype]
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
    """A tensor that arrives. alias: the name of another that it is, as at the source. scales: names of the
    scales that are made with it; beside: of scales, the name of their values, with shape and block of these,
    where they have no destination of their own. recorded: memory of parameters, of its own size on each
    rank. spans: the part of such a memory that a tensor for readers is in, by rank: its begin and size."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    device_type: str
    alias: str | None = None
    scales: tuple[str, ...] = ()
    beside: tuple[str, tuple[int, ...], tuple[int, ...]] | None = None
    recorded: bool = False
    moves: list[Move] = field(default_factory=list)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass
class Agreed:
    """The agreement of the ranks of a call. own: entries of which each rank has its own. twins: sources that
    several meshes hold, each with the shape and the layouts whose values have to be equal. served, received:
    what readers can be served by the holders, and by those that have received; alias: the recorded memory
    that it is in. quantized: what is quantised on the way; before: the moves between the
    holders of its blocks; made_of: the names of the tensors that each source of a move is made of, where it
    is made."""

    targets: dict[str, Target]
    own: frozenset[str] = frozenset()
    twins: dict[str, tuple[tuple[int, ...], tuple[Layout, ...]]] = field(default_factory=dict)
    served: dict[str, Target] = field(default_factory=dict)
    received: dict[str, Target] = field(default_factory=dict)
    quantized: list[Any] = field(default_factory=list)
    before: list[Move] = field(default_factory=list)
    made_of: dict[str, list[str]] = field(default_factory=dict)

    @cached_property
    def moves(self) -> list[Move]:
        return [move for target in self.targets.values() for move in target.moves]

    @cached_property
    def sources(self) -> list[str]:
        """Names of the tensors that travel, each once."""
        named = (self.made_of.get(move.source, [move.source]) for move in self.moves)
        return list(dict.fromkeys(name for names in named for name in names))


class ReshardedState(dict[str, Any]):
    """{name: tensor} in the order of this rank's destinations, then entries that are no tensors."""

    version: int | None = None
    """Version of the weights; None if the holders gave none."""


class Memory:
    """Local tensors that calls of one kind arrive in again and again, by target."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._key: Any = None
        self._targets: dict[str, Target] = {}

    def of(self, key: Any) -> dict[str, torch.Tensor]:
        """Returns the tensors of the last call, where that was of the kind with this very key."""
        return self._tensors if key is self._key else {}

    def fitting(self, key: Any, targets: dict[str, Target]) -> dict[str, torch.Tensor]:
        """Returns the tensors for a call, which become those of the last. Empty where it has other targets
        than the last: ranks that hold may come to hold others, which a receiving rank learns in the call
        itself."""
        known = self.of(key)
        same = targets is self._targets or targets == self._targets
        self._key, self._targets, self._tensors = key, targets, known if same else {}
        return self._tensors


def recorded_name(parameter: str) -> str:
    """The name of a target that is memory of a parameter: an entry may have the parameter's own name."""
    return f"parameter {parameter}"


def held_text(held: Held) -> str:
    where = "as a plain tensor" if held.layout is None else f"under {held.layout}"
    return f"{held.dtype} {held.shape} {where} on {held.device_type}"


def wanted_text(wanted: Wanted) -> str:
    dtype = "" if wanted.dtype is None else f" as {dtype_name(wanted.dtype)}"
    where = "a whole copy" if wanted.layout is None else wanted.layout
    kind = "" if wanted.quantize is None else f" as {wanted.quantize.scheme.text}"
    return f"{where} on {wanted.device_type}{dtype}{kind}"


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


@lru_cache(maxsize=64)
def copies_on(ranks: tuple[int, ...]) -> Layout:
    """A copy on each rank."""
    return Layout(list(ranks), [Replicate()])


def positive(layout: Layout, ndim: int) -> Layout:
    """The layout with dimensions counted from the first."""
    if all(dim >= 0 for _, dim, _, _ in layout._placements):
        return layout
    mesh = torch.tensor(layout.ranks).reshape(layout.mesh_shape)
    return Layout(mesh, positive_placements(layout.placements, ndim))


def together(layouts: Sequence[Layout], shape: tuple[int, ...]) -> Layout:
    """Returns what the ranks of several layouts hold, which share none; the layout itself where it is one."""
    if len(layouts) == 1:
        return layouts[0]
    pieces = dict(sorted(pair for layout in layouts for pair in layout.pieces(shape).items()))
    return Layout._of_held(tuple(pieces), tuple(pieces.values()), len(shape))


def check_holds(name: str, shape: tuple[int, ...], source: Layout, destination: Layout) -> None:
    """Raises LayoutError unless the source has all that the destination wants; only boxes leave gaps."""
    if not (source.by_boxes or destination.by_boxes):
        return
    try:
        _check_holds(shape, source, destination)
    except LayoutError as error:
        raise LayoutError(f"{name!r}: {error}") from None


@lru_cache(maxsize=1024)  # layers of a model have the same layouts
def _check_holds(shape: tuple[int, ...], source: Layout, destination: Layout) -> None:
    source._core(shape).check_holds(destination._core(shape), shape)


class Sides:
    """The sides of all ranks, and what they say together. groups: each side once, with the ranks whose side
    it is, in the order of the first of these. had: the layouts of tensors with ranks that are lost, where
    such are in them; twins: the layouts that one is made of, where several meshes hold the tensor if their
    values are equal. Both have the tensors that `held` was asked for. moves: one for each source and
    destination that tensors share.

    A model has many names, and few kinds of them: what ranks say with the same objects is found once."""

    def __init__(self, sides: Mapping[int, StateSide]) -> None:
        self.sides = sides
        self.ranks = sorted(sides)
        self.had: dict[str, Layout] = {}
        self.twins: dict[str, tuple[Layout, ...]] = {}
        self._places: dict[str, list[Layout]] = {}
        self._held: dict[str, Held] = {}
        self._mapped: dict[int, dict[str, tuple[tuple[int, ...], list[Block]]]] = {}
        self._held_kinds: dict[tuple[int, ...], tuple[Held, Layout | None, tuple[Layout, ...]]] = {}
        self._wanted_kinds: dict[tuple[int, ...], tuple[Wanted, list[Layout]]] = {}
        self.moves: dict[Hashable, Move] = {}
        self._by_group: dict[Hashable, Layout] = {}
        same: dict[int, list[int]] = {}
        for rank in self.ranks:
            same.setdefault(id(sides[rank]), []).append(rank)
        self.groups = [(ranks, sides[ranks[0]]) for ranks in same.values()]
        self._same = {ranks[0]: ranks for ranks in same.values()}
        self.own = frozenset(name for _, side in self.groups for name in side.own)
        self._loaded = {name for _, side in self.groups for name in side.loaded}
        self._named = {name for _, side in self.groups for name in side.held}

    @property
    def first(self) -> StateSide:
        return self.sides[self.ranks[0]]

    @cached_property
    def obstacles(self) -> dict[int, tuple[str, str]]:
        """Why ranks cannot use GPUs, those that can left out."""
        return {rank: each.obstacles for rank, each in sorted(self.sides.items()) if any(each.obstacles)}

    @cached_property
    def lost(self) -> dict[int, int]:
        """Ranks that hold nothing any longer, each with what messages call it."""
        return dict(self.first.options.lost)

    def names(self) -> list[str]:
        """Returns the names of all destinations, in the order in which the ranks say them."""
        return list(dict.fromkeys(name for _, side in self.groups for name in side.wanted))

    def holds(self, name: str) -> bool:
        """Returns whether any rank has a tensor."""
        return name in self._named

    def all_held(self) -> list[str]:
        """Returns the names of all tensors that are held, in the order in which the ranks say them."""
        return list(dict.fromkeys(name for _, side in self.groups for name in side.held))

    def holders(self, name: str) -> dict[int, Held]:
        """Returns what each rank that has a tensor says of it, by ascending rank; of a rank's own, the lowest
        rank's."""
        found = sorted(
            (rank, side.held[name]) for ranks, side in self.groups if name in side.held for rank in ranks
        )
        return dict(found[:1] if name in self.own else found)

    def wanted(self, name: str) -> Wanted:
        """Raises PlanMismatchError where ranks name different destinations, or one inside names none. A rank
        inside of a sub-mesh names that; one outside may name the whole mesh that these make up. Meshes that
        share no rank, as those of several engines, receive all at once."""
        key = tuple(id(side.wanted.get(name)) for _, side in self.groups)
        if key not in self._wanted_kinds:
            self._wanted_kinds[key] = self._agreed_on(name)
        wanted, self._places[name] = self._wanted_kinds[key]
        return wanted

    def _agreed_on(self, name: str) -> tuple[Wanted, list[Layout]]:
        """Returns the destination of a name, and the layouts of its meshes."""
        said = {rank: self.sides[rank].wanted[name] for rank in self.ranks if name in self.sides[rank].wanted}
        copies = tuple(rank for rank, each in said.items() if each.layout is None)
        said |= {rank: said[rank]._replace(layout=copies_on(copies)) for rank in copies}
        first_rank, first = next(iter(said.items()))
        layout: Layout | None = first.layout
        layouts: list[Layout] = []
        if any(other is not first and other != first for other in said.values()):
            inside = {rank: each for rank, each in said.items() if rank in each.where.ranks} or said
            first_rank, first = next(iter(inside.items()))
            places = {rank: (each.where, each.family) for rank, each in inside.items()}
            layout = joined(places)
            layouts = separate(places) if layout is None else []
            agree = layout is not None or bool(layouts)
            known = {each.layout for each in inside.values()} if agree else {first.layout}
            for rank, other in said.items():
                there = other.layout in known or (layout and everywhere(other.where) == everywhere(layout))
                rest = other._replace(layout=first.layout, family=first.family, plain=first.plain)
                if there and rest == first:
                    continue
                raise mismatch(
                    f"the destination of {name!r} is {wanted_text(first)} on rank {first_rank}, but "
                    f"{wanted_text(other)} on rank {rank}"
                )
        if layout is not None:
            layouts = [layout]
        for each in layouts:
            check_not_wanted(name, each, self.lost)
            for rank in each.ranks:
                if rank not in self.sides:
                    raise self._outside(f"the destination of {name!r}", rank)
                if rank not in said:
                    raise mismatch(
                        f"ranks {first_rank} and {rank} ask for different tensors: rank {rank} is in the "
                        f"destination of {name!r}, {each}, but names none for it"
                    )
        return first._replace(layout=layouts[0]), layouts

    def place(self, name: str, shape: tuple[int, ...]) -> Layout:
        """Returns where a tensor goes, once `wanted` was asked: to one mesh, or to several that share no
        rank."""
        return together([positive(layout, len(shape)) for layout in self._places[name]], shape)

    def place_beside(
        self, name: str, shape: tuple[int, ...], block: tuple[int, ...], scales: tuple[int, ...]
    ) -> Layout:
        """Returns where the scales of a tensor go that have no destination. shape, block: of its values;
        scales: shape of the scales, () for one of the whole tensor."""
        layouts = [positive(layout, len(shape)) for layout in self._places[name]]
        if scales == ():
            return together([copies_on(tuple(sorted(layout.ranks))) for layout in layouts], scales)
        try:
            return together([scales_layout(layout, shape, block) for layout in layouts], scales)
        except LayoutError as error:
            raise LayoutError(
                f"the destination of {name!r} gives a rank two parts of one block of {block}: {error}"
            ) from None

    def held(self, name: str) -> Held:
        """Raises LayoutError where no rank, or not every rank that should, has it; PlanMismatchError where
        ranks describe it differently."""
        if name not in self._held:
            known = {} if name in self.own or name in self._loaded else self._held_kinds
            key = tuple(id(side.held.get(name)) for _, side in self.groups if side.held)
            if key not in known:
                known[key] = self._together(name)
            self._held[name], had, twins = known[key]
            if had is not None:
                self.had[name] = had
            if twins:
                self.twins[name] = twins
        return self._held[name]

    def by_group(self, held: Sequence[tuple[int, HeldBoxes]], ndim: int) -> Layout:
        """Returns the layout in which all ranks of a group hold the same, by the first rank of the group."""
        key = (ndim, tuple(held))
        if key not in self._by_group:
            boxes = sorted((rank, each) for first, each in held for rank in self._same[first])
            ranks, boxes_of_ranks = zip(*boxes, strict=True)
            self._by_group[key] = Layout._of_held(ranks, boxes_of_ranks, ndim)
        return self._by_group[key]

    def mapped(
        self, each: TensorMap, shapes: dict[str, tuple[int, ...]]
    ) -> dict[str, tuple[tuple[int, ...], list[Block]]]:
        """The blocks that make each target of a map, as for tensor_map.mapped; found once."""
        if id(each) not in self._mapped:
            self._mapped[id(each)] = mapped(each, shapes)
        return self._mapped[id(each)]

    def check_asked(self, name: str) -> None:
        """Raises unless some rank has a tensor that is asked for by this name."""
        if self.holds(name):
            return
        naming = [rank for rank in self.ranks if name in self.sides[rank].wanted]
        if len(naming) < len(self.ranks):
            other = next(rank for rank in self.ranks if rank not in naming)
            raise mismatch(
                f"ranks {naming[0]} and {other} ask for different tensors: only ranks {naming} name "
                f"{name!r}, which no rank's state_dict has"
            )
        raise LayoutError(f"no rank's state_dict has the key {name!r}, for which a destination is given")

    def _together(self, name: str) -> tuple[Held, Layout | None, tuple[Layout, ...]]:
        """Returns what all ranks together hold; where it lay before ranks were lost; its twins."""
        holders = self.holders(name)
        first_rank, first = next(iter(holders.items()))
        for rank, other in holders.items():
            alike = other is first or (
                (other.shape, other.dtype, other.device_type, other.layout is None)
                == (first.shape, first.dtype, first.device_type, first.layout is None)
            )
            if not alike:
                raise self._unlike(name, first_rank, first, rank, other)
        if first.layout is None:
            return first._replace(layout=copies_on(tuple(holders))), None, ()
        if name in self.own:
            raise LayoutError(
                f"own= names {name!r}, a shard under {first.layout}; it is for whole entries of which "
                "each rank has its own"
            )
        inside = {r: h for r, h in holders.items() if h.layout is not None and r in h.layout.ranks}
        outside = {r: h for r, h in holders.items() if r not in inside}
        described = inside or outside
        each = {r: (h.layout, h.family) for r, h in described.items() if h.layout is not None}
        one = joined(each)
        layouts = separate(each) if one is None else [one]
        if not layouts:
            rank, other = next(
                (r, h) for r, h in described.items() if h.layout != next(iter(described.values())).layout
            )
            raise self._unlike(name, next(iter(described)), next(iter(described.values())), rank, other)
        for rank, spec in outside.items():  # which may know one of the sub-meshes, or describe all of them
            if spec.layout not in {*layouts, *(h.layout for h in inside.values())}:
                assert spec.layout is not None
                shards = spec.layout.shards(first.shape)
                if all(shards != layout.shards(first.shape) for layout in layouts):
                    raise self._unlike(
                        name, next(iter(described)), next(iter(described.values())), rank, spec
                    )
        for rank in (rank for layout in layouts for rank in layout.ranks):
            if rank in self.lost:
                continue
            if rank not in self.sides:
                raise self._outside(repr(name), rank)
            if rank not in holders:
                raise LayoutError(
                    f"rank {rank} is in the mesh of {name!r} but its state_dict has no such key"
                )
        layouts = [positive(layout, len(first.shape)) for layout in layouts]
        if len(layouts) > 1:
            layouts = [layout for layout in layouts if self._lives(layout, first.shape)] or layouts[:1]
        layout = self._with_loaded(name, together(layouts, first.shape), first)
        left = survivors(layout, first.shape, self.lost, repr(name))
        had = None if left is layout else layout
        return first._replace(layout=left or layout), had, tuple(layouts) if len(layouts) > 1 else ()

    def _lives(self, layout: Layout, shape: tuple[int, ...]) -> bool:
        """Returns whether ranks that are not lost hold all of it."""
        return all(
            any(rank not in self.lost for rank in holders) for _, holders in layout._core(shape).tiles(shape)
        )

    def _with_loaded(self, name: str, layout: Layout, first: Held) -> Layout:
        """With the boxes that ranks have loaded."""
        said = {rank: side.loaded[name] for rank, side in self.sides.items() if name in side.loaded}
        if not said:
            return layout
        for rank, loaded in said.items():
            if (loaded.dtype, loaded.device_type) != (first.dtype, first.device_type):
                raise mismatch(
                    f"{name!r} is {dtype_name(first.dtype)} on {first.device_type}, but rank {rank} has "
                    f"loaded {dtype_name(loaded.dtype)} on {loaded.device_type}"
                )
        more = {rank: loaded.boxes for rank, loaded in said.items()}
        return with_boxes(layout, first.shape, more, repr(name))

    def check_lost(self) -> None:
        """Raises where a lost rank is in no layout of what is held (where all are copies, no layout says),
        and where something was loaded that no layout is for."""
        for (rank, *_), side in self.groups:
            odd = [name for name in side.loaded if all(h.layout is None for h in self.holders(name).values())]
            if odd:
                raise LayoutError(
                    f"rank {rank} has loaded a part of {names_text(odd)}, of which no rank holds a shard"
                )
        said = {held.layout for _, side in self.groups for held in side.held.values()} - {None}
        layouts = [layout for layout in said if layout is not None]
        known = {rank for layout in layouts for rank in layout.ranks}
        never = sorted(called for number, called in self.lost.items() if number not in known)
        if layouts and never and not self.first.options.lost_any:
            raise LayoutError(
                f"lost= names {never}, which are in no layout of what is held, such as "
                f"{min(layouts, key=repr)}; name ranks that held a part"
            )

    def check_options(self) -> None:
        """Raises where ranks call otherwise, or a name that one gives is known to none."""
        for (other, *_), side in self.groups[1:]:
            for what in ("options", "maps", "scales"):
                mine, theirs = getattr(self.first, what), getattr(side, what)
                if mine != theirs:
                    raise mismatch(
                        f"the {what} are {_brief(mine)} on rank {self.ranks[0]}, but {_brief(theirs)} on "
                        f"rank {other}"
                    )
        new: dict[str, tuple[int, str | None]] = {}
        for (rank, *_), side in self.groups:
            for old, name in side.renamed.items():
                before, earlier = new.setdefault(old, (rank, name))
                if earlier != name:
                    raise mismatch(
                        f"rename makes {earlier!r} of {old!r} on rank {before}, but {name!r} on rank {rank}"
                    )
        wanted = {name for _, side in self.groups for name in (*side.wanted, *side.carried)}
        served = wanted.union(self._named) if self.first.options.readers else wanted
        for argument, known, what in (
            ("rename", new, "no rank's state_dict has"),
            ("layouts", self._named, "no rank's state_dict has"),
            ("only", wanted, "no destination is given for"),
            ("dtype", served, "no destination is given for"),
            ("quantize", wanted, "no destination is given for"),
        ):
            for (rank, *_), side in self.groups:
                odd = [name for name in side.unmatched[argument] if name not in known]
                if odd:
                    raise LayoutError(f"{argument}= on rank {rank} names what {what}: {names_text(odd)}")

    def check_extra(self, used: set[str]) -> None:
        """Raises where a rank holds what no rank asked for."""
        if not self.first.options.strict or any(side.selects for _, side in self.groups):
            return
        for (rank, *_), side in self.groups:
            extra = [name for name in side.held if name not in used]
            if extra:
                raise LayoutError(
                    f"rank {rank} holds {names_text(extra)}, for which no destination is given; add "
                    "one or pass strict=False"
                )

    def _outside(self, what: str, rank: int) -> LayoutError:
        return LayoutError(
            f"{what} is on rank {rank}, which is not in the group; pass group= a group that holds all meshes"
        )

    def _unlike(self, name: str, a: int, first: Held, b: int, second: Held) -> Exception:
        return mismatch(f"{name!r} is {held_text(first)} on rank {a}, but {held_text(second)} on rank {b}")


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 300 else f"{text[:297]}..."
