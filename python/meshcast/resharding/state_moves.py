"""The moves of a call of reshard_state_dict, on which all ranks agree from the sides of all of them.

Every rank has the same sides, and makes the same sources and targets of them, so that all raise the same
error. Layouts are copies of plain tensors, what a map makes of a destination, or blocks of scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache

import torch
from torch.distributed.tensor import Replicate

from ..base.boxes import HeldBoxes, Piece, box_text
from ..base.checks import dtype_name
from ..errors import LayoutError
from ..layout import Box, Layout
from ..planning.plan import Problem
from ..transfers.medium import DeviceTypes, device_types_of, ends_of
from .compiled import check_reducible, reduced_layout, wire_dtype
from .meshes import (
    Gone,
    Source,
    check_not_wanted,
    everywhere,
    gone,
    joined,
    positive_placements,
    raise_gone,
    separate,
    survivors,
)
from .recorded import Landing
from .state_entries import (
    Agreed,
    Held,
    Move,
    Output,
    StateSide,
    Target,
    Wanted,
    held_text,
    mismatch,
    names_text,
    recorded_name,
    wanted_text,
    with_boxes,
)
from .tensor_map import Block, TensorMap, mapped

__all__ = ["Sides", "agree"]


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
        raise LayoutError(f"{name!r}: {error}") from None


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
            f"{scale!r} has shape {scale_shape}; the scales of blocks of {tuple(block)} of {name!r}, "
            f"which has shape {shape}, have {expected}"
        )
    has = scale_layout.shards(scale_shape)
    for rank, boxes in layout.shards(shape).items():
        wanted = []
        for box in boxes:
            for (low, high), by, size in zip(box, block, shape, strict=True):
                if low % by or (high % by and high != size):
                    raise LayoutError(
                        f"the destination of {name!r} gives rank {rank} {box_text(box)}, which cuts "
                        f"blocks of {tuple(block)}: their scales would not fit; choose a layout that cuts "
                        "between blocks"
                    )
            wanted.append(
                tuple((low // by, -(-high // by)) for (low, high), by in zip(box, block, strict=True))
            )
        if _joined_text(wanted) != _joined_text(has.get(rank, [])):
            raise LayoutError(
                f"rank {rank} gets the blocks {_joined_text(wanted)} of {name!r}, but of {scale!r} "
                f"{_joined_text(has.get(rank, []))}; give both layouts that cut the same way"
            )


def _joined_text(boxes: Sequence[Box]) -> str:
    return ", ".join(box_text(box) for box in boxes) or "nothing"


class Sides:
    """The sides of all ranks, and what they say together. had: the layouts of tensors with ranks that are
    lost, where such are in them; twins: the layouts that one is made of, where several meshes hold the tensor
    if their values are equal. Both have the tensors that `held` was asked for."""

    def __init__(self, sides: Mapping[int, StateSide]) -> None:
        self.sides = sides
        self.ranks = sorted(sides)
        self.had: dict[str, Layout] = {}
        self.twins: dict[str, tuple[Layout, ...]] = {}
        self._places: dict[str, list[Layout]] = {}
        self._held: dict[str, Held] = {}
        self._mapped: dict[int, dict[str, tuple[tuple[int, ...], list[Block]]]] = {}
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
        """Ranks that hold nothing any longer, each with what messages call it."""
        return dict(self.first.options.lost)

    def names(self) -> list[str]:
        """Returns the names of all destinations, in the order in which the ranks say them."""
        found: dict[str, None] = {}
        for rank in self.ranks:
            found.update(dict.fromkeys(self.sides[rank].wanted))
        return list(found)

    def holders(self, name: str) -> dict[int, Held]:
        """Returns what each rank that has a tensor says of it, by ascending rank."""
        return self._holders.get(name, {})

    def wanted(self, name: str) -> Wanted:
        """Raises PlanMismatchError where ranks name different destinations, or one inside names none. A rank
        inside of a sub-mesh names that; one outside may name the whole mesh that these make up. Meshes that
        share no rank, as those of several engines, receive all at once."""
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
        self._places[name] = layouts
        return first._replace(layout=layouts[0])

    def place(self, name: str, shape: tuple[int, ...]) -> Layout:
        """Returns where a tensor goes, once `wanted` was asked: to one mesh, or to several that share no
        rank."""
        return together([positive(layout, len(shape)) for layout in self._places[name]], shape)

    def held(self, name: str) -> Held:
        """Raises LayoutError where no rank, or not every rank that should, has it; PlanMismatchError where
        ranks describe it differently."""
        found = self._held.get(name)
        if found is None:
            found = self._held[name] = self._together(name)
        return found

    def mapped(
        self, each: TensorMap, shapes: dict[str, tuple[int, ...]]
    ) -> dict[str, tuple[tuple[int, ...], list[Block]]]:
        """The blocks that make each target of a map, as for tensor_map.mapped; found once."""
        if id(each) not in self._mapped:
            self._mapped[id(each)] = mapped(each, shapes)
        return self._mapped[id(each)]

    def check_asked(self, name: str) -> None:
        """Raises unless some rank has a tensor that is asked for by this name."""
        if name in self._holders:
            return
        naming = [rank for rank in self.ranks if name in self.sides[rank].wanted]
        if len(naming) < len(self.ranks):
            other = next(rank for rank in self.ranks if rank not in naming)
            raise mismatch(
                f"ranks {naming[0]} and {other} ask for different tensors: only ranks {naming} name "
                f"{name!r}, which no rank's state_dict has"
            )
        raise LayoutError(f"no rank's state_dict has the key {name!r}, for which a destination is given")

    def _together(self, name: str) -> Held:
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
            return first._replace(layout=copies_on(tuple(sorted(holders))))
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
        if left is not layout:
            self.had[name] = layout
        if len(layouts) > 1:
            self.twins[name] = tuple(layouts)
        return first._replace(layout=left or layout)

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
        for rank, side in self.sides.items():
            odd = [name for name in side.loaded if all(h.layout is None for h in self.holders(name).values())]
            if odd:
                raise LayoutError(
                    f"rank {rank} has loaded a part of {names_text(odd)}, of which no rank holds a shard"
                )
        said = {held.layout for holders in self._holders.values() for held in holders.values()} - {None}
        layouts = [layout for layout in said if layout is not None]
        known = {rank for layout in layouts for rank in layout.ranks}
        never = sorted(called for number, called in self.lost.items() if number not in known)
        if layouts and never:
            raise LayoutError(
                f"lost= names {never}, which are in no layout of what is held, such as "
                f"{min(layouts, key=repr)}; name ranks that held a part"
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
                        f"rank {other}"
                    )
        new: dict[str, tuple[int, str | None]] = {}
        for rank in self.ranks:
            for old, name in self.sides[rank].renamed.items():
                before, earlier = new.setdefault(old, (rank, name))
                if earlier != name:
                    raise mismatch(
                        f"rename makes {earlier!r} of {old!r} on rank {before}, but {name!r} on rank {rank}"
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
                    raise LayoutError(f"{argument}= on rank {rank} names what {what}: {names_text(odd)}")

    def check_extra(self, used: set[str]) -> None:
        """Raises where a rank holds what no rank asked for."""
        if not self.first.options.strict or any(side.selects for side in self.sides.values()):
            return
        for holder in self.ranks:
            extra = [name for name in self.sides[holder].held if name not in used]
            if extra:
                raise LayoutError(
                    f"rank {holder} holds {names_text(extra)}, for which no destination is given; add "
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


def agree(given: Mapping[int, StateSide]) -> Agreed:
    """Returns what all ranks agree on. Every rank has the same sides, so that all raise the same error:
    PlanMismatchError where ranks contradict each other, LayoutError where a name is missing, tensors do not
    fit, or a rank has no GPU where it needs one."""
    sides = Sides(given)
    sides.check_options()
    sides.check_lost()
    names = sides.names()
    carried = {name for side in given.values() for name in side.carried}
    recorded = {name: None for side in given.values() for name in side.recorded}
    if not names and not carried and not recorded:
        raise LayoutError(
            "no destinations; give (mesh, placements) for at least one name, where it is received"
        )
    values = {name for name in names if name in carried and not sides.holders(name)}
    wanted = {name: sides.wanted(name) for name in names if name not in values}
    makers = {target: each for each in sides.first.maps for target in each.target_names()}
    used: set[str] = set()
    made: dict[str, tuple[tuple[int, ...], list[Block]]] = {}
    for name in wanted:
        if name in makers:
            if name not in made:
                sources = [source for source in makers[name].names() if sides.holders(source)]
                made |= mapped(makers[name], {source: sides.held(source).shape for source in sources})
            used.update(makers[name].names())
        else:
            sides.check_asked(name)
            used.add(name)
    missing: dict[Gone, None] = {}
    targets = {name: _target(name, each, made.get(name), sides, missing) for name, each in wanted.items()}
    for name in recorded:
        target = _recorded_target(name, sides, makers, used, missing)
        targets[target.name] = target
    raise_gone(list(missing))
    sides.check_extra(used.union(name for side in given.values() for name in side.skipped))
    _tie(targets, sides, makers)
    _check_scales(targets, sides)
    held = {name: sides.held(name) for name in sorted(used)}
    twins = {name: (each.shape, sides.twins[name]) for name, each in held.items() if name in sides.twins}
    return Agreed(targets, sides.own, twins)


def _target(
    name: str,
    wanted: Wanted,
    made: tuple[tuple[int, ...], list[Block]] | None,
    sides: Sides,
    missing: dict[Gone, None],
) -> Target:
    """made: its shape and the blocks of sources that make it; None where it is its own source. missing: gets
    what it needs and no rank holds any longer."""
    parts: dict[str, list[Block]] = {}
    for block in () if made is None else made[1]:
        parts.setdefault(block.source, []).append(block)
    held = {source: sides.held(source) for source in parts or (name,)}
    shape = held[name].shape if made is None else made[0]
    layout = sides.place(name, shape)
    if made is not None:
        layout.shards(shape)  # raises where it does not fit
    dtype = _result_dtype(name, list(held.values()), shape, wanted, layout, sides)
    target = Target(name, shape, dtype, layout, wanted.device_type)
    through_host = made is not None and {each.device_type for each in held.values()} != {wanted.device_type}
    for source, each in held.items():
        dst = layout if made is None else mapped_layout(parts[source], shape, layout, len(each.shape))
        if dst is None or not _lives(source, each, dst, sides, missing):
            continue
        check_holds(source, each.shape, each.where, dst)
        types = device_types_of(each.device_type, wanted.device_type)
        _check_gpus(name, each.where, layout, types, sides)
        target.moves.append(
            _move(source, target, each, dst, ("cpu", "cpu") if through_host else types, through_host, sides)
        )
    return target


def _recorded_target(
    name: str,
    sides: Sides,
    makers: Mapping[str, TensorMap],
    used: set[str],
    missing: dict[Gone, None],
) -> Target:
    """The memory of a parameter, as the loaders of all ranks that have it were recorded."""
    landings = {
        rank: sides.sides[rank].recorded[name] for rank in sides.ranks if name in sides.sides[rank].recorded
    }
    first_rank, first = next(iter(landings.items()))
    wanted: dict[str, dict[int, tuple[Piece, ...]]] = {}
    read: dict[int, dict[str, tuple[Piece, ...]]] = {}  # of each landing: those of replicas are one object
    for rank, landing in landings.items():
        if (landing.dtype, landing.device_type) != (first.dtype, first.device_type):
            raise mismatch(
                f"the parameter {name!r} is {dtype_name(first.dtype)} on {first.device_type} on rank "
                f"{first_rank}, but {dtype_name(landing.dtype)} on {landing.device_type} on rank {rank}"
            )
        if id(landing) not in read:
            read[id(landing)] = _pieces_of(landing, sides, makers)
        for tensor, pieces in read[id(landing)].items():
            wanted.setdefault(tensor, {})[rank] = pieces
    memory = Layout._of_held(tuple(landings), tuple(((each.numel,), ()) for each in landings.values()), 1)
    target = Target(recorded_name(name), (), first.dtype, memory, first.device_type, recorded=True)
    for tensor, ranks in wanted.items():
        used.add(tensor)
        each = sides.held(tensor)
        held = tuple(((landings[rank].numel,), pieces) for rank, pieces in ranks.items())
        dst = Layout._of_held(tuple(ranks), held, len(each.shape))
        _check_cast(repr(tensor), each.dtype, f"the parameter {name!r}", first.dtype)
        if _lives(tensor, each, dst, sides, missing):
            check_holds(tensor, each.shape, each.where, dst)
            types = device_types_of(each.device_type, first.device_type)
            _check_gpus(tensor, each.where, dst, types, sides)
            target.moves.append(_move(tensor, target, each, dst, types, False, sides))
    return target


def _pieces_of(
    landing: Landing, sides: Sides, makers: Mapping[str, TensorMap]
) -> dict[str, tuple[Piece, ...]]:
    """The boxes of each tensor that is held that arrive in a memory. Entries of the checkpoint may be made of
    such, several of one."""
    wanted: dict[str, list[Piece]] = {}
    for source in landing.sources:
        entry, shape, pieces = source.entry, source.shape, source.placed()
        if entry in makers:
            tensors = [each for each in makers[entry].names() if sides.holders(each)]
            made = sides.mapped(makers[entry], {each: sides.held(each).shape for each in tensors})
            found, blocks = made[entry]
            for block in blocks if found == shape else ():
                for piece in pieces:
                    wanted.setdefault(block.source, []).extend(_meet(block, piece))
        else:
            if not sides.holders(entry):
                raise LayoutError(
                    f"no rank's state_dict has the key {entry!r}, which the recorded loader uses"
                )
            found = sides.held(entry).shape
            wanted.setdefault(entry, []).extend(pieces)
        if found != shape:
            raise LayoutError(
                f"{entry!r} has shape {found}, but {shape} when the loader was recorded; record again with "
                "the names and shapes of this checkpoint"
            )
    return {name: tuple(pieces) for name, pieces in wanted.items() if pieces}


def _move(
    name: str,
    target: Target,
    held: Held,
    dst: Layout,
    device_types: DeviceTypes,
    through_host: bool,
    sides: Sides,
) -> Move:
    # A digest of values that are reduced on the way could not be taken at their source.
    digest = sides.first.options.digest
    source = Source(held.shape, held.dtype, held.where, None, reduce_first=digest)
    check_reducible(held.where, held.dtype)
    reduces = held.where.has_partial and not source.reduced_on_the_way
    src = reduced_layout(held.where) if reduces else held.where
    wire = wire_dtype(source, target.dtype)
    ends = ends_of(held.dtype, wire, target.dtype, device_types)
    problem = Problem(held.shape, wire, src, dst)
    return Move(name, target.name, problem, ends, device_types, reduces, through_host)


def _lives(name: str, held: Held, wanted: Layout, sides: Sides, missing: dict[Gone, None]) -> bool:
    """Returns whether living ranks hold all that is wanted of a source, and anything of it at all."""
    had = sides.had.get(name)
    if had is None:
        return True
    found = gone(name, held.shape, had, sides.lost, wanted)
    missing.update(dict.fromkeys(found))
    return not found and held.layout is not had


def _result_dtype(
    name: str, held: Sequence[Held], shape: tuple[int, ...], wanted: Wanted, layout: Layout, sides: Sides
) -> torch.dtype:
    """Returns the dtype of a result: the one asked for by name, or for all floating-point tensors; else that
    of the outputs where given, else that of the source."""
    kinds = {each.dtype for each in held}
    dtype = held[0].dtype
    floating = all(kind.is_floating_point for kind in kinds)
    named = wanted.dtype if floating or not wanted.floats else None
    asked = named or (sides.first.options.dtype if floating else None)
    result = asked or dtype
    given = {rank: side.outs[name] for rank, side in sides.sides.items() if name in side.outs}
    for index, (rank, out) in enumerate(given.items()):
        if index == 0 and asked is None and out.dtype.is_floating_point == dtype.is_floating_point:
            result = out.dtype
        expected = layout.local_shapes(shape)[rank] if out.plain else shape
        if out.dtype != result or out.shape != expected:
            raise LayoutError(
                f"the output of {name!r} on rank {rank} has dtype {dtype_name(out.dtype)} and shape "
                f"{out.shape}; expected {dtype_name(result)} and {expected}{_hint(out, wanted, expected)}"
            )
    if asked is None and len(kinds) > 1 and not given:
        raise LayoutError(
            f"{name!r} is made of tensors of different dtypes, {sorted(map(str, kinds))}; say which it gets "
            "(dtype=)"
        )
    for kind in kinds:
        _check_cast(repr(name), kind, "its output", result)
    return result


def _check_cast(name: str, dtype: torch.dtype, what: str, result: torch.dtype) -> None:
    if result != dtype and not (result.is_floating_point and dtype.is_floating_point):
        raise LayoutError(f"{name} is {dtype}, {what} {result}; only floating-point tensors are cast")


def _hint(out: Output, wanted: Wanted, expected: tuple[int, ...]) -> str:
    if not out.plain or out.shape == expected or wanted.where.by_boxes:
        return ""
    whole = all(placement.is_replicate() for placement in wanted.where.placements)
    part = "; a plain tensor takes all of it: for this rank's part give a Layout as destination and out="
    return part if whole else ""


def _check_gpus(name: str, src: Layout, dst: Layout, types: DeviceTypes, sides: Sides) -> None:
    """Raises LayoutError where one of the tensor's ranks cannot use the GPU that it should be on."""
    for layout, device in zip((src, dst), types, strict=True):
        for rank in layout.ranks if device == "cuda" else ():
            reason = sides.sides[rank].obstacles[types != ("cuda", "cuda")]
            if reason:
                text = f"{name!r} is to be on cuda on rank {rank}, but there {reason}"
                raise LayoutError(text, peer=rank)


