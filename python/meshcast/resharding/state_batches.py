"""The transfers of reshard_state_dict: moves in batches, compiled once and run one after the other. Compiled
calls are kept for later ones, limited by the memory that they take; digests say that what arrived is what
was sent.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..base import checks
from ..base.boxes import Piece
from ..errors import DeadlineExceededError, MeshcastError, mark_told
from ..groups.parent import ParentGroup
from ..layout import Box, Layout
from ..planning.plan import Problem
from ..transfers.digest import added, pieces_digest, shard_digest
from ..transfers.medium import Casts, DeviceTypes, Ends, ends_of, require_gpu
from ..transfers.transfer import Call, PersistentTransfer, PlanOptions, new_transfer, ranks_of
from .compiled import Reduction, check_reducible, reduced_layout, reduction_inside, wire_dtype
from .meshes import Source, ranks_text
from .state_arguments import StateCall
from .state_entries import OP, mismatch
from .state_moves import Agreed, Move, Origin

__all__ = [
    "Batch",
    "Digests",
    "Kept",
    "Known",
    "Part",
    "check_twins",
    "check_whole",
    "compile_batches",
    "torn",
]


_PAUSE = 0.0002  # seconds between two looks at whether a GPU is through
# Bytes that a compiled plan takes, about: for each tensor what Python keeps of it, for each box of each task
# and message what C++ does.
_PER_TENSOR, _PER_TASK, _PER_PIECE, _PER_HOP = 4000, 400, 400, 60

Observer = Callable[["Part", str, torch.Tensor], None]


@dataclass(frozen=True)
class Part:
    """A move on this rank. number: its position among all moves; problem: as it travels; ends: what the
    transfer is given and fills; reduction: of the source, before it travels."""

    number: int
    move: Move
    problem: Problem
    ends: Ends
    reduction: Reduction | None
    sends: bool
    receives: bool


class Batch:
    """Moves that travel together, at one pair of places. transfer is None on a rank that takes no part."""

    def __init__(
        self, parent: ParentGroup, parts: Sequence[Part], options: PlanOptions, device_types: DeviceTypes
    ) -> None:
        self.parts = parts
        self._device_types = device_types
        self._transfer: PersistentTransfer | None = None
        self._rank = parent.rank
        self._call: Call | None = None  # since wait_for_turn(), what was started
        problems = [part.problem for part in parts]
        if any(part.sends or part.receives for part in parts):
            casts = None
            if any(part.ends.source != part.ends.destination for part in parts):
                casts = Casts(tuple(part.ends for part in parts))
            self._transfer = new_transfer(
                parent, problems, OP, options, device_types=device_types, casts=casts
            )
        else:
            parent.private(ranks_of(problems), OP)  # the ranks must exist here as well

    @property
    def nbytes(self) -> int:
        """The approximate number of bytes that are kept for it."""
        plan = None if self._transfer is None else self._transfer._plan
        size = len(self.parts) * _PER_TENSOR
        if plan is not None:
            core = plan._core
            size += core.num_tasks * _PER_TASK + core.num_pieces * _PER_PIECE + core.num_hops * _PER_HOP
        return size

    def bound(self) -> float:
        """Seconds that no plan of it can beat."""
        return 0.0 if self._transfer is None else self._transfer.plan.lower_bound

    def wait_for_turn(self) -> None:
        """Nothing of the next run has moved."""
        self._call = None

    def progress(self) -> tuple[int, int]:
        """Bytes that this rank has sent and received of it, and how many it will, as far as that is known:
        the first run plans once the ranks have met. Any thread."""
        plan = None if self._transfer is None else self._transfer._plan
        if plan is None:
            return 0, 0
        call = self._call
        figures = None if call is None else call.figures()
        expected = plan.bytes_sent(self._rank) + plan.bytes_received(self._rank)
        return 0 if figures is None else int(figures["bytes_done"]), expected

    def refuse(self, error: Exception, limit: float) -> None:
        """Tells the other ranks that this one does not run it. limit: seconds."""
        if self._transfer is not None:
            self._transfer._group.refuse(0, error, limit)

    def run(
        self,
        sent: Mapping[str, torch.Tensor],
        arriving: Mapping[str, torch.Tensor],
        deadline: float,
        observe: Observer | None,
    ) -> Call | None:
        """Moves what this rank sends, from `sent` by source, into the local tensors `arriving` by target."""
        sources: list[torch.Tensor | None] = []
        targets: list[torch.Tensor | None] = []
        outgoing: dict[tuple[str, Ends], torch.Tensor] = {}
        landing: dict[str, torch.Tensor] = {}
        for part in self.parts:
            source = target = None
            if part.sends:
                key = (part.move.source, part.ends)
                if key not in outgoing:
                    outgoing[key] = _outgoing(part, sent[part.move.source])
                source = outgoing[key]
            if part.receives:
                name = part.move.target
                local = arriving[name]
                if part.ends.destination != local.dtype or (part.move.through_host and local.is_cuda):
                    if name not in landing:
                        device = "cpu" if part.move.through_host else local.device
                        landing[name] = torch.empty(local.shape, dtype=part.ends.destination, device=device)
                    local = landing[name]
                target = local
            sources.append(source)
            targets.append(target)
        call = None
        if self._transfer is not None:
            left = max(deadline - time.monotonic(), 1e-3)
            call = self._call = self._transfer.launch(sources, targets, left, driven=True)
        try:
            try:  # beside the transfer, which reads the same memory
                self._observe(observe, "src", sources)
            finally:
                if call is not None:
                    call.wait()
            if call is not None and self._device_types != ("cpu", "cpu"):
                _end_on_gpu(call, deadline)
            self._observe(observe, "dst", targets)
            for name, local in landing.items():
                arriving[name].copy_(local)
        except Exception as error:
            mark_told(error)  # the others are in this call, or have completed it
            raise
        return call

    def _observe(self, observe: Observer | None, side: str, tensors: Sequence[torch.Tensor | None]) -> None:
        for part, tensor in zip(self.parts, tensors, strict=True):
            if observe is not None and tensor is not None:
                observe(part, side, tensor)


def _outgoing(part: Part, local: torch.Tensor) -> torch.Tensor:
    """This rank's shard of the source as the transfer is given it."""
    if part.reduction is not None:
        local = part.reduction.run(local)
    if part.move.through_host:
        local = local.cpu()
    return local if local.dtype == part.ends.source else local.to(part.ends.source)


