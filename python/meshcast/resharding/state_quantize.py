"""Tensors that become block-scaled on the way: who holds which part of them, in the coordinates of the
target; what the holders of one block exchange; and this rank's values and scales, made of its own parts.

Magnitudes are agreed on and scales made on the host, values where the tensor is.

No shard is gathered. Where several ranks hold a block, each gets the largest magnitude in the others' parts
of it, 4 bytes each. For nvfp4, each holder also gets the largest magnitude of every part; and where the two
values of a byte are on two ranks, the one that has the first gets the second. So it is with the blocks of a
type of the user's own: who has the first element of one gets the others, and its function makes values and
scales of the whole. All of it travels as moves of one batch, before those of values and scales.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import Replicate

from ..base.boxes import Box, HeldBoxes, Piece, block_box, common, extents, piece_view, without
from ..errors import LayoutError
from ..layout import Layout
from ..planning.plan import Problem
from ..transfers.block_scaled import (
    Quantizing,
    Scheme,
    amax_of,
    scales_of,
    tensor_scale_of,
    values_of,
)
from ..transfers.medium import fresh
from .tensor_map import Block

__all__ = ["Blocks", "Near", "Part", "Quantized", "quantized", "source_parts"]

_Shape = tuple[int, ...]
_Boxes = dict[int, list[Box]]  # by rank, in the order in which a flat tensor has them


class Part(NamedTuple):
    """A box of a target that a rank holds, and where it lies in the local tensor of a source."""

    source: str
    piece: Piece

    @property
    def box(self) -> Box:
        return self.piece[0]


def source_parts(
    name: str, layout: Layout, shape: Sequence[int], blocks: Sequence[Block] | None, ndim: int
) -> dict[int, list[Part]]:
    """Returns the parts of a target of `ndim` dimensions that ranks hold as a source. shape, layout: of the
    source. blocks: those of it that go into the target; None: it is the target."""
    found: dict[int, list[Part]] = {}
    for rank, (_, pieces) in layout.pieces(shape).items():
        for piece in pieces:
            if blocks is None:
                parts = [Part(name, piece)] if 0 not in extents(piece[0]) else []
            else:
                parts = [Part(name, each) for block in blocks for each in _turned(block, piece, ndim)]
            if parts:
                found.setdefault(rank, []).extend(parts)
    return found


def _turned(block: Block, piece: Piece, ndim: int) -> list[Piece]:
    """The part of a piece of a source that is in a block, as a piece of what the block is put into; none or
    one."""
    box, at, axes, steps = piece
    own = tuple((low, low + size) for low, size in zip(block.low, block.sizes, strict=True))
    both = common(box, own) if box else box
    if both is None:
        return []
    axes, steps = axes or tuple(range(len(box))), steps or (1,) * len(box)
    target = [(first, first + 1) for first in block.at]
    local, along, step = list(at), [0] * ndim, [0] * ndim
    for dim, (low, high) in enumerate(both):
        local[axes[dim]] += (low - box[dim][0]) * steps[dim]
        there = block.axes[dim]
        if there is not None:
            begin = block.at[there] + low - block.low[dim]
            target[there] = (begin, begin + high - low)
            along[there], step[there] = axes[dim], steps[dim]
    return [(tuple(target), tuple(local), tuple(along), tuple(step))]


def _flat(boxes: _Boxes, ndim: int) -> Layout | None:
    """The layout in which ranks hold boxes one after the other in a tensor of one dimension; None where there
    are none."""
    held: dict[int, HeldBoxes] = {}
    for rank in sorted(boxes):
        at, pieces = 0, []
        for box in boxes[rank]:
            sizes = extents(box)
            steps = tuple(math.prod(sizes[dim + 1 :]) for dim in range(ndim))
            pieces.append((box, (at,), (0,) * ndim, steps))
            at += math.prod(sizes)
        if pieces:
            held[rank] = ((at,), tuple(pieces))
    return Layout._of_held(tuple(held), tuple(held.values()), ndim) if held else None


def _sizes(boxes: Iterable[Box]) -> list[int]:
    return [math.prod(extents(box)) for box in boxes]


class Near:
    """Finds the boxes that meet another, of many that are mostly apart."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        ndim = len(boxes[0]) if boxes else 0
        self._dim = max(range(ndim), key=lambda dim: len({box[dim][0] for box in boxes}), default=0)
        self._order = sorted(range(len(boxes)), key=lambda at: boxes[at][self._dim])
        self._lows = [boxes[at][self._dim][0] for at in self._order]
        self._widest = max((box[self._dim][1] - box[self._dim][0] for box in boxes), default=0)
        self._boxes = boxes

    def meeting(self, box: Box) -> list[tuple[int, Box]]:
        """Returns the number of each, and what it has in common with the box."""
        low, high = box[self._dim]
        found = []
        for place in range(bisect_left(self._lows, low - self._widest), bisect_left(self._lows, high)):
            at = self._order[place]
            both = common(self._boxes[at], box)
            if both is not None:
                found.append((at, both))
        return found


