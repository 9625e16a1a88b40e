"""Versions that travel as their changes since the one before: `WeightSync(delta=True)`.

A box that the same ranks want has one holder. It compares the box with what it sent last, and keeps that. The
boxes with one holder and the same receivers are a flow: their changes are one stream of bytes
(csrc/core/memory/changes.h), and all streams are one tensor of one dimension, planned as any other. The sizes
of a plan are fixed, so that streams have some room in it. It is made again where they need more, or much
less.

A receiver makes the version of the one that it has. Where it lacks that, or has changed it, all ranks send
this version whole.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..base.boxes import Box, HeldBoxes, Piece, extents, piece_view
from ..layout import Layout
from ..planning.plan import Problem
from ..transfers.medium import STREAM_HEAD, Ends, apply_changes, encode_changes, fresh, keep_boxes
from ..transfers.transfer import Call, PlanOptions
from .state_arguments import StateCall
from .state_batches import Batch, Digests, Known, batches_of, pieces_inside, torn, traveling
from .state_entries import Agreed, Move, Target, local_of, recorded_name
from .state_quantize import Near

if TYPE_CHECKING:
    from ..groups.parent import ParentGroup

__all__ = ["Arrived", "Delta", "DeltaPlan", "Earlier"]

NONE = -1  # no version
_ANY = -2  # a rank that neither compares nor receives
_SPARE = 8  # a stream gets room for one part in so many more
_LEAST = (16, 1024)  # and for at least one part in 16 of its boxes, up to 1 KiB
_WASTE = 1.25  # room over what is needed, above which the plan is made again
_ALIGNED = 16  # bytes
_PLANS = 4  # that are kept
_SIZES = (1, 2, 4, 8)  # of elements that are compared
_NAME = "changes"  # of the tensor of all streams, in a batch of its own


class Flow(NamedTuple):
    """Boxes of one holder for the same receivers, each with the number of its move, and their bytes."""

    source: int
    receivers: tuple[int, ...]
    boxes: tuple[tuple[int, Box], ...]
    nbytes: int

    @property
    def most(self) -> int:
        """Bytes of its stream where everything has changed."""
        return self.nbytes + STREAM_HEAD * len(self.boxes)

    def room(self, need: int) -> int:
        """Bytes that a stream of `need` bytes gets in a plan."""
        part, least = _LEAST
        room = need + need // _SPARE + min(least, self.nbytes // part)
        return min(self.most, -(-room // _ALIGNED) * _ALIGNED)


@lru_cache(maxsize=256)
def _meetings(problem: Problem) -> tuple[tuple[Box, tuple[int, ...], tuple[int, ...]], ...]:
    """The boxes that have the same holders and the same receivers everywhere, with these."""
    shape, _, src, dst = problem
    held = [(box, ranks) for box, ranks in src._core(shape).tiles(shape) if 0 not in extents(box)]
    near = Near([box for box, _ in held]) if shape else None
    found = []
    for box, ranks in dst._core(shape).tiles(shape):
        meeting = [(0, box)] if near is None else near.meeting(box)
        receivers = tuple(dict.fromkeys(ranks))
        found += [(both, tuple(dict.fromkeys(held[at][1])), receivers) for at, both in meeting]
    return tuple(found)


@lru_cache(maxsize=256)
def _pieces(layout: Layout, shape: tuple[int, ...], rank: int) -> tuple[Piece, ...]:
    return layout.pieces(shape)[rank][1]


def _why_not(target: Target) -> str:
    """Why a target travels whole; "" where it can travel as changes."""
    for move in target.moves:
        if move.reduces or move.problem.src.has_partial:
            return "is reduced on the way"
        if move.device_types != ("cpu", "cpu") or move.through_host:
            return "is on a GPU"
        if move.problem.dtype != target.dtype:
            return "is cast where it arrives"
        if target.dtype.itemsize not in _SIZES:
            return f"has elements of {target.dtype.itemsize} bytes"
    return ""


class DeltaPlan:
    """The changes of one kind of call: which rank compares what for which receivers. The same on all ranks,
    apart from `_sent`, `_placed` and `_own`, which are those of this one.

    flows: those of one source have numbers that follow each other. left: targets that travel whole, each with
    the reason."""

    def __init__(self, agreed: Agreed, rank: int) -> None:
        self._rank = rank
        travel = {name: target for name, target in agreed.targets.items() if target.moves}
        whys = {name: _why_not(target) for name, target in travel.items()}
        self.left = {name: why for name, why in whys.items() if why}
        self.targets = [target for name, target in travel.items() if name not in self.left]
        self.moves = [move for target in self.targets for move in target.moves]
        self._rest = [travel[name] for name in self.left]
        self._rest_batches: list[Batch] | None = None
        self._batches: OrderedDict[tuple[int, ...], Batch] = OrderedDict()
        self._room: tuple[int, ...] = ()
        own: list[tuple[int, Box]] = []
        self.flows = self._make_flows(own)
        self._own = [(at, self._source_piece(at, box), self._places(at, box)) for at, box in own]
        self.sends = [number for number, flow in enumerate(self.flows) if flow.source == rank]
        self._sent = {
            number: [(at, self._source_piece(at, box)) for at, box in self.flows[number].boxes]
            for number in self.sends
        }
        self._placed = {
            number: [(at, self._places(at, box)) for at, box in flow.boxes]
            for number, flow in enumerate(self.flows)
            if rank in flow.receivers
        }
        self.width = max(Counter(flow.source for flow in self.flows).values(), default=0)
        self.nbytes_whole = sum(flow.nbytes for flow in self.flows)
        self.nbytes_left = sum(traveling(move) for target in self._rest for move in target.moves)

    @property
    def receives(self) -> bool:
        return any(self._rank in move.problem.dst.ranks for move in self.moves)

    @property
    def nbytes(self) -> int:
        """The approximate number of bytes that are kept for it, without the values."""
        boxes = sum(len(flow.boxes) for flow in self.flows)
        made = [*self._batches.values(), *(self._rest_batches or ())]
        return boxes * 400 + sum(batch.nbytes for batch in made)

    def _make_flows(self, own: list[tuple[int, Box]]) -> list[Flow]:
        """own: gets the boxes that this rank receives and holds itself. Of the holders of a box, the one that
        has least to compare so far compares it."""
        load: Counter[int] = Counter()
        found: dict[tuple[int, tuple[int, ...]], list[tuple[int, Box]]] = {}
        for at, move in enumerate(self.moves):
            for box, holders, receivers in _meetings(move.problem):
                if self._rank in holders and self._rank in receivers:
                    own.append((at, box))
                others = tuple(rank for rank in receivers if rank not in holders)
                if others:
                    source = min(holders, key=lambda rank: (load[rank], rank))
                    load[source] += math.prod(extents(box)) * move.problem.dtype.itemsize
                    found.setdefault((source, others), []).append((at, box))
        return [
            Flow(
                source,
                receivers,
                tuple(boxes),
                sum(math.prod(extents(box)) * self.moves[at].problem.dtype.itemsize for at, box in boxes),
            )
            for (source, receivers), boxes in sorted(found.items())
        ]

    def _source_piece(self, at: int, box: Box) -> Piece:
        """The place of a box in what this rank holds."""
        shape, _, src, _ = self.moves[at].problem
        return _whole(pieces_inside(_pieces(src, shape, self._rank), box), box)[0]

    def _places(self, at: int, box: Box) -> list[Piece]:
        """The places in which this rank receives a box; a loader may have made several."""
        shape, _, _, dst = self.moves[at].problem
        return _whole(pieces_inside(_pieces(dst, shape, self._rank), box), box)

    def rooms(self, needs: Sequence[int]) -> tuple[int, ...]:
        """The bytes of the streams in the plan, by flow: those of the last time, if they fit."""
        made = tuple(flow.room(need) for flow, need in zip(self.flows, needs, strict=True))
        last = self._room
        fits = bool(last) and all(need <= room for need, room in zip(needs, last, strict=True))
        if not fits or sum(last) > _WASTE * sum(made):
            self._room = made
        return self._room

    def batch(self, parent: ParentGroup, rooms: tuple[int, ...], options: PlanOptions) -> Batch:
        """The transfer of all streams, made at the first call with these rooms."""
        found = self._batches.pop(rooms, None) or self._batch(parent, rooms, options)
        self._batches[rooms] = found
        while len(self._batches) > _PLANS:
            self._batches.popitem(last=False)
        return found

    def _batch(self, parent: ParentGroup, rooms: tuple[int, ...], options: PlanOptions) -> Batch:
        sources: dict[int, list[tuple[Box, int]]] = {}  # boxes of all streams, and where they lie
        receivers: dict[int, list[tuple[Box, int]]] = {}
        sent: Counter[int] = Counter()
        arrived: Counter[int] = Counter()
        begin = 0
        for flow, room in zip(self.flows, rooms, strict=True):
            box = ((begin, begin + room),)
            begin += room
            sources.setdefault(flow.source, []).append((box, sent[flow.source]))
            sent[flow.source] += flow.most
            for rank in flow.receivers:
                receivers.setdefault(rank, []).append((box, arrived[rank]))
                arrived[rank] += room
        problem = Problem((begin,), torch.uint8, _flat(sources, sent), _flat(receivers, arrived))
        move = Move(_NAME, _NAME, problem, Ends(torch.uint8, torch.uint8), ("cpu", "cpu"))
        return Batch(parent, [move], options, {})

    def rest(self, parent: ParentGroup, call: StateCall, options: PlanOptions) -> list[Batch]:
        """The batches of targets that travel whole."""
        if self._rest_batches is None:
            limit = call.side.options.max_bytes_in_flight
            self._rest_batches = batches_of(parent, self._rest, limit, options, call.tensors)
        return self._rest_batches

    def views(self, number: int, sources: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The boxes of a flow that this rank sends, as they travel."""
        return [self._view(at, piece, sources) for at, piece in self._sent[number]]

    def _view(self, at: int, piece: Piece, sources: Mapping[str, torch.Tensor]) -> torch.Tensor:
        move = self.moves[at]
        view = piece_view(sources[move.source], piece)
        return view.to(move.problem.dtype).resolve_conj().resolve_neg()

    def places(self, number: int, arriving: Mapping[str, torch.Tensor]) -> list[list[torch.Tensor]]:
        """The places of the boxes of a flow that this rank receives."""
        return [
            [piece_view(arriving[self.moves[at].target], piece) for piece in pieces]
            for at, pieces in self._placed[number]
        ]

    def copy_own(self, sources: Mapping[str, torch.Tensor], arriving: Mapping[str, torch.Tensor]) -> None:
        """Copies the boxes that this rank holds itself."""
        for at, held, places in self._own:
            for piece in places:
                piece_view(arriving[self.moves[at].target], piece).copy_(self._view(at, held, sources))

    def received(self) -> list[int]:
        """The flows that this rank receives."""
        return list(self._placed)