def _end_on_gpu(call: Call, deadline: float) -> None:
    """Blocks until the GPU is through as well: what fails there must be known before any rank returns."""
    begin = time.monotonic()
    while not call.is_completed():
        if time.monotonic() >= deadline:
            raise DeadlineExceededError(
                f"{OP}: the GPU had not finished with what arrived by the limit of the call",
                op=OP,
                phase="transfer",
                elapsed=time.monotonic() - begin,
            )
        time.sleep(_PAUSE)
    call.wait()  # raises what failed meanwhile


def compile_batches(parent: ParentGroup, agreed: Agreed, call: StateCall) -> list[Batch]:
    """Batches of at most max_bytes_in_flight, in the order of the targets. All moves of a target are in
    one."""
    limit = call.options["max_bytes_in_flight"]
    options = PlanOptions(call.options["strategy"], call.topology)
    groups: list[tuple[list[Part], int]] = []
    number = 0
    for target in agreed.targets.values():
        parts = []
        for move in target.moves:
            parts.append(_part(parent.rank, number, move, call))
            number += 1
        if not parts:
            continue
        size = sum(_traveling(part) for part in parts)
        types = parts[0].move.device_types
        joins = bool(groups) and groups[-1][0][-1].move.device_types == types
        if joins and (limit is None or groups[-1][1] + size <= limit):
            groups[-1][0].extend(parts)
            groups[-1] = (groups[-1][0], groups[-1][1] + size)
        else:
            groups.append((parts, size))
    return [Batch(parent, parts, options, parts[0].move.device_types) for parts, _ in groups]


def _traveling(part: Part) -> int:
    """Bytes of what the destination wants of a source, once."""
    shape, dtype, _, dst = part.problem
    if not dst.by_boxes:
        return checks.total_bytes(shape, dtype)
    tiles = dst._core(shape).tiles(shape)
    return sum(checks.total_bytes([hi - lo for lo, hi in box], dtype) for box, _ in tiles)


