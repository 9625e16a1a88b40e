"""The moves of a call of reshard_state_dict, on which all ranks agree from the sides of all of them.

Every rank has the same sides, and makes the same sources and targets of them, so that all raise the same
error. Layouts are copies of plain tensors, what a map makes of a destination, or blocks of scales.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache, reduce

import torch

from ..base.boxes import HeldBoxes, Piece, box_text, without
from ..base.checks import dtype_name
from ..errors import LayoutError, MeshcastError
from ..layout import Box, Layout
from ..planning.plan import Problem
from ..transfers.block_scaled import SOURCES, Quantize, Scheme
from ..transfers.medium import DeviceTypes, Ends, device_types_of, ends_of
from .compiled import check_reducible, reduced_layout, wire_dtype
from .meshes import (
    Gone,
    Source,
    gone,
    raise_gone,
)
from .recorded import Landing
from .state_entries import (
    Agreed,
    Held,
    Move,
    Output,
    Sides,
    StateSide,
    Target,
    Wanted,
    check_holds,
    copies_on,
    mismatch,
    recorded_name,
)
from .state_quantize import Part, Quantized, quantized, source_parts
from .tensor_map import Block, TensorMap, mapped

__all__ = ["agree"]


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


def _meet(block: Block, piece: Piece) -> tuple[Piece, ...]:
    """The part of a block that a piece of the destination holds, as a box of the source; none or one."""
    return _met(block._replace(source=""), piece)


@lru_cache(maxsize=4096)  # the blocks of a model's layers have other sources alone
def _met(block: Block, piece: Piece) -> tuple[Piece, ...]:
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
            return ()
        if own is not None:
            first = block.low[own] + begin - block.at[dim]
            source[own] = (first, first + end - begin)
        local[axes[dim]] += (begin - low) * steps[dim]
    if any(low >= high for low, high in source):
        return ()
    along = tuple(0 if axis is None else axes[axis] for axis in block.axes)
    step = tuple(0 if axis is None else steps[axis] for axis in block.axes)
    return ((tuple(source), tuple(local), along, step),)


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


def agree(given: Mapping[int, StateSide]) -> Agreed:
    """Returns what all ranks agree on. Every rank has the same sides, so that all raise the same error:
    PlanMismatchError where ranks contradict each other, LayoutError where a name is missing, tensors do not
    fit, or a rank has no GPU where it needs one."""
    sides = Sides(given)
    sides.check_options()
    sides.check_lost()
    names = sides.names()
    carried = {name for _, side in sides.groups for name in side.carried}
    recorded = {name: None for _, side in sides.groups for name in side.recorded}
    if not names and not carried and not recorded and not sides.first.options.readers:
        raise LayoutError(
            "no destinations; give (mesh, placements) for at least one name, where it is received"
        )
    values = {name for name in names if name in carried and not sides.holds(name)}
    wanted = {name: sides.wanted(name) for name in names if name not in values}
    makers = {target: each for each in sides.first.maps for target in each.target_names()}
    used: set[str] = set()
    made: dict[str, tuple[tuple[int, ...], list[Block]]] = {}
    scales = {scale for each in wanted.values() if each.quantize for scale in each.quantize.scales}
    for name in wanted:
        if name in scales and name not in makers and not sides.holds(name):
            continue
        if name in makers:
            if name not in made:
                sources = [source for source in makers[name].names() if sides.holds(source)]
                made |= mapped(makers[name], {source: sides.held(source).shape for source in sources})
            used.update(makers[name].names())
        else:
            sides.check_asked(name)
            used.add(name)
    missing: dict[Gone, None] = {}
    targets: dict[str, Target] = {}
    quantizing: list[Quantized] = []
    chosen = _chosen(wanted, made, sides)
    _check_names(chosen, wanted, makers, sides)
    scales = {scale for each in chosen.values() for scale in each.scales}
    for name, each in wanted.items():
        if name in chosen:
            found, what = _quantized_targets(name, wanted, chosen, made.get(name), sides, missing)
            targets |= {target.name: target for target in found}
            quantizing += [] if what is None else [what]
        elif name not in scales:
            if name not in made:
                sides.check_asked(name)
            targets[name] = _target(name, each, made.get(name), sides, missing)
    for name in recorded:
        target = _recorded_target(name, sides, makers, used, missing)
        targets[target.name] = target
    raise_gone(list(missing))
    if names or recorded:
        sides.check_extra(used.union(name for _, side in sides.groups for name in side.skipped))
    _tie(targets, sides, makers)
    _check_scales(targets, sides)
    readers = sides.first.options.readers
    received = _received(targets) if readers else {}
    served = _served(sides, received, {*makers, *chosen}) if readers else {}
    held = {name: sides.held(name) for name in sorted(used.union(served))}
    twins = {name: (each.shape, sides.twins[name]) for name, each in held.items() if name in sides.twins}
    ends = Ends(torch.float32, torch.float32)
    before = [
        Move(source, source, problem, ends, ("cpu", "cpu"))
        for each in quantizing
        for source, problem in each.before.items()
    ]
    made_of = {name: each.sources for each in quantizing for name in each.names.results}
    return Agreed(targets, sides.own, twins, served, received, quantizing, before, made_of)


def _received(targets: Mapping[str, Target]) -> dict[str, Target]:
    """Returns what those that have received can serve to readers: targets, and of tensors that arrive in the
    memory of recorded parameters the boxes of one of these; first of one that has all of it, with the values
    that travelled."""
    found = {name: target for name, target in targets.items() if not target.recorded}
    best: dict[str, tuple[bool, bool]] = {}
    for target in targets.values():
        for move in target.moves if target.recorded else ():
            name, (shape, _, _, layout) = move.source, move.problem
            if name in found and name not in best:
                continue
            try:
                layout.shards(shape)
            except LayoutError:  # a rank has one box twice
                continue
            boxes = [piece[0] for _, pieces in layout.pieces(shape).values() for piece in pieces]
            whole = not without(tuple((0, size) for size in shape), boxes)
            good = whole, move.ends.source == target.dtype
            if name not in best or good > best[name]:
                best[name] = good
                layout, spans = _spanned(layout, shape)
                found[name] = Target(name, shape, target.dtype, layout, target.device_type, target.name)
                found[name].spans = spans
    return found


def _spanned(layout: Layout, shape: tuple[int, ...]) -> tuple[Layout, dict[int, tuple[int, int]]]:
    """Returns the layout of boxes in the parts of a memory that they span, and these, by rank. Each is a
    tensor by itself: names that have one memory are tied."""
    held: list[HeldBoxes] = []
    spans: dict[int, tuple[int, int]] = {}
    for rank, (_, pieces) in layout.pieces(shape).items():
        ends = [
            at[0] + sum((high - low - 1) * step for (low, high), step in zip(box, steps, strict=True))
            for box, at, _, steps in pieces
        ]
        low, high = min((at[0] for _, at, _, _ in pieces), default=0), max(ends, default=-1) + 1
        spans[rank] = low, high - low
        moved = tuple((box, (at[0] - low,), axes, steps) for box, at, axes, steps in pieces)
        held.append(((high - low,), moved))
    return Layout._of_held(tuple(spans), tuple(held), len(shape)), spans


def _served(sides: Sides, received: Mapping[str, Target], others: Collection[str]) -> dict[str, Target]:
    """Returns what the holders can serve to readers: each tensor with the dtype in which it is received, in
    the layout of its holders. received: as _received() returns it. others: names under which other values
    are received than are held. Left out are these, partial values, and what ranks describe differently."""
    found: dict[str, Target] = {}
    for name in sides.all_held():
        if name in others or name in sides.own:
            continue
        try:
            each = sides.held(name)
        except MeshcastError:
            continue
        asked = {side.dtypes[name] for _, side in sides.groups if name in side.dtypes}
        if each.where.has_partial or len(asked) > 1:
            continue
        whole = sides.first.options.dtype if each.dtype.is_floating_point else None
        dtype = received[name].dtype if name in received else asked.pop() if asked else whole or each.dtype
        _check_cast(repr(name), each.dtype, "what readers get of it is", dtype)
        found[name] = Target(name, each.shape, dtype, each.where, each.device_type)
    return found


def _chosen(
    wanted: Mapping[str, Wanted],
    made: Mapping[str, tuple[tuple[int, ...], list[Block]]],
    sides: Sides,
) -> dict[str, Quantize]:
    """Returns the targets that are quantised. Raises LayoutError where none is, though a type is asked
    for."""
    found: dict[str, Quantize] = {}
    left: list[str] = []
    for name, each in wanted.items():
        if each.quantize is None or not (name in made or sides.holds(name)):
            continue
        shape, blocks = made.get(name, ((), []))
        held = [sides.held(source) for source in dict.fromkeys(b.source for b in blocks) or (name,)]
        shape = shape if name in made else held[0].shape
        if each.quantize.matrices and not (all(h.dtype in SOURCES for h in held) and len(shape) > 1):
            left.append(
                f"{each.quantize.scheme.text!r}: {name!r} is {dtype_name(held[0].dtype)} {tuple(shape)}"
            )
        else:
            found[name] = each.quantize
    if left and not found:
        raise LayoutError(
            "one type for all is for floating-point tensors of two dimensions or more, and there is none; "
            f"quantize={left[0]}"
        )
    return found


def _check_names(
    chosen: Mapping[str, Quantize],
    wanted: Mapping[str, Wanted],
    makers: Mapping[str, TensorMap],
    sides: Sides,
) -> None:
    """Raises LayoutError where scales have the name of something else, of which one would be lost."""
    remedy = "give the scales another name: quantize={name: (type, name of the scales)}"
    carried = {name: ranks[0] for ranks, side in reversed(sides.groups) for name in side.carried}
    owners: dict[str, str] = {}
    for name, each in chosen.items():
        for scale in each.scales:
            if scale in owners:
                raise LayoutError(
                    f"quantize gives the scales of {owners[scale]!r} and of {name!r} one name, {scale!r}; "
                    f"{remedy}"
                )
            owners[scale] = name
            holder = next(iter(sides.holders(scale))) if sides.holds(scale) else carried.get(scale)
            if holder is not None or (scale in makers and scale in wanted):
                what = "a map makes" if holder is None else f"rank {holder} holds"
                raise LayoutError(
                    f"quantize makes {scale!r}, the scales of {name!r}, which {what} as well; {remedy}"
                )


def _quantized_targets(
    name: str,
    wanted: Mapping[str, Wanted],
    chosen: Mapping[str, Quantize],
    made: tuple[tuple[int, ...], list[Block]] | None,
    sides: Sides,
    missing: dict[Gone, None],
) -> tuple[list[Target], Quantized | None]:
    """Returns the values of a target and its scales. made: as for _target. None where what it needs is
    lost."""
    own, scheme = wanted[name], chosen[name].scheme
    parts: dict[str, list[Block]] = {}
    for block in () if made is None else made[1]:
        parts.setdefault(block.source, []).append(block)
    held = {source: sides.held(source) for source in parts or (name,)}
    shape = next(iter(held.values())).shape if made is None else made[0]
    blocks = scheme.blocks(name, shape)
    if own.dtype is not None:
        raise LayoutError(
            f"{name!r} has dtype= {dtype_name(own.dtype)} and quantize= {scheme.text!r}; give one"
        )
    places: dict[int, list[Part]] = {}
    for source, each in held.items():
        if each.dtype not in SOURCES:
            allowed = ", ".join(map(dtype_name, SOURCES))
            raise LayoutError(
                f"{source!r} is {dtype_name(each.dtype)}, which quantize={scheme.text!r} does not take; "
                f"allowed are {allowed}"
            )
        _check_kernels(source, each, scheme, sides)
        if each.where.has_partial:
            raise LayoutError(f"{source!r} is under {each.where}; reduce it before it is quantised")
        if _lives(source, each, copies_on(tuple(sorted(each.where.ranks))), sides, missing):
            found = source_parts(source, each.where, each.shape, parts[source] if made else None, len(shape))
            for rank, more in found.items():
                places.setdefault(rank, []).extend(more)
    values_shape = scheme.values_shape(shape)
    stored = (*blocks[:-1], max(1, blocks[-1] // scheme.packed))
    layout = sides.place(name, values_shape)
    values = Target(name, values_shape, scheme.values, layout, own.device_type, scales=chosen[name].scales)
    found_targets = [values]
    scale_shapes = scheme.scale_shapes(name, shape)
    for scale, scale_shape, dtype in zip(chosen[name].scales, scale_shapes, scheme.scales, strict=True):
        place = wanted.get(scale)
        if place is None:
            target = Target(scale, scale_shape, dtype, layout, own.device_type)
            target.beside = (name, values_shape, stored if scale_shape else ())
            target.layout = sides.place_beside(name, values_shape, stored, scale_shape)
        else:
            target = Target(scale, scale_shape, dtype, sides.place(scale, scale_shape), place.device_type)
        found_targets.append(target)
    for target in found_targets:
        _check_outputs(target, wanted.get(target.name, own), sides)
    if not places or missing:
        return found_targets, None
    device_types = {each.device_type for each in held.values()}
    if len(device_types) > 1:
        raise LayoutError(
            f"{name!r} is made of tensors on {' and '.join(sorted(device_types))}, which quantize= cannot "
            "join; put all of them on one"
        )
    dtype = reduce(torch.promote_types, (each.dtype for each in held.values()))
    what = quantized(name, scheme, shape, dtype, places)
    of_scales = (what.scales if each else copies_on(tuple(what.parts)) for each in scale_shapes)
    sources = (what.values, *of_scales)
    for target, source, src in zip(found_targets, what.names.results, sources, strict=True):
        types = device_types_of(min(device_types), target.device_type)
        check_holds(target.name, target.shape, src, target.layout)
        _check_gpus(target.name, src, target.layout, types, sides)
        problem = Problem(target.shape, target.dtype, src, target.layout)
        target.moves.append(Move(source, target.name, problem, Ends(target.dtype, target.dtype), types))
    return found_targets, what


def _check_kernels(source: str, held: Held, scheme: Scheme, sides: Sides) -> None:
    """Raises LayoutError where a rank that holds a tensor cannot quantise it on its device. A type of the
    user's own needs no kernels of meshcast."""
    for rank in held.where.ranks if held.device_type == "cuda" else ():
        reason = sides.sides[rank].obstacles[scheme.own] if rank in sides.sides else ""  # a lost one
        if reason:
            raise LayoutError(
                f"{source!r} is on cuda, where quantize={scheme.text!r} cannot run on rank {rank}: "
                f"{reason}; or send a copy from the CPU, or quantise before the call",
                peer=rank,
            )


