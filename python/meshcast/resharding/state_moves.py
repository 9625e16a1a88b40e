"""The moves of a call of reshard_state_dict, agreed on by all ranks from what each of them said.

Every rank has the same sources and destinations of the tensors, so all raise the same error. Layouts are
copies of plain tensors, what a map makes of a destination, or blocks of scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch.distributed.tensor import Replicate

from ..base import checks
from ..base.boxes import HeldBoxes, Piece, box_text
from ..errors import LayoutError
from ..layout import Box, Layout
from ..transfers.medium import DeviceTypes, device_types_of
from .meshes import (
    Gone,
    check_not_wanted,
    everywhere,
    gone,
    joined,
    positive_placements,
    raise_gone,
    separate,
    survivors,
)
from .state_entries import OP, Held, StateSide, held_text, mismatch, names_text, wanted_text, with_boxes
from .tensor_map import Block, TensorMap, mapped

__all__ = [
    "Agreed",
    "Goal",
    "Move",
    "Origin",
    "Said",
    "Target",
    "agree",
    "check_blocks",
    "check_holds",
    "copies_on",
    "mapped_layout",
    "positive",
    "together",
]


_OP = "reshard_state_dict"


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
        source._core(shape).check_holds(destination._core(shape), shape)
    except LayoutError as error:
        raise LayoutError(f"{_OP}: {name!r}: {error}") from None


def mapped_layout(
    blocks: Sequence[Block], shape: tuple[int, ...], target: Layout, ndim: int
) -> Layout | None:
    """Returns the layout in which the destination holds its part of a source, in the source's own
    coordinates. The blocks are all those of one source. shape, target: of the destination; ndim: of the
    source. None where no rank wants any of it."""
    ranks: list[int] = []
    held: list[HeldBoxes] = []
    for rank, (local, pieces) in target.pieces(shape).items():
        found = [part for block in blocks for piece in pieces for part in _meet(block, piece)]
        if found:
            ranks.append(rank)
            held.append((local, tuple(found)))
    return Layout._of_held(ranks, tuple(held), ndim) if ranks else None


def _meet(block: Block, piece: Piece) -> list[Piece]:
    """The part of a block that a piece of the destination holds, as a box of the source; none or one."""
    box, at, axes, steps = piece
    ndim = len(box)
    axes, steps = axes or tuple(range(ndim)), steps or (1,) * ndim
    source: list[tuple[int, int]] = [
        (low, low + size) for low, size in zip(block.low, block.sizes, strict=True)
    ]
    local = list(at)
    for dim, (low, high) in enumerate(box):
        own = block.axes.index(dim) if dim in block.axes else None
        begin = max(low, block.at[dim])
        end = min(high, block.at[dim] + (1 if own is None else block.sizes[own]))
        if begin >= end:
            return []
        if own is not None:
            first = block.low[own] + begin - block.at[dim]
            source[own] = (first, first + end - begin)
        local[axes[dim]] += (begin - low) * steps[dim]
    if any(low >= high for low, high in source):
        return []
    along = tuple(0 if axis is None else axes[axis] for axis in block.axes)
    step = tuple(0 if axis is None else steps[axis] for axis in block.axes)
    return [(tuple(source), tuple(local), along, step)]


def check_blocks(
    name: str,
    scale: str,
    block: Sequence[int],
    tensor: tuple[tuple[int, ...], Layout],
    scales: tuple[tuple[int, ...], Layout],
) -> None:
    """Raises LayoutError unless every rank that gets a part of a tensor gets whole blocks of it, and just
    their scales. tensor, scales: shape and destination."""
    (shape, layout), (scale_shape, scale_layout) = tensor, scales
    expected = tuple(-(-size // by) for size, by in zip(shape, block, strict=False))
    if len(block) != len(shape) or scale_shape != expected:
        raise LayoutError(
            f"{_OP}: {scale!r} has shape {scale_shape}; the scales of blocks of {tuple(block)} of {name!r}, "
            f"which has shape {shape}, have {expected}"
        )
    has = scale_layout.shards(scale_shape)
    for rank, boxes in layout.shards(shape).items():
        wanted = []
        for box in boxes:
            for (low, high), by, size in zip(box, block, shape, strict=True):
                if low % by or (high % by and high != size):
                    raise LayoutError(
                        f"{_OP}: the destination of {name!r} gives rank {rank} {box_text(box)}, which cuts "
                        f"blocks of {tuple(block)}: their scales would not fit; choose a layout that cuts "
                        "between blocks"
                    )
            wanted.append(
                tuple((low // by, -(-high // by)) for (low, high), by in zip(box, block, strict=True))
            )
        if _joined_text(wanted) != _joined_text(has.get(rank, [])):
            raise LayoutError(
                f"{_OP}: rank {rank} gets the blocks {_joined_text(wanted)} of {name!r}, but of {scale!r} "
                f"{_joined_text(has.get(rank, []))}; give both layouts that cut the same way"
            )


def _joined_text(boxes: Sequence[Box]) -> str:
    return ", ".join(box_text(box) for box in boxes) or "nothing"


class Origin(NamedTuple):
    """A tensor at its source. had: with ranks that are lost, where such are in it; it is `layout` itself
    where no other rank is. twins: the layouts that `layout` is made of, where several meshes hold the tensor,
    if their values are equal."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    device_type: str
    had: Layout | None = None
    twins: tuple[Layout, ...] = ()