def _whole(found: list[Piece], box: Box) -> list[Piece]:
    assert found and all(piece[0] == box for piece in found)  # tiles are parts of pieces
    return found


def _flat(boxes: Mapping[int, Sequence[tuple[Box, int]]], sizes: Mapping[int, int]) -> Layout:
    """The layout of boxes of one dimension that lie anywhere in tensors of these sizes, by rank."""
    held: list[HeldBoxes] = [
        ((sizes[rank],), tuple((box, (at,), (), ()) for box, at in boxes[rank] if box[0][0] < box[0][1]))
        for rank in sorted(boxes)
    ]
    return Layout._of_held(sorted(boxes), tuple(held), 1)


class Arrived(NamedTuple):
    """A version as it arrived on this rank: its number and kind, and what it arrived in, by target, each with
    its number of changes in place."""

    version: int
    known: Known
    tensors: dict[str, tuple[torch.Tensor, int]]

    def intact(self, known: Known, call: StateCall) -> int:
        """Returns its number; NONE where it was changed since, or the call is of another kind or has other
        outputs."""
        if self.known is not known:  # the numbers of each kind grow, and two kinds may have one number
            return NONE
        if any(tensor._version != seen for tensor, seen in self.tensors.values()):
            return NONE
        into = {name: local_of(out) for name, out in call.outs.items()}
        into |= {recorded_name(name): x for name, x in call.memory.items()}
        for name, tensor in into.items():
            if name in self.tensors and not _one_memory(self.tensors[name][0], tensor):
                return NONE
        return self.version