class _Names(NamedTuple):
    """The names under which a rank's memory is given to moves. results: of values and each of the scales;
    then of what goes between the holders before, and arrives there."""

    results: tuple[str, ...]
    amax: str
    parts: str
    missing: str


class Quantized(NamedTuple):
    """A target that is quantised on the way, the same on all ranks.

    shape, block: of the whole tensor; cell: sizes of what one rank makes as a whole; dtype: of all sources.
    parts: by rank that holds some. blocks: of the scales of which the rank has memory, by rank. numbers: of
    the distinct boxes of parts. fetched: by rank, of which box, by its number, which blocks come from other
    ranks. missing, lent: elements that come, and that are given, where ranks share cells. values, scales:
    where these are held, as they travel. before: what travels between the holders, in float32, by the name of
    the memory that it comes from and goes to."""

    name: str
    scheme: Scheme
    shape: _Shape
    block: _Shape
    cell: _Shape
    dtype: torch.dtype
    parts: dict[int, tuple[Part, ...]]
    blocks: _Boxes
    numbers: dict[Box, int]
    fetched: dict[int, list[tuple[int, Box]]]
    missing: _Boxes
    lent: _Boxes
    names: _Names
    values: Layout
    scales: Layout
    before: dict[str, Problem]

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(part.source for parts in self.parts.values() for part in parts))


def quantized(
    name: str, scheme: Scheme, shape: _Shape, dtype: torch.dtype, parts: Mapping[int, Sequence[Part]]
) -> Quantized:
    """dtype: of all sources together. Raises LayoutError where the scheme does not fit the shape."""
    block, cell = scheme.blocks(name, shape), scheme.cell(name, shape)
    results = ("values", *(f"scales {at}" for at in range(len(scheme.scales))))
    called = [f"{what} of {name!r} as {scheme.text}" for what in (*results, *_Names._fields[1:])]
    names = _Names(tuple(called[: len(results)]), *called[len(results) :])
    own: dict[int, tuple[Part, ...]] = {rank: tuple(parts[rank]) for rank in sorted(parts)}
    numbers: dict[Box, int] = {}
    for each in own.values():
        for part in each:
            numbers.setdefault(part.box, len(numbers))
    values: _Boxes = {}
    blocks: _Boxes = {}
    for rank, each in own.items():
        whole = [_whole(part.box, cell, shape) for part in each]
        values[rank] = [_stored(box, scheme.packed) for box in whole if 0 not in extents(box)]
        blocks[rank] = []
        for box in whole if scheme.own else (part.box for part in each):
            if 0 not in extents(box):
                blocks[rank] += without(block_box(box, block), blocks[rank])
    ndim = len(shape)
    scale_layout, value_layout = _flat(blocks, ndim), _flat(values, ndim)
    assert scale_layout is not None and value_layout is not None  # the tensor has elements
    fetched = {} if scheme.own else _fetched(own, numbers, block, shape)
    missing, lent = _shared_cells(own, cell, shape) if max(cell) > 1 else ({}, {})
    made = Quantized(
        name,
        scheme,
        shape,
        block,
        cell,
        dtype,
        own,
        blocks,
        numbers,
        fetched,
        missing,
        lent,
        names,
        value_layout,
        scale_layout,
        {},
    )
    return made._replace(before=_before(made))