class Goal(NamedTuple):
    """A tensor at its destination. dtype: asked for, None as the source; floats: for floating-point tensors
    alone."""

    layout: Layout
    device_type: str
    dtype: str | None
    floats: bool


class Said:
    """Everything that the ranks said. rank: this one, for errors."""

    def __init__(self, sides: Mapping[int, StateSide], rank: int) -> None:
        self.sides = sides
        self.rank = rank
        self.ranks = sorted(sides)
        self._origins: dict[str, Origin] = {}
        self.own = frozenset(name for side in sides.values() for name in side.own)
        self._holders: dict[str, dict[int, Held]] = {}
        for other in self.ranks:
            for name, held in sides[other].held.items():
                holders = self._holders.setdefault(name, {})
                if not (holders and name in self.own):  # of a rank's own, the lowest rank's
                    holders[other] = held

    @property
    def first(self) -> StateSide:
        return self.sides[self.ranks[0]]

    @cached_property
    def lost(self) -> dict[int, int]:
        """Ranks that hold nothing any more, each with what messages call it."""
        return dict(self.first.options["lost"])

    def names(self) -> list[str]:
        """Returns the names of all destinations, in the order in which the ranks say them."""
        found: dict[str, None] = {}
        for rank in self.ranks:
            found.update(dict.fromkeys(self.sides[rank].wanted))
        return list(found)

    def holders(self, name: str) -> dict[int, Held]:
        """Returns what each rank that has a tensor says of it, by ascending rank."""
        return self._holders.get(name, {})

    def goal(self, name: str) -> Goal:
        """Raises PlanMismatchError where ranks name different destinations, or one inside names none. A rank
        inside of a sub-mesh names that; one outside may name the whole mesh that these make up."""
        said = {rank: self.sides[rank].wanted[name] for rank in self.ranks if name in self.sides[rank].wanted}
        first_rank, first = next(iter(said.items()))
        layout: Layout | None = first.layout
        if any(other is not first and other != first for other in said.values()):
            inside = {rank: each for rank, each in said.items() if rank in each.layout.ranks} or said
            first_rank, first = next(iter(inside.items()))
            layout = joined({rank: (each.layout, each.family) for rank, each in inside.items()})
            known = {first.layout} if layout is None else {each.layout for each in inside.values()}
            for rank, other in said.items():
                there = other.layout in known or (layout and everywhere(other.layout) == everywhere(layout))
                rest = other._replace(layout=first.layout, family=first.family, plain=first.plain)
                if there and rest == first:
                    continue
                raise mismatch(
                    f"the destination of {name!r} is {wanted_text(first)} on rank {first_rank}, but "
                    f"{wanted_text(other)} on rank {rank}",
                    self.rank,
                )
        assert layout is not None
        check_not_wanted(name, layout, self.lost, self.rank, OP)
        for rank in layout.ranks:
            if rank not in self.sides:
                raise self._outside(f"the destination of {name!r}", rank)
            if rank not in said:
                raise mismatch(
                    f"ranks {first_rank} and {rank} ask for different tensors: rank {rank} is in the "
                    f"destination of {name!r}, {layout}, but names none for it",
                    self.rank,
                )
        return Goal(layout, first.device_type, first.dtype, first.floats)

    def origin(self, name: str) -> Origin:
        """Raises LayoutError where nobody, or not every rank that should, has it; PlanMismatchError where
        ranks describe it differently."""
        found = self._origins.get(name)
        if found is None:
            found = self._origins[name] = self._origin(name)
        return found

    def check_asked(self, name: str) -> None:
        """Raises unless some rank has a tensor that is asked for by this name."""
        if name in self._holders:
            return
        naming = [rank for rank in self.ranks if name in self.sides[rank].wanted]
        if len(naming) < len(self.ranks):
            other = next(rank for rank in self.ranks if rank not in naming)
            raise mismatch(
                f"ranks {naming[0]} and {other} ask for different tensors: only ranks {naming} name "
                f"{name!r}, which no rank's state_dict has",
                self.rank,
            )
        raise LayoutError(
            f"{OP}: no rank's state_dict has the key {name!r}, for which a destination is given",
            rank=self.rank,
            op=OP,
        )

    def _origin(self, name: str) -> Origin:
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
            return Origin(first.shape, first.dtype, copies_on(tuple(sorted(holders))), first.device_type)
        if name in self.own:
            raise LayoutError(
                f"{OP}: own= names {name!r}, a shard under {first.layout}; it is for whole entries of which "
                "each rank has its own",
                rank=self.rank,
                op=OP,
            )
        inside = {r: h for r, h in holders.items() if h.layout is not None and r in h.layout.ranks}
        outside = {r: h for r, h in holders.items() if r not in inside}
        told = inside or outside
        each = {r: (h.layout, h.family) for r, h in told.items() if h.layout is not None}
        one = joined(each)
        layouts = separate(each) if one is None else [one]
        if not layouts:
            rank, other = next(
                (r, h) for r, h in told.items() if h.layout != next(iter(told.values())).layout
            )
            raise self._unlike(name, next(iter(told)), next(iter(told.values())), rank, other)
        for rank, spec in outside.items():  # which may know one of the sub-meshes, or describe all of them
            if spec.layout not in {*layouts, *(h.layout for h in inside.values())}:
                assert spec.layout is not None
                shards = spec.layout.shards(first.shape)
                if all(shards != layout.shards(first.shape) for layout in layouts):
                    raise self._unlike(name, next(iter(told)), next(iter(told.values())), rank, spec)
        for rank in (rank for layout in layouts for rank in layout.ranks):
            if rank in self.lost:
                continue
            if rank not in self.sides:
                raise self._outside(repr(name), rank)
            if rank not in holders:
                raise LayoutError(
                    f"{OP}: rank {rank} is in the mesh of {name!r} but its state_dict has no such key",
                    rank=self.rank,
                    op=OP,
                )
        layouts = [positive(layout, len(first.shape)) for layout in layouts]
        if len(layouts) > 1:
            layouts = [layout for layout in layouts if self._lives(layout, first.shape)] or layouts[:1]
        layout = self._with_loaded(name, together(layouts, first.shape), first)
        left = survivors(layout, first.shape, self.lost, f"{OP}: {name!r}")
        had = None if left is layout else layout
        twins = tuple(layouts) if len(layouts) > 1 else ()
        return Origin(first.shape, first.dtype, left or layout, first.device_type, had, twins)

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
        expected = (checks.dtype_name(first.dtype), first.device_type)
        for rank, (dtype, device, _) in said.items():
            if (dtype, device) != expected:
                raise mismatch(
                    f"{name!r} is {expected[0]} on {expected[1]}, but rank {rank} has loaded {dtype} on "
                    f"{device}",
                    self.rank,
                )
        more = {
            rank: [tuple((lo, hi) for lo, hi in box) for box in boxes] for rank, (*_, boxes) in said.items()
        }
        return with_boxes(layout, first.shape, more, f"{OP}: {name!r}")

    def check_lost(self) -> None:
        """Raises where a lost rank is in no layout of what is held (where all are copies, no layout says),
        and where something was loaded that no layout is for."""
        for rank, side in self.sides.items():
            odd = [name for name in side.loaded if all(h.layout is None for h in self.holders(name).values())]
            if odd:
                raise LayoutError(
                    f"{OP}: rank {rank} has loaded a part of {names_text(odd)}, of which no rank holds a "
                    "shard",
                    rank=self.rank,
                    op=OP,
                )
        said = {held.layout for holders in self._holders.values() for held in holders.values()} - {None}
        layouts = [layout for layout in said if layout is not None]
        known = {rank for layout in layouts for rank in layout.ranks}
        never = sorted(called for number, called in self.lost.items() if number not in known)
        if layouts and never:
            raise LayoutError(
                f"{OP}: lost= names {never}, which are in no layout of what is held, such as "
                f"{min(layouts, key=repr)}; name ranks that held a part",
                rank=self.rank,
                op=OP,
            )

    def check_options(self) -> None:
        """Raises where ranks call otherwise, or a name that one gives is known to none."""
        for other in self.ranks[1:]:
            side = self.sides[other]
            for what in ("options", "maps", "scales"):
                mine, theirs = getattr(self.first, what), getattr(side, what)
                if mine != theirs:
                    raise mismatch(
                        f"the {what} are {_brief(mine)} on rank {self.ranks[0]}, but {_brief(theirs)} on "
                        f"rank {other}",
                        self.rank,
                    )
        new: dict[str, tuple[int, str | None]] = {}
        for rank in self.ranks:
            for old, name in self.sides[rank].renamed.items():
                before, earlier = new.setdefault(old, (rank, name))
                if earlier != name:
                    raise mismatch(
                        f"rename makes {earlier!r} of {old!r} on rank {before}, but {name!r} on rank {rank}",
                        self.rank,
                    )
        wanted = {name for side in self.sides.values() for name in (*side.wanted, *side.carried)}
        for argument, known, what in (
            ("rename", new, "no rank's state_dict has"),
            ("layouts", self._holders, "no rank's state_dict has"),
            ("only", wanted, "no destination is given for"),
            ("dtype", wanted, "no destination is given for"),
        ):
            for rank in self.ranks:
                odd = [name for name in self.sides[rank].unmatched[argument] if name not in known]
                if odd:
                    raise LayoutError(
                        f"{OP}: {argument}= on rank {rank} names what {what}: {names_text(odd)}",
                        rank=self.rank,
                        op=OP,
                    )

    def check_extra(self, used: set[str]) -> None:
        """Raises where a rank holds what nobody asked for."""
        if not self.first.options["strict"] or any(side.selects for side in self.sides.values()):
            return
        for holder in self.ranks:
            extra = [name for name in self.sides[holder].held if name not in used]
            if extra:
                raise LayoutError(
                    f"{OP}: rank {holder} holds {names_text(extra)}, for which no destination is given; add "
                    "one or pass strict=False",
                    rank=self.rank,
                    op=OP,
                )

    def _outside(self, what: str, rank: int) -> LayoutError:
        return LayoutError(
            f"{OP}: {what} is on rank {rank}, which is not in the group; pass group= a group that holds all "
            "meshes",
            rank=self.rank,
            op=OP,
        )

    def _unlike(self, name: str, a: int, first: Held, b: int, second: Held) -> Exception:
        return mismatch(
            f"{name!r} is {held_text(first)} on rank {a}, but {held_text(second)} on rank {b}", self.rank
        )


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 300 else f"{text[:297]}..."