def _one_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    places = ((x.data_ptr(), x.shape, x.stride(), x.is_conj(), x.is_neg()) for x in (a, b))
    return next(places) == next(places)


@dataclass
class Earlier:
    """The state of a rank between pushes: of a source, the version that its values hold, by flow; of a
    receiver, `base`, its newest whole version. arrived: the version of this call, once it is whole. ratio,
    whole: as in WeightStats."""

    known: Known | None = None
    version: int = NONE
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    base: Arrived | None = None
    arrived: Arrived | None = None
    ratio: float = 1.0
    whole: str = ""
    spoilt: bool = False

    def forget(self) -> None:
        """The values are no version any longer."""
        self.version, self.arrived, self.ratio, self.whole = NONE, None, 1.0, ""
        self.spoilt = False

    def delta(self, known: Known, rank: int, call: StateCall) -> Delta:
        """Returns the next version, of which nothing has been compared."""
        if known.delta is None:
            known.delta = DeltaPlan(known.agreed, rank)
        return Delta(known, call, self)

    def keep(self, known: Known, version: int, arriving: Mapping[str, torch.Tensor]) -> None:
        """The version of this call is whole."""
        self.version = version
        names = [] if known.delta is None else [target.name for target in known.delta.targets]
        tensors = {name: arriving[name] for name in names if name in arriving}
        if not self.spoilt and not any(tensor.is_inference() for tensor in tensors.values()):
            # Of a tensor that is given other memory by `x.data = y`, which counts no change, this is the old.
            self.arrived = Arrived(version, known, {n: (x.detach(), x._version) for n, x in tensors.items()})