def _check_outputs(target: Target, wanted: Wanted, sides: Sides) -> None:
    """Raises LayoutError unless what ranks receive a target into has its dtype and shape."""
    for rank, side in sides.sides.items():
        out = side.outs.get(target.name)
        if out is None:
            continue
        expected = target.layout.local_shapes(target.shape)[rank] if out.plain else target.shape
        if out.dtype != target.dtype or out.shape != expected:
            raise LayoutError(
                f"the output of {target.name!r} on rank {rank} has dtype {dtype_name(out.dtype)} and shape "
                f"{out.shape}; expected {dtype_name(target.dtype)} and {expected}"
                f"{_hint(out, wanted, expected)}"
            )


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
    landings = [(ranks, side.recorded[name]) for ranks, side in sides.groups if name in side.recorded]
    (first_rank, *_), first = landings[0]
    wanted: dict[str, list[tuple[int, HeldBoxes]]] = {}
    for (rank, *_), landing in landings:
        if (landing.dtype, landing.device_type) != (first.dtype, first.device_type):
            raise mismatch(
                f"the parameter {name!r} is {dtype_name(first.dtype)} on {first.device_type} on rank "
                f"{first_rank}, but {dtype_name(landing.dtype)} on {landing.device_type} on rank {rank}"
            )
        for tensor, pieces in _pieces_of(landing, sides, makers).items():
            wanted.setdefault(tensor, []).append((rank, ((landing.numel,), pieces)))
    memory = sides.by_group([(ranks[0], ((landing.numel,), ())) for ranks, landing in landings], 1)
    target = Target(recorded_name(name), (), first.dtype, memory, first.device_type, recorded=True)
    for tensor, held in wanted.items():
        used.add(tensor)
        each = sides.held(tensor)
        dst = sides.by_group(held, len(each.shape))
        _check_cast(repr(tensor), each.dtype, f"the parameter {name!r}", first.dtype)
        if _lives(tensor, each, dst, sides, missing):
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
            tensors = [each for each in makers[entry].names() if sides.holds(each)]
            made = sides.mapped(makers[entry], {each: sides.held(each).shape for each in tensors})
            found, blocks = made[entry]
            for block in blocks if found == shape else ():
                for piece in pieces:
                    wanted.setdefault(block.source, []).extend(_meet(block, piece))
        else:
            if not sides.holds(entry):
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
    """Raises LayoutError where the source does not have all that is wanted of it."""
    key = (id(held), id(dst), target.dtype, device_types, through_host)
    known = sides.moves.get(key)
    if known is not None:
        return known._replace(source=name, target=target.name)
    check_holds(name, held.shape, held.where, dst)
    # A digest of values that are reduced on the way could not be taken at their source.
    digest = sides.first.options.digest
    source = Source(held.shape, held.dtype, held.where, None, reduce_first=digest)
    check_reducible(held.where, held.dtype)
    reduces = held.where.has_partial and not source.reduced_on_the_way
    src = reduced_layout(held.where) if reduces else held.where
    wire = wire_dtype(source, target.dtype)
    ends = ends_of(held.dtype, wire, target.dtype, device_types)
    problem = Problem(held.shape, wire, src, dst)
    move = sides.moves[key] = Move(name, target.name, problem, ends, device_types, reduces, through_host)
    return move


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
        for rank, obstacles in sides.obstacles.items() if device == "cuda" else ():
            reason = obstacles[types != ("cuda", "cuda")]
            if reason and rank in layout.ranks:
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
        if other is None or target.scales or other.scales or name in makers or tied in makers:
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