def _whole(box: Box, cell: _Shape, shape: _Shape) -> Box:
    """The cells whose first element is in a box, as a box of the tensor. Those at its end may be smaller."""
    return tuple(
        (min(-(-low // by) * by, size), min(-(-high // by) * by, size))
        for (low, high), by, size in zip(box, cell, shape, strict=True)
    )


def _stored(box: Box, packed: int) -> Box:
    """A box of whole cells, in values of which each has some elements."""
    low, high = box[-1]
    return (*box[:-1], (low // packed, high // packed))


def _fetched(
    own: Mapping[int, Sequence[Part]], numbers: Mapping[Box, int], block: _Shape, shape: _Shape
) -> dict[int, list[tuple[int, Box]]]:
    """The blocks that a rank has only a part of, by the parts of other ranks that have more of them."""
    boxes = list(numbers)
    near: Near | None = None
    found: dict[int, list[tuple[int, Box]]] = {}
    same: dict[tuple[Box, ...], list[tuple[int, Box]]] = {}  # of ranks that hold the same
    for rank, parts in own.items():
        key = tuple(part.box for part in parts)
        if key not in same:
            wanted: dict[int, list[Box]] = {}
            for box in key:
                for slab in _open_blocks(box, block, shape):
                    near = near or Near([block_box(each, block) for each in boxes])
                    for at, both in near.meeting(slab):
                        if boxes[at] not in key:
                            wanted.setdefault(at, []).extend(without(both, wanted.get(at, ())))
            same[key] = [(at, each) for at in sorted(wanted) for each in wanted[at]]
        if same[key]:
            found[rank] = same[key]
    return found


def _open_blocks(box: Box, block: _Shape, shape: _Shape) -> list[Box]:
    """The blocks of which a box has some elements and not all, in boxes that are apart."""
    rest, found = list(block_box(box, block)), []
    for dim, ((low, high), by, size) in enumerate(zip(box, block, shape, strict=True)):
        first, last = rest[dim]
        if low % by:
            found.append((*rest[:dim], (first, first + 1), *rest[dim + 1 :]))
            first += 1
        if high % by and high < size and first < last:
            found.append((*rest[:dim], (last - 1, last), *rest[dim + 1 :]))
            last -= 1
        rest[dim] = (first, last)
        if first >= last:
            break
    return found


def _shared_cells(own: Mapping[int, Sequence[Part]], cell: _Shape, shape: _Shape) -> tuple[_Boxes, _Boxes]:
    """The elements that a rank lacks of cells whose first one it has, and what ranks hold of these."""
    missing: _Boxes = {}
    for rank, parts in own.items():
        for part in parts:
            whole = _whole(part.box, cell, shape)
            if 0 not in extents(whole):
                for box in without(whole, [part.box]):
                    missing.setdefault(rank, []).extend(without(box, missing.get(rank, ())))
    wanted = list(dict.fromkeys(box for boxes in missing.values() for box in boxes))
    near = Near(wanted)
    lent: _Boxes = {}
    for rank, parts in own.items() if wanted else ():
        for part in parts:
            for _, both in near.meeting(part.box):
                lent.setdefault(rank, []).extend(without(both, lent.get(rank, ())))
    return missing, lent


def _before(made: Quantized) -> dict[str, Problem]:
    found: dict[str, Problem] = {}

    def add(name: str, shape: _Shape, src: Layout | None, dst: Layout | None) -> None:
        if src is not None and dst is not None:
            found[name] = Problem(shape, torch.float32, src, dst)

    names, ndim, count = made.names, len(made.shape), len(made.numbers)
    # Slice by slice of a further dimension, the magnitudes of each of the boxes.
    if made.fetched:
        total = tuple(-(-size // by) for size, by in zip(made.shape, made.block, strict=True))
        has = {
            rank: [_slice(made.numbers[part.box], block_box(part.box, made.block)) for part in parts]
            for rank, parts in made.parts.items()
        }
        wants = {rank: [_slice(at, box) for at, box in each] for rank, each in made.fetched.items()}
        add(names.amax, (count, *total), _flat(has, ndim + 1), _flat(wants, ndim + 1))
    if made.scheme.kind == "nvfp4" and count > 1:
        own: _Boxes = {
            rank: [((at, at + 1),) for at in sorted({made.numbers[part.box] for part in parts})]
            for rank, parts in made.parts.items()
        }
        add(names.parts, (count,), _flat(own, 1), Layout(list(made.parts), [Replicate()]))
    add(names.missing, made.shape, _flat(made.lent, ndim), _flat(made.missing, ndim))
    return found


def _slice(at: int, box: Box) -> Box:
    return ((at, at + 1), *box)


class Blocks:
    """The tensors of one call that this rank quantises: the largest magnitudes of its blocks, then values and
    scales of these; for types of the user's own, values and scales until they have been staged. No memory of
    a source is kept."""

    def __init__(
        self,
        rank: int,
        made: Sequence[Quantized],
        sources: Mapping[str, torch.Tensor],
        quantizing: Quantizing,
    ) -> None:
        """sources: the local tensors that this rank holds, by name. Reads once all that is quantised. Raises
        LayoutError where this rank was not given a type of the user's own that it needs, and for a target
        that it has on several devices."""
        self._rank = rank
        self._made = [each for each in made if rank in each.parts]
        for each in self._made:
            devices = sorted({str(sources[part.source].device) for part in each.parts[rank]})
            if len(devices) > 1:
                raise LayoutError(
                    f"{each.name!r} is made of tensors on {' and '.join(devices)}, which quantize= cannot "
                    "join; put all of them on one"
                )
        self._own = {
            each.name: quantizing.own(each.name, each.scheme) for each in self._made if each.scheme.own
        }
        self._amax: dict[str, list[torch.Tensor]] = {}  # by name, of each part
        self._tensor_amax: dict[str, float] = {}
        self._missing: dict[str, torch.Tensor] = {}
        self._results: dict[str, torch.Tensor] = {}  # of functions of the user, by the names of moves
        self.sent: dict[str, torch.Tensor] = {}  # to the other holders
        self.arriving: dict[str, torch.Tensor] = {}
        for each in self._made:
            if not each.scheme.own:
                self._measure(each, sources)
            if max(each.cell) > 1:
                self._lend(each, sources)

    def _lend(self, made: Quantized, sources: Mapping[str, torch.Tensor]) -> None:
        """Copies what other ranks need for cells whose first element they have, in float32."""
        parts, lent = made.parts[self._rank], made.lent.get(self._rank, ())
        columns = [_columns(box, parts, sources).reshape(-1) for box in lent]
        self.sent[made.names.missing] = torch.cat([_floats(0), *columns])
        self.arriving[made.names.missing] = _floats(sum(_sizes(made.missing.get(self._rank, ()))))

    def _measure(self, made: Quantized, sources: Mapping[str, torch.Tensor]) -> None:
        names, parts = made.names, made.parts[self._rank]
        boxes = [block_box(part.box, made.block) for part in parts]
        flat = _floats(sum(_sizes(boxes)))
        amax = self._amax[made.name] = list(flat.split(_sizes(boxes)))
        for part, found in zip(parts, amax, strict=True):
            amax_of(_view(part, sources), [low for low, _ in part.box], made.block, found)
        if made.fetched:
            self.sent[names.amax] = flat
            self.arriving[names.amax] = _floats(
                sum(_sizes(box for _, box in made.fetched.get(self._rank, ())))
            )
        if made.scheme.kind == "nvfp4":
            most: dict[int, torch.Tensor] = {}
            for part, found in zip(parts, amax, strict=True):
                most[made.numbers[part.box]] = found.max()
            self.sent[names.parts] = torch.stack([most[at] for at in sorted(most)])
            self.arriving[names.parts] = _floats(len(made.numbers))

    def settle(self, sources: Mapping[str, torch.Tensor]) -> None:
        """Makes the magnitudes those of the whole tensors, once what the other holders sent has arrived, and
        calls functions of the user. sources: as in the constructor. Raises LayoutError for values of which no
        scale can be made, and for what a function does wrong."""
        for made in self._made:
            if max(made.cell) > 1:
                self._missing[made.name] = self.arriving[made.names.missing]
            if made.scheme.own:
                self._results.update(self._called(made, sources))
                continue
            names, parts, amax = made.names, made.parts[self._rank], self._amax[made.name]
            boxes = [block_box(part.box, made.block) for part in parts]
            own = [each.clone().reshape(extents(box)) for each, box in zip(amax, boxes, strict=True)]
            others = list(zip(boxes, own, strict=True)) if len(parts) > 1 else []
            fetched = [box for _, box in made.fetched.get(self._rank, ())]
            if fetched:
                found = self.arriving[names.amax].split(_sizes(fetched))
                others += [
                    (box, each.reshape(extents(box))) for box, each in zip(fetched, found, strict=True)
                ]
            for box, mine in zip(boxes, amax, strict=True):
                for other, theirs in others:
                    both = common(box, other)
                    if both is not None:
                        place = _inside(mine.reshape(extents(box)), box, both)
                        torch.maximum(place, _inside(theirs, other, both), out=place)
            if made.scheme.kind == "nvfp4":
                whole = self.arriving[names.parts] if len(made.numbers) > 1 else self.sent[names.parts]
                self._tensor_amax[made.name] = float(whole.max())
            self._check(made, boxes)
        self.sent, self.arriving = {}, {}

    def _check(self, made: Quantized, boxes: Sequence[Box]) -> None:
        for box, amax in zip(boxes, self._amax[made.name], strict=True):
            if not math.isfinite(float(amax.max())):
                at = int((~amax.isfinite()).nonzero()[0])
                index = torch.unravel_index(torch.tensor(at), extents(box))
                begins = [(low + int(i)) * by for (low, _), i, by in zip(box, index, made.block, strict=True)]
                raise LayoutError(
                    f"{made.name!r} has a value that is not finite in the block of {made.block} at "
                    f"{tuple(begins)}: its scale as {made.scheme.text} would overflow; make the weights "
                    "finite, or send them without quantize="
                )

    def _called(self, made: Quantized, sources: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Calls the user's function for the blocks that are this rank's to make."""
        kind, scheme = self._own[made.name], made.scheme
        wholes = [_whole(part.box, made.cell, made.shape) for part in made.parts[self._rank]]
        counts = [
            _sizes(_stored(box, scheme.packed) for box in wholes),
            *[_sizes(block_box(box, made.block) for box in wholes)] * len(scheme.scales),
        ]
        dtypes = (scheme.values, *scheme.scales)
        device = _device(made, self._rank, sources)
        results = [fresh((sum(each),), dtype, device) for each, dtype in zip(counts, dtypes, strict=True)]
        room = zip(*(flat.split(each) for flat, each in zip(results, counts, strict=True)), strict=True)
        for part, outs in zip(made.parts[self._rank], room, strict=True):
            box, view = self._whole_cells(made, part.box, _view(part, sources))
            if 0 not in extents(box):
                for out, found in zip(
                    outs, kind.made(made.name, view.to(made.dtype).contiguous()), strict=True
                ):
                    out.view(found.shape).copy_(found)
        return dict(zip(made.names.results, results, strict=True))

    def staged(self, wanted: Collection[str], sources: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns those of the wanted values and scales that are made here, by name. sources: as in the
        constructor."""
        found: dict[str, torch.Tensor] = {}
        for made in self._made:
            names = made.names.results
            if made.scheme.own:  # all moves of a target are in one batch
                found.update({name: self._results.pop(name) for name in names if name in wanted})
                continue
            if names[0] in wanted:
                found[names[0]] = self._values(made, sources)
            if names[1] in wanted:
                found[names[1]] = self._scales(made).to(_device(made, self._rank, sources))
            if names[-1] in wanted and made.scheme.kind == "nvfp4":
                scale = tensor_scale_of(self._tensor_amax[made.name])
                found[names[-1]] = _floats().fill_(scale).to(_device(made, self._rank, sources))
        return found

    def _values(self, made: Quantized, sources: Mapping[str, torch.Tensor]) -> torch.Tensor:
        parts, scheme = made.parts[self._rank], made.scheme
        sizes = _sizes(_stored(_whole(part.box, made.cell, made.shape), scheme.packed) for part in parts)
        values = fresh((sum(sizes),), scheme.values, _device(made, self._rank, sources))
        for part, amax, out in zip(parts, self._amax[made.name], values.split(sizes), strict=True):
            box, view = self._whole_cells(made, part.box, _view(part, sources))
            if box != part.box and 0 not in extents(box):
                blocks, fewer = block_box(part.box, made.block), block_box(box, made.block)
                amax = _inside(amax.reshape(extents(blocks)), blocks, fewer).contiguous()
            low = [first for first, _ in box]
            values_of(scheme, view, low, made.block, amax, self._tensor_amax.get(made.name, 0.0), out)
        return values

    def _whole_cells(self, made: Quantized, box: Box, view: torch.Tensor) -> tuple[Box, torch.Tensor]:
        """The cells whose first element is in a part, which is a box, with what other parts have of them."""
        whole = _whole(box, made.cell, made.shape)
        if whole == box:
            return whole, view
        found = torch.empty(extents(whole), dtype=made.dtype, device=view.device)
        inside = common(box, whole)
        if inside is not None:
            _inside(found, whole, inside).copy_(_inside(view, box, inside))
        boxes = made.missing.get(self._rank, ())
        for other, values in zip(boxes, self._missing[made.name].split(_sizes(boxes)), strict=True):
            both = common(other, whole)
            if both is not None:
                _inside(found, whole, both).copy_(_inside(values.reshape(extents(other)), other, both))
        return whole, found

    def _scales(self, made: Quantized) -> torch.Tensor:
        boxes, scheme = made.blocks[self._rank], made.scheme
        found = fresh((sum(_sizes(boxes)),), scheme.scales[0])
        left = list(zip(boxes, found.split(_sizes(boxes)), strict=True))
        for part, amax in zip(made.parts[self._rank], self._amax[made.name], strict=True):
            blocks = block_box(part.box, made.block)
            for box, out in [each for each in left if common(each[0], blocks) == each[0]]:
                mine = _inside(amax.reshape(extents(blocks)), blocks, box).contiguous()
                scales_of(scheme, mine, self._tensor_amax.get(made.name, 0.0), out)
            left = [each for each in left if common(each[0], blocks) != each[0]]
        return found


def _device(made: Quantized, rank: int, sources: Mapping[str, torch.Tensor]) -> torch.device:
    """The device of what a rank holds of a target."""
    return sources[made.parts[rank][0].source].device


def _view(part: Part, sources: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return piece_view(sources[part.source], part.piece).resolve_neg()


def _inside(tensor: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """The part of a tensor that holds a box."""
    for dim, ((low, _), (begin, end)) in enumerate(zip(box, part, strict=True)):
        tensor = tensor.narrow(dim, begin - low, end - begin)
    return tensor


def _floats(*shape: int) -> torch.Tensor:
    return fresh(shape, torch.float32)


def _columns(box: Box, parts: Sequence[Part], sources: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A box that the parts have together, in float32."""
    found = _floats(*extents(box))
    for part in parts:
        both = common(part.box, box)
        if both is not None:
            _inside(found, box, both).copy_(_inside(_view(part, sources), part.box, both))
    return found