class Delta:
    """One version on this rank, which travels as changes if all ranks can do that."""

    def __init__(self, known: Known, call: StateCall, earlier: Earlier) -> None:
        self._plan: DeltaPlan = known.delta
        self._known, self._call, self._earlier = known, call, earlier
        self._streams = fresh((0,), torch.uint8)  # with the most that each may have
        self._needs: list[int] = []  # of the streams of all ranks, by flow, and what they get
        self._rooms: tuple[int, ...] = ()
        self._base = earlier.base
        self.batch: Batch | None = None
        self._landing = self._streams

    @property
    def row_length(self) -> int:
        return 1 + self._plan.width

    def compare(self) -> list[int]:
        """Finds what has changed, and keeps this version. Returns the version before that this rank has, and
        how many bytes the changes of each of its flows take."""
        plan, earlier, call = self._plan, self._earlier, self._call
        has: set[int] = set()
        if plan.sends:
            has.add(earlier.version if earlier.known is self._known else NONE)
        if plan.receives:
            base = self._base
            has.add(NONE if base is None else base.intact(self._known, call))
        version = _ANY if not has else has.pop() if len(has) == 1 else NONE
        earlier.known = self._known
        earlier.forget()
        sources, needs = call.sent(()), []
        if plan.sends and version == NONE:
            earlier.values.clear()
            for number in plan.sends:
                values = earlier.values[number] = fresh((plan.flows[number].nbytes,), torch.uint8)
                keep_boxes(plan.views(number, sources), values)
        elif plan.sends:
            sizes = [plan.flows[number].most for number in plan.sends]
            self._streams = fresh((sum(sizes),), torch.uint8)
            needs = [
                encode_changes(plan.views(number, sources), earlier.values[number], stream)
                for number, stream in zip(plan.sends, self._streams.split(sizes), strict=True)
            ]
        return [version, *needs, *[0] * (plan.width - len(needs))]

    def settle(self, rows: Mapping[int, Sequence[int]]) -> bool:
        """Returns whether this version travels as changes. rows: of compare(), by rank."""
        plan, earlier = self._plan, self._earlier
        earlier.whole = self._why_whole(rows)
        if earlier.whole:
            return False
        total = plan.nbytes_whole + plan.nbytes_left
        earlier.ratio = (sum(self._rooms) + plan.nbytes_left) / total if total else 1.0
        if plan.left:
            name, why = next(iter(plan.left.items()))
            more = f", and {len(plan.left) - 1} more" if len(plan.left) > 1 else ""
            earlier.whole = f"{name!r}, which {why}{more}"
        return True

    def _why_whole(self, rows: Mapping[int, Sequence[int]]) -> str:
        plan = self._plan
        if not plan.flows:
            name, why = next(iter(plan.left.items()), ("", ""))
            return f"all tensors: {name!r} {why}" if name else "nothing travels between ranks"
        said = {rank: row[0] for rank, row in rows.items() if row[0] != _ANY}
        newest = max(said.values())
        lacking = [rank for rank, version in said.items() if version != newest or version == NONE]
        if lacking:
            return f"all tensors: rank {lacking[0]} does not have the version before, or has changed it"
        seen: Counter[int] = Counter()
        for flow in plan.flows:
            self._needs.append(rows[flow.source][1 + seen[flow.source]])
            seen[flow.source] += 1
        if any(self._needs):
            self._rooms = plan.rooms(self._needs)
        if sum(self._rooms) >= plan.nbytes_whole:
            return "all tensors: their changes are no smaller"
        limit = self._call.side.options.max_bytes_in_flight
        if limit is not None and sum(self._rooms) > limit:
            return "all tensors: their changes are more than max_bytes_in_flight"
        return ""

    def batches(self, parent: ParentGroup) -> list[Batch]:
        """The transfers: of the changes, if there are any, and of what travels whole."""
        terms = self._call.side.options
        options = PlanOptions(terms.strategy, self._call.topology)
        rest = self._plan.rest(parent, self._call, options)
        if not self._rooms:
            return rest
        self.batch = self._plan.batch(parent, self._rooms, options)
        return [self.batch, *rest]

    def run(self, deadline: float) -> list[Call]:
        """Moves the changes."""
        plan = self._plan
        assert self.batch is not None
        self._landing = fresh((sum(self._rooms[number] for number in plan.received()),), torch.uint8)
        at = 0
        for number in plan.sends:
            self._streams[at + self._needs[number] : at + self._rooms[number]].zero_()
            at += plan.flows[number].most
        return self.batch.run({_NAME: self._streams}, {_NAME: self._landing}, deadline, None)

    def finish(
        self,
        sources: Mapping[str, torch.Tensor],
        arriving: Mapping[str, torch.Tensor],
        digests: Digests | None,
    ) -> None:
        """Makes this version of the one before, in what targets arrive in."""
        plan, base = self._plan, self._base
        copied = {}
        for name, (tensor, seen) in {} if base is None else base.tensors.items():
            if not _one_memory(tensor, arriving[name]):
                arriving[name].copy_(tensor)
                copied[name] = tensor, seen
        plan.copy_own(sources, arriving)
        if self._rooms:
            sizes = [self._rooms[number] for number in plan.received()]
            for number, stream in zip(plan.received(), self._landing.split(sizes), strict=True):
                if self._needs[number]:
                    apply_changes(stream[: self._needs[number]], plan.places(number, arriving))
        if digests is not None:
            self._observe(digests, sources, arriving)
        for name, (tensor, seen) in copied.items():  # since compare(), by a user of what is served
            if tensor._version != seen:
                raise torn(
                    f"{name!r} of the version before was changed in place while this one was made of it; let "
                    "the push return first"
                )

    def _observe(
        self, digests: Digests, sources: Mapping[str, torch.Tensor], arriving: Mapping[str, torch.Tensor]
    ) -> None:
        for move in self._plan.moves:
            if self._plan._rank in move.problem.src.ranks:
                digests.observe(move, "src", sources[move.source])
            if self._plan._rank in move.problem.dst.ranks:
                digests.observe(move, "dst", arriving[move.target])