def _part(rank: int, number: int, move: Move, call: StateCall) -> Part:
    # A digest of values that are reduced on the way could not be taken at their source.
    source = Source(move.shape, move.dtype, move.src, None, reduce_first=call.options["digest"])
    src = move.src
    if src.has_partial:
        check_reducible(src, move.dtype, OP)
        if not source.reduced_on_the_way:
            src = reduced_layout(src)
    wire = wire_dtype(source, move.result_dtype)
    ends = ends_of(move.dtype, wire, move.result_dtype, move.device_types)
    sends, receives = rank in src.ranks, rank in move.dst.ranks
    for side, device in zip((sends, receives), move.device_types, strict=True):
        if side and device == "cuda":
            require_gpu(OP, copies_only=move.device_types != ("cuda", "cuda"))
    reduction = None
    if src is not move.src and sends:
        x = call.tensors[move.source]
        mesh, placements = x.device_mesh, x.placements  # type: ignore[attr-defined]  # Partial: a DTensor
        reduction = reduction_inside(mesh, Layout(mesh, placements), move.shape, move.dtype)
    return Part(number, move, Problem(move.shape, wire, src, move.dst), ends, reduction, sends, receives)


_MOST_BYTES = 256 << 20  # of a process group's kinds of call, as Batch.nbytes counts


@dataclass
class Known:
    """The compiled form of a kind of call. Calls of one number are of one kind on all ranks. values: entries
    that are no tensors, by the rank that told them last, as text."""

    number: int
    agreed: Agreed
    batches: list[Batch]
    values: dict[int, dict[str, Any]]
    parts: list[Part] = field(init=False)
    sources: list[str] = field(init=False)  # names of what travels, each once

    def __post_init__(self) -> None:
        self.parts = [part for batch in self.batches for part in batch.parts]
        self.sources = list(dict.fromkeys(part.move.source for part in self.parts))

    @property
    def nbytes(self) -> int:
        return sum(batch.nbytes for batch in self.batches)