@dataclass(frozen=True)
class Move:
    """The part of one source that goes into one target. shape: of the source; dst: what each rank gets of it,
    in the source's coordinates, and where that lies in the local tensor of the target. through_host: the
    transfer is between tensors on the host; those on GPUs are copied by torch, before and after."""

    source: str
    target: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    result_dtype: torch.dtype
    src: Layout
    dst: Layout
    device_types: DeviceTypes
    through_host: bool = False


@dataclass
class Target:
    """A tensor that arrives. alias: the name of another that it is, as at the source."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    device_type: str
    alias: str | None = None
    moves: list[Move] = field(default_factory=list)


@dataclass(frozen=True)
class Agreed:
    """The same on all ranks. values: destinations of entries that are no tensors. own: entries of which each
    rank has its own. twins: sources that several meshes hold, whose values have to be equal."""

    targets: dict[str, Target]
    values: frozenset[str]
    own: frozenset[str] = frozenset()
    twins: Mapping[str, Origin] = field(default_factory=dict)

    @property
    def moves(self) -> list[Move]:
        return [move for target in self.targets.values() for move in target.moves]


def agree(sides: Mapping[int, StateSide], maps: Sequence[TensorMap], rank: int) -> Agreed:
    """Returns the moves that all ranks agree on. Every rank has the same sides, so that all raise the same
    error: PlanMismatchError where ranks contradict each other, LayoutError where a name is missing, tensors
    do not fit, or a rank has no GPU where it needs one."""
    said = Said(sides, rank)
    said.check_options()
    said.check_lost()
    names = said.names()
    carried = {name for side in sides.values() for name in side.carried}
    values = frozenset(name for name in names if name in carried and not said.holders(name))
    if not names and not carried:
        raise LayoutError(
            f"{OP}: no destinations; give (mesh, placements) for at least one name, where it is received",
            rank=rank,
            op=OP,
        )
    goals = {name: said.goal(name) for name in names if name not in values}
    makers = {target: each for each in maps for target in each.target_names()}
    used: set[str] = set()
    made: dict[str, tuple[tuple[int, ...], list[Block]]] = {}
    for name in goals:
        if name in makers:
            if name not in made:
                made |= mapped(makers[name], _shapes(makers[name], said))
            used.update(makers[name].names())
        else:
            said.check_asked(name)
            used.add(name)
    targets = {}
    missing: dict[Gone, None] = {}
    for name, goal in goals.items():
        targets[name] = _target(name, goal, made.get(name), said, missing)
    raise_gone(list(missing), OP, rank)
    said.check_extra(used)
    _tie(targets, said, makers)
    _check_scales(targets, said)
    twins = {name: said.origin(name) for name in sorted(used) if said.origin(name).twins}
    return Agreed(targets, values, said.own, twins)


def _shapes(each: TensorMap, said: Said) -> dict[str, tuple[int, ...]]:
    return {name: said.origin(name).shape for name in each.names() if said.holders(name)}


def _target(
    name: str,
    goal: Goal,
    made: tuple[tuple[int, ...], list[Block]] | None,
    said: Said,
    missing: dict[Gone, None],
) -> Target:
    """missing: gets what it needs and no rank holds any more."""
    if made is None:
        origin = said.origin(name)
        layout = positive(goal.layout, len(origin.shape))
        dtype = _result_dtype(name, [origin], origin.shape, goal, layout, said)
        target = Target(name, origin.shape, dtype, layout, goal.device_type)
        if not _lives(name, origin, layout, said, missing):
            return target
        check_holds(name, origin.shape, origin.layout, layout)
        types = device_types_of(origin.device_type, goal.device_type, OP)
        _check_gpus(name, origin.layout, layout, types, said)
        target.moves.append(Move(name, name, origin.shape, origin.dtype, dtype, origin.layout, layout, types))
        return target
    shape, blocks = made
    layout = positive(goal.layout, len(shape))
    layout.shards(shape)  # raises where it does not fit
    by_source: dict[str, list[Block]] = {}
    for block in blocks:
        by_source.setdefault(block.source, []).append(block)
    origins = {source: said.origin(source) for source in by_source}
    dtype = _result_dtype(name, list(origins.values()), shape, goal, layout, said)
    target = Target(name, shape, dtype, layout, goal.device_type)
    devices = {origin.device_type for origin in origins.values()} | {goal.device_type}
    for source, parts in by_source.items():
        origin = origins[source]
        dst = mapped_layout(parts, shape, layout, len(origin.shape))
        if dst is None or not _lives(source, origin, dst, said, missing):
            continue
        check_holds(source, origin.shape, origin.layout, dst)
        types = device_types_of(origin.device_type, goal.device_type, OP)
        _check_gpus(name, origin.layout, layout, types, said)
        through_host = len(devices) > 1
        target.moves.append(
            Move(
                source,
                name,
                origin.shape,
                origin.dtype,
                dtype,
                origin.layout,
                dst,
                ("cpu", "cpu") if through_host else types,
                through_host,
            )
        )
    return target


def _lives(name: str, origin: Origin, wanted: Layout, said: Said, missing: dict[Gone, None]) -> bool:
    """Returns whether living ranks hold all that is wanted of a source, and anything of it at all."""
    if origin.had is None:
        return True
    found = gone(name, origin.shape, origin.had, said.lost, wanted)
    missing.update(dict.fromkeys(found))
    return not found and origin.layout is not origin.had


def _result_dtype(
    name: str, origins: Sequence[Origin], shape: tuple[int, ...], goal: Goal, layout: Layout, said: Said
) -> torch.dtype:
    """Returns the dtype of a result: the one asked for by name, or for all floating-point tensors; else that
    of the outputs where given, else that of the source."""
    rank = said.rank
    kinds = {origin.dtype for origin in origins}
    dtype = origins[0].dtype
    floating = all(kind.is_floating_point for kind in kinds)
    named = goal.dtype if floating or not goal.floats else None
    asked = named or (said.first.options["dtype"] if floating else None)
    result = dtype if asked is None else checks.dtype(asked)
    given = {other: side.outs[name] for other, side in said.sides.items() if name in side.outs}
    for index, (other, (out_shape, out_name, plain)) in enumerate(given.items()):
        out_dtype = checks.dtype(out_name)
        if index == 0 and asked is None and out_dtype.is_floating_point == dtype.is_floating_point:
            result = out_dtype
        expected = layout.local_shapes(shape)[other] if plain else shape
        if out_dtype != result or out_shape != expected:
            raise LayoutError(
                f"{OP}: the output of {name!r} on rank {other} has dtype {out_name} and shape {out_shape}; "
                f"expected {checks.dtype_name(result)} and {expected}",
                rank=rank,
                op=OP,
            )
    if asked is None and len(kinds) > 1 and not given:
        raise LayoutError(
            f"{OP}: {name!r} is made of tensors of different dtypes, {sorted(map(str, kinds))}; say which it "
            "gets (dtype=)",
            rank=rank,
            op=OP,
        )
    for kind in kinds:
        if result != kind and not (result.is_floating_point and kind.is_floating_point):
            raise LayoutError(
                f"{OP}: {name!r} is {kind}, its output {result}; only floating-point tensors are cast",
                rank=rank,
                op=OP,
            )
    return result


def _check_gpus(name: str, src: Layout, dst: Layout, types: DeviceTypes, said: Said) -> None:
    """Raises LayoutError where one of the tensor's ranks cannot use the GPU that it should be on."""
    for layout, device in zip((src, dst), types, strict=True):
        for other in layout.ranks if device == "cuda" else ():
            reason = said.sides[other].obstacles[types != ("cuda", "cuda")]
            if reason:
                raise LayoutError(
                    f"{OP}: {name!r} is to be on cuda on rank {other}, but there {reason}",
                    rank=said.rank,
                    peer=other,
                    op=OP,
                )