def _tie(targets: dict[str, Target], sides: Sides, makers: Mapping[str, TensorMap]) -> None:
    """Finds targets that are tied at the source and can be at the destination: they travel once. Raises
    LayoutError for outputs that are one tensor where the sources are not."""
    if not any(side.ties or side.out_ties for side in sides.sides.values()):
        return
    for name, target in targets.items():
        holders = [rank for rank in sides.holders(name) if rank in sides.held(name).where.ranks]
        earlier = {sides.sides[rank].ties.get(name) for rank in holders}
        tied = next(iter(earlier)) if len(earlier) == 1 else None
        other = targets.get(tied) if tied is not None else None
        if other is None or name in makers or tied in makers:
            continue
        same = (target.layout, target.dtype, target.device_type) == (
            other.layout,
            other.dtype,
            other.device_type,
        )
        if same and all(_outputs_agree(side, name, other.name) for side in sides.sides.values()):
            target.alias = other.name
            target.moves.clear()
    for rank, side in sides.sides.items():
        for name, earlier_name in side.out_ties.items():
            if _root(targets, name) != _root(targets, earlier_name):
                raise LayoutError(
                    f"the outputs {earlier_name!r} and {name!r} share memory on rank {rank}, but the "
                    "tensors are not one at their source; give each its own"
                )


def _root(targets: Mapping[str, Target], name: str) -> str:
    return targets[name].alias or name


def _outputs_agree(side: StateSide, name: str, other: str) -> bool:
    if (name in side.outs) != (other in side.outs):
        return False
    return name not in side.outs or side.out_ties.get(name, name) == side.out_ties.get(other, other)


def _check_scales(targets: Mapping[str, Target], sides: Sides) -> None:
    for name, (scale, block) in sides.first.scales.items():
        chosen = any(side.selects for side in sides.sides.values())
        if chosen and name not in targets and scale not in targets:
            continue
        for each in (name, scale):
            if each not in targets:
                raise LayoutError(
                    f"{name!r} and its scales {scale!r} travel together, but no destination is given "
                    f"for {each!r}"
                )
        tensor, scales = targets[name], targets[scale]
        check_blocks(name, scale, block, (tensor.shape, tensor.layout), (scales.shape, scales.layout))