class Kept:
    """Kinds of call; those that were used longest ago go first. One that alone is too large is kept until the
    next."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._known: OrderedDict[Any, tuple[Known, int]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Any) -> Known | None:
        found = self._known.get(key)
        if found is None:
            return None
        self._known.move_to_end(key)
        return found[0]

    def add(self, key: Any, known: Known) -> None:
        """Once it has run: before, nobody knows how large its plan is."""
        self._drop(key)
        self._known[key] = (known, known.nbytes)
        self._bytes += known.nbytes
        while self._bytes > self._most_bytes and len(self._known) > 1:
            self._drop(next(iter(self._known)))

    def _drop(self, key: Any) -> None:
        found = self._known.pop(key, None)
        if found is not None:
            self._bytes -= found[1]


_MODULUS = 1 << 64


class Digests:
    """This rank's digests of a call, by position of the move. Where a layout lists boxes, each element of the
    source counts as often as it is wanted: ranks may want boxes that overlap. "all": of all that this rank
    holds of a source by boxes, where another holds the same ones."""

    def __init__(self, rank: int, moves: int) -> None:
        self._rank = rank
        self._numbers = {"src": [0] * moves, "dst": [0] * moves, "all": [0] * moves}

    def observe(self, part: Part, side: str, local: torch.Tensor) -> None:
        """Takes the digest of a shard, of its values as they travel."""
        shape, dtype, src, dst = part.problem
        if not (src.by_boxes or dst.by_boxes):
            digest = shard_digest(local, src if side == "src" else dst, shape, self._rank, dtype)
        elif side == "dst":
            digest = pieces_digest(local, dst.pieces(shape)[self._rank][1], shape, dtype)
        else:
            own = src.pieces(shape)[self._rank][1]
            if any(self._rank in ranks and len(ranks) > 1 for ranks in _holders(src, shape).values()):
                self._note("all", part, pieces_digest(local, own, shape, dtype))
            digest = added(
                each
                for box, times in _counted(part.problem, self._rank)
                for each in [pieces_digest(local, _inside(own, box), shape, dtype)] * times
            )
        self._note(side, part, digest)

    def _note(self, side: str, part: Part, digest: int) -> None:
        self._numbers[side][part.number] = (digest + _MODULUS // 2) % _MODULUS - _MODULUS // 2

    def row(self) -> list[int]:
        return self._numbers["src"] + self._numbers["dst"] + self._numbers["all"]


def _holders(layout: Layout, shape: tuple[int, ...]) -> dict[tuple[Box, ...], list[int]]:
    """Ranks by what they hold; those with the same boxes hold copies."""
    found: dict[tuple[Box, ...], list[int]] = {}
    for rank, boxes in layout.shards(shape).items():
        if boxes:
            found.setdefault(tuple(sorted(boxes)), []).append(rank)
    return found


def _counted(problem: Problem, rank: int) -> list[tuple[Box, int]]:
    """The boxes of the source that this rank counts, being the first of their holders, and how many ranks
    want each."""
    shape, _, src, dst = problem
    wanted = dst._core(shape).tiles(shape)
    found = []
    for box, holders in src._core(shape).tiles(shape):
        if holders[0] == rank:
            for other, ranks in wanted:
                common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
                if all(low < high for low, high in common):
                    found.append((common, len(ranks)))
    return found


def _inside(pieces: Sequence[Piece], box: Box) -> list[Piece]:
    """The parts of pieces that are in a box."""
    found = []
    for own, at, axes, steps in pieces:
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(own, box, strict=True))
        if all(low < high for low, high in common):
            local = list(at)
            for dim, ((low, _), (begin, _)) in enumerate(zip(own, common, strict=True)):
                local[axes[dim] if axes else dim] += (begin - low) * (steps[dim] if steps else 1)
            found.append((common, tuple(local), axes, steps))
    return found


def check_whole(
    parts: Sequence[Part], changed: Sequence[str], rows: Mapping[int, list[int]], rank: int, digest: bool
) -> None:
    """Raises unless every holder's weights stayed as they were, and, with digests, arrived as they were.
    parts: by number. changed: names by the number that rows begin with, -1 where nothing changed."""
    for other, row in rows.items():
        if row[0] >= 0:
            raise torn(
                f"rank {other} changed {changed[row[0]]!r} in place while it travelled; let the call "
                "return before the next optimiser step",
                rank,
                other,
            )
    if not digest:
        return
    for number, part in enumerate(parts):
        name = part.move.source
        shape, _, src, dst = part.problem
        sent = {other: row[1 + number] for other, row in rows.items()}
        arrived = {other: row[1 + len(parts) + number] for other, row in rows.items()}
        if src.by_boxes:
            whole = {other: row[1 + 2 * len(parts) + number] for other, row in rows.items()}
            for owners in _holders(src, shape).values():
                for other in owners[1:]:
                    if whole[owners[0]] != whole[other]:
                        raise _unlike(name, owners[0], other, "source", rank)
        if src.by_boxes or dst.by_boxes:
            same = added(sent.values()) == added(arrived.values())
        else:
            same = _total(name, shape, src, "source", sent, rank) == _total(
                name, shape, dst, "result", arrived, rank
            )
        if not same:
            raise torn(f"{name!r} did not arrive as it was sent: the digests differ", rank, None)


def check_twins(twins: Mapping[str, Origin], rows: Mapping[int, list[int]], rank: int) -> None:
    """Raises unless the meshes that hold a tensor hold the same values. rows: the digest of each one in its
    order, by rank."""
    for number, (name, origin) in enumerate(twins.items()):
        digests = {other: row[number] for other, row in rows.items()}
        totals = [_total(name, origin.shape, twin, "source", digests, rank) for twin in origin.twins]
        if len(set(totals)) > 1:
            texts = (
                f"{ranks_text(twin.ranks)} (digest {total:016x})"
                for twin, total in zip(origin.twins, totals, strict=True)
            )
            raise mismatch(
                f"{name!r} has other values on {' than on '.join(texts)}; make them equal, or leave the name "
                "out on all ranks but those of one mesh",
                rank,
            )


def _total(
    name: str, shape: tuple[int, ...], layout: Layout, what: str, digests: Mapping[int, int], rank: int
) -> int:
    """The digest of the whole tensor, once the replicas of each shard agree. digests: by rank that is not
    lost."""
    first: dict[tuple[Box, ...], int] = {}
    for owner, boxes in layout.shards(shape).items():
        if owner not in digests:
            continue
        same = first.setdefault(tuple(boxes), owner)
        if digests[same] != digests[owner]:
            raise _unlike(name, same, owner, what, rank)
    return added(digests[owner] for owner in first.values())


def _unlike(name: str, a: int, b: int, what: str, rank: int) -> MeshcastError:
    return torn(f"the replicas of {name!r} on ranks {a} and {b} differ ({what})", rank, b)


def torn(text: str, rank: int, peer: int | None) -> MeshcastError:
    return MeshcastError(f"{OP}: {text}", rank=rank, peer=peer, op=OP, phase="transfer")