def _tie(targets: dict[str, Target], said: Said, makers: Mapping[str, TensorMap]) -> None:
    """Finds targets that are tied at the source and can be at the destination: they travel once. Raises
    LayoutError for outputs that are one tensor where the sources are not."""
    if not any(side.ties or side.out_ties for side in said.sides.values()):
        return
    for name, target in targets.items():
        holders = [rank for rank in said.holders(name) if rank in said.origin(name).layout.ranks]
        earlier = {said.sides[rank].ties.get(name) for rank in holders}
        tied = next(iter(earlier)) if len(earlier) == 1 else None
        other = targets.get(tied) if tied is not None else None
        if other is None or name in makers or tied in makers:
            continue
        same = (target.layout, target.dtype, target.device_type) == (
            other.layout,
            other.dtype,
            other.device_type,
        )
        if same and all(_outputs_agree(side, name, other.name) for side in said.sides.values()):
            target.alias = other.name
            target.moves.clear()
    for rank, side in said.sides.items():
        for name, earlier_name in side.out_ties.items():
            if _root(targets, name) != _root(targets, earlier_name):
                raise LayoutError(
                    f"{OP}: the outputs {earlier_name!r} and {name!r} share memory on rank {rank}, but the "
                    "tensors are not one at their source; give each its own",
                    rank=said.rank,
                    op=OP,
                )


def _root(targets: Mapping[str, Target], name: str) -> str:
    return targets[name].alias or name


def _outputs_agree(side: StateSide, name: str, other: str) -> bool:
    if (name in side.outs) != (other in side.outs):
        return False
    return name not in side.outs or side.out_ties.get(name, name) == side.out_ties.get(other, other)


def _check_scales(targets: Mapping[str, Target], said: Said) -> None:
    for name, (scale, block) in said.first.scales.items():
        chosen = any(side.selects for side in said.sides.values())
        if chosen and name not in targets and scale not in targets:
            continue
        for each in (name, scale):
            if each not in targets:
                raise LayoutError(
                    f"{OP}: {name!r} and its scales {scale!r} travel together, but no destination is given "
                    f"for {each!r}",
                    rank=said.rank,
                    op=OP,
                )
        tensor, scales = targets[name], targets[scale]
        check_blocks(name, scale, block, (tensor.shape, tensor.layout), (scales.shape, scales.layout))
