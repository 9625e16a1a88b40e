"""The transfers of reshard_state_dict: moves in batches, compiled once and run one after the other. Compiled
calls are kept for later ones, limited by the memory that they take; digests say that what arrived is what
was sent.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ..base import checks
from ..base.boxes import Piece, common, piece_view
from ..errors import DeadlineExceededError, MeshcastError, mark_reported
from ..groups.parent import ParentGroup
from ..layout import Box, Layout
from ..planning.plan import Problem
from ..transfers.digest import added, nans_of, pieces_digest, shard_digest
from ..transfers.medium import Casts, Ends, fresh, require_gpu
from ..transfers.transfer import Call, PersistentTransfer, PlanOptions, ranks_of, taken_digests
from .compiled import Reduction, reduction_inside
from .meshes import ranks_text
from .state_entries import OP, Agreed, Move, Target, Terms, mismatch

if TYPE_CHECKING:
    from ..topology import Topology

__all__ = [
    "Batch",
    "Digests",
    "Kept",
    "Known",
    "batches_of",
    "check_twins",
    "check_whole",
    "grouped",
    "pieces_inside",
    "torn",
    "traveling",
]


_PAUSE = 0.0002  # seconds between two checks whether a GPU is done
# Bytes that a compiled plan takes, about: of Python for each tensor, of C++ for each box of each task and
# message.
_PER_TENSOR, _PER_TASK, _PER_PIECE, _PER_HOP = 4000, 400, 400, 60


class Batch:
    """Moves that travel together, between one pair of device types."""

    def __init__(
        self,
        parent: ParentGroup,
        moves: Sequence[Move],
        options: PlanOptions,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """tensors: that this rank holds, by their names."""
        self.moves = moves
        self._device_types = moves[0].device_types
        self._rank = rank = parent.rank
        self._sides = [(rank in move.problem.src.ranks, rank in move.problem.dst.ranks) for move in moves]
        self._call: Call | None = None  # the call that was started, since wait_for_turn()
        self._transfer: PersistentTransfer | None = None  # None on a rank that takes no part
        self._reductions: dict[str, Reduction] = {}  # of sources, before they travel
        problems = [move.problem for move in moves]
        for side, device in enumerate(self._device_types):
            if device == "cuda" and any(takes_part[side] for takes_part in self._sides):
                require_gpu(copies_only=self._device_types != ("cuda", "cuda"))
        for move, (sends, _) in zip(moves, self._sides, strict=True):
            if sends and move.reduces:
                x: Any = tensors[move.source]  # Partial: a DTensor
                layout = Layout(x.device_mesh, x.placements)
                self._reductions[move.source] = reduction_inside(
                    x.device_mesh, layout, move.problem.shape, x.dtype
                )
        if any(sends or receives for sends, receives in self._sides):
            ends = tuple(move.ends for move in moves)
            casts = Casts(ends) if any(each.source != each.destination for each in ends) else None
            self._transfer = PersistentTransfer(
                parent, problems, OP, options, device_types=self._device_types, casts=casts
            )
        else:
            parent.private(ranks_of(problems))  # the ranks must also exist here

    @property
    def nbytes(self) -> int:
        """The approximate number of bytes that are kept for it."""
        plan = None if self._transfer is None else self._transfer._plan
        size = len(self.moves) * _PER_TENSOR
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
        """Notifies the other ranks that this one does not run it. limit: seconds."""
        if self._transfer is not None:
            self._transfer._group.refuse(0, error, limit)

    def run(
        self,
        sent: Mapping[str, torch.Tensor],
        arriving: Mapping[str, torch.Tensor],
        deadline: float,
        digests: Digests | None,
    ) -> list[Call]:
        """Moves what this rank sends, from `sent` by source, into the local tensors `arriving` by target.
        Returns the call of the transfer, where this rank takes part."""
        sources: list[torch.Tensor | None] = []
        targets: list[torch.Tensor | None] = []
        outgoing: dict[tuple[str, Ends], torch.Tensor] = {}
        landing: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        landed: list[tuple[Move, torch.Tensor]] = []
        for move, (sends, receives) in zip(self.moves, self._sides, strict=True):
            source = target = None
            if sends:
                key = (move.source, move.ends)
                if key not in outgoing:
                    outgoing[key] = self._outgoing(move, sent[move.source])
                source = outgoing[key]
            if receives:
                target = arriving[move.target]
                if move.ends.destination != target.dtype or (move.through_host and target.is_cuda):
                    place = (move.target, move.ends.destination)
                    if place not in landing:
                        device = "cpu" if move.through_host else target.device
                        landing[place] = fresh(target.shape, move.ends.destination, device)
                    target = landing[place]
                    landed.append((move, target))
            sources.append(source)
            targets.append(target)
        call = None
        if self._transfer is not None:
            left = max(deadline - time.monotonic(), 1e-3)
            nans = None if digests is None else [nans_of(move.problem.dtype) for move in self.moves]
            call = self._call = self._transfer.launch(sources, targets, left, driven=True, nans=nans)
        try:
            try:  # during the transfer, which reads the same memory
                self._observe(digests, "src", sources)
            finally:
                if call is not None:
                    call.wait()
            if call is not None and self._device_types != ("cpu", "cpu"):
                _end_on_gpu(call, deadline)
            self._observe(digests, "dst", targets, None if call is None else taken_digests(call))
            for move, local in landed:
                _place(move, local, arriving[move.target], self._rank)
        except Exception as error:
            mark_reported(error)  # the others are in this call, or have completed it
            raise
        return [] if call is None else [call]

    def _observe(
        self,
        digests: Digests | None,
        side: str,
        tensors: Sequence[torch.Tensor | None],
        taken: Sequence[int | None] | None = None,
    ) -> None:
        """Notes the digests of shards. taken: those that the transfer has taken as they arrived; the others
        are taken in a pass."""
        for at, (move, tensor) in enumerate(zip(self.moves, tensors, strict=True)):
            if digests is None or tensor is None:
                continue
            known = None if taken is None else taken[at]
            if known is None or tensor.dtype != move.problem.dtype:
                digests.observe(move, side, tensor)
            else:
                digests.note(side, move, known)

    def _outgoing(self, move: Move, local: torch.Tensor) -> torch.Tensor:
        """Returns this rank's shard of the source as the transfer is given it."""
        if move.reduces:
            local = self._reductions[move.source].run(local)
        if move.through_host:
            local = local.cpu()
        return local if local.dtype == move.ends.source else local.to(move.ends.source)


def _place(move: Move, local: torch.Tensor, target: torch.Tensor, rank: int) -> None:
    """Copies what a move has brought. Other moves, and the user, have values in the rest of the target."""
    shape, _, _, dst = move.problem
    if not dst.by_boxes:
        target.copy_(local)
        return
    for piece in dst.pieces(shape)[rank][1]:
        piece_view(target, piece).copy_(piece_view(local, piece))


def _end_on_gpu(call: Call, deadline: float) -> None:
    """Blocks until the GPU is done as well: what fails there must be known before any rank returns."""
    begin = time.monotonic()
    while not call.is_completed():
        if time.monotonic() >= deadline:
            raise DeadlineExceededError(
                "the GPU had not finished with what arrived by the limit of the call",
                phase="transfer",
                elapsed=time.monotonic() - begin,
            )
        time.sleep(_PAUSE)
    call.wait()  # raises an error that came meanwhile


def batches_of(
    parent: ParentGroup,
    targets: Iterable[Target],
    limit: int | None,
    options: PlanOptions,
    tensors: Mapping[str, torch.Tensor],
) -> list[Batch]:
    """Returns batches of at most `limit` bytes, each of which one plan can list, in the order of the targets.
    All moves of a target are in one."""
    return [Batch(parent, moves, options, tensors) for moves in grouped(targets, limit)]


def grouped(targets: Iterable[Target], limit: int | None) -> list[list[Move]]:
    """The moves of each batch."""
    groups: list[list[Move]] = []
    size = 0  # of the last one
    boxes = _Boxes()
    for target in targets:
        if not target.moves:
            continue
        more = sum(map(traveling, target.moves))
        joins = bool(groups) and groups[-1][-1].device_types == target.moves[0].device_types
        if joins and (limit is None or size + more <= limit) and boxes.take(target.moves):
            groups[-1] += target.moves
            size += more
        else:
            boxes.clear()
            boxes.take(target.moves)
            groups.append(list(target.moves))
            size = more
    return groups


# A plan lists so many boxes at most, and so many of tensors that differ: csrc/core/plan/stack.cpp, tasks.h.
_MOST_BOXES, _MOST_APART = 1 << 21, 1 << 18


class _Boxes:
    """The boxes of a plan. Those of equal tensors are planned once, and listed for each."""

    def __init__(self) -> None:
        self._counts: dict[Problem, int] = {}
        self.clear()

    def clear(self) -> None:
        self._kinds: set[Problem] = set()
        self._all = self._apart = 0

    def take(self, moves: Sequence[Move]) -> bool:
        """Adds those of the moves. Returns False, and adds nothing, where a plan cannot have them as well."""
        counted = [(move.problem, self._count(move.problem)) for move in moves]
        new = {problem: count for problem, count in counted if problem not in self._kinds}
        all_, apart = self._all + sum(count for _, count in counted), self._apart + sum(new.values())
        if self._kinds and (all_ > _MOST_BOXES or apart > _MOST_APART):
            return False
        self._kinds.update(new)
        self._all, self._apart = all_, apart
        return True

    def _count(self, problem: Problem) -> int:
        """At least as many as there are, and just as many where both sides cut by dimensions."""
        if problem not in self._counts:
            shape, _, src, dst = problem
            sides = [[box for box, _ in each._core(shape).tiles(shape)] for each in (src, dst)]
            cells = 1
            for dim in range(len(shape)):
                cells *= len({box[dim][0] for boxes in sides for box in boxes})
            self._counts[problem] = min(cells, len(sides[0]) * len(sides[1]))
        return self._counts[problem]


def traveling(move: Move) -> int:
    """Bytes of what the destination wants of a source, once."""
    return _traveling(move.problem)


@lru_cache(maxsize=1024)  # layers of a model have the same layouts
def _traveling(problem: Problem) -> int:
    shape, dtype, _, dst = problem
    if not dst.by_boxes:
        return checks.total_bytes(shape, dtype)
    tiles = dst._core(shape).tiles(shape)
    return sum(checks.total_bytes([hi - lo for lo, hi in box], dtype) for box, _ in tiles)


_MOST_BYTES = 256 << 20  # of a process group's kinds of call, as Batch.nbytes counts


class Known:
    """A kind of call as the ranks agreed on it. Calls of one number are of one kind on all ranks. values:
    entries that are no tensors, by the rank that sent them last, as text; batches: once it was compiled.
    delta: how it travels as changes, once it was to."""

    def __init__(self, number: int, agreed: Agreed, values: dict[int, dict[str, str]]) -> None:
        self.number, self.agreed, self.values = number, agreed, values
        self.batches: list[Batch] = []
        self.delta: Any = None  # a DeltaPlan, which is made of batches
        self._before: Batch | None = None
        self._compiled = False

    def compile(
        self,
        parent: ParentGroup,
        terms: Terms,
        topology: Topology | None,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Makes the batches, unless they are there. tensors: that this rank holds."""
        if not self._compiled:
            options = PlanOptions(terms.strategy, topology)
            self.batches = batches_of(
                parent, self.agreed.targets.values(), terms.max_bytes_in_flight, options, tensors
            )
            self._compiled = True

    def before(self, parent: ParentGroup, terms: Terms, topology: Topology | None) -> Batch | None:
        """The batch of what the holders of blocks exchange before, made once; None where that is nothing."""
        if self._before is None and self.agreed.before:
            self._before = Batch(parent, self.agreed.before, PlanOptions(terms.strategy, topology), {})
        return self._before

    @property
    def nbytes(self) -> int:
        more = 0 if self.delta is None else self.delta.nbytes
        return more + sum(batch.nbytes for batch in (*self.batches, *filter(None, [self._before])))


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
        """Once it has run: before that, the size of its plan is not known."""
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

    def __init__(self, rank: int, moves: Sequence[Move]) -> None:
        self._rank = rank
        self._positions = {(move.source, move.target): at for at, move in enumerate(moves)}
        self._numbers = {side: [0] * len(moves) for side in ("src", "dst", "all")}

    def observe(self, move: Move, side: str, local: torch.Tensor) -> None:
        """Takes the digest of a shard, of its values as they travel."""
        shape, dtype, src, dst = move.problem
        if not (src.by_boxes or dst.by_boxes):
            digest = shard_digest(local, src if side == "src" else dst, shape, self._rank, dtype)
        elif side == "dst":
            digest = pieces_digest(local, dst.pieces(shape)[self._rank][1], shape, dtype)
        else:
            own = src.pieces(shape)[self._rank][1]
            if any(self._rank in ranks and len(ranks) > 1 for ranks in _holders(src, shape).values()):
                self.note("all", move, pieces_digest(local, own, shape, dtype))
            digest = added(
                each
                for box, piece, times in src._core(shape).counted(dst._core(shape), shape, self._rank)
                for each in [pieces_digest(local, pieces_inside([own[piece]], box), shape, dtype)] * times
            )
        self.note(side, move, digest)

    def note(self, side: str, move: Move, digest: int) -> None:
        """Notes the digest of a shard, unsigned or not."""
        signed = (digest + _MODULUS // 2) % _MODULUS - _MODULUS // 2
        self._numbers[side][self._positions[move.source, move.target]] = signed

    def row(self) -> list[int]:
        return self._numbers["src"] + self._numbers["dst"] + self._numbers["all"]


def _holders(layout: Layout, shape: tuple[int, ...]) -> dict[tuple[Box, ...], list[int]]:
    """Ranks by what they hold; those with the same boxes hold copies."""
    found: dict[tuple[Box, ...], list[int]] = {}
    for rank, boxes in layout.shards(shape).items():
        if boxes:
            found.setdefault(tuple(sorted(boxes)), []).append(rank)
    return found


def pieces_inside(pieces: Sequence[Piece], box: Box) -> list[Piece]:
    """The parts of pieces that are in a box."""
    found = []
    for own, at, axes, steps in pieces:
        both = common(own, box)
        if both is not None:
            local = list(at)
            for dim, ((low, _), (begin, _)) in enumerate(zip(own, both, strict=True)):
                local[axes[dim] if axes else dim] += (begin - low) * (steps[dim] if steps else 1)
            found.append((both, tuple(local), axes, steps))
    return found


def check_whole(agreed: Agreed, rows: Mapping[int, list[int]], digest: bool) -> None:
    """Raises unless every holder's weights stayed as they were, and, with digests, arrived as they were.
    Rows begin with the number of the source that changed, -1 where none did."""
    for rank, row in rows.items():
        if row[0] >= 0:
            raise torn(
                f"rank {rank} changed {agreed.sources[row[0]]!r} in place while it travelled; let the call "
                "return before the next optimiser step",
                rank,
            )
    if not digest:
        return
    count = len(agreed.moves)
    for number, move in enumerate(agreed.moves):
        name = move.source
        shape, _, src, dst = move.problem
        sent = {rank: row[1 + number] for rank, row in rows.items()}
        arrived = {rank: row[1 + count + number] for rank, row in rows.items()}
        if src.by_boxes:
            whole = {rank: row[1 + 2 * count + number] for rank, row in rows.items()}
            for owners in _holders(src, shape).values():
                for rank in owners[1:]:
                    if whole[owners[0]] != whole[rank]:
                        raise _differ(name, owners[0], rank, "source")
        if src.by_boxes or dst.by_boxes:
            same = added(sent.values()) == added(arrived.values())
        else:
            same = _total(name, shape, src, "source", sent) == _total(name, shape, dst, "result", arrived)
        if not same:
            raise torn(f"{name!r} did not arrive as it was sent: the digests differ")


def check_twins(agreed: Agreed, rows: Mapping[int, list[int]]) -> None:
    """Raises unless the meshes that hold a tensor hold the same values. rows: the digest of each of the twins
    in their order, by rank."""
    for number, (name, (shape, layouts)) in enumerate(agreed.twins.items()):
        digests = {rank: row[number] for rank, row in rows.items()}
        totals = [_total(name, shape, layout, "source", digests) for layout in layouts]
        if len(set(totals)) > 1:
            texts = (
                f"{ranks_text(layout.ranks)} (digest {total:016x})"
                for layout, total in zip(layouts, totals, strict=True)
            )
            raise mismatch(
                f"{name!r} has other values on {' than on '.join(texts)}; make them equal, or leave the name "
                "out on all ranks but those of one mesh"
            )


def _total(name: str, shape: tuple[int, ...], layout: Layout, what: str, digests: Mapping[int, int]) -> int:
    """The digest of the whole tensor, once the replicas of each shard agree. digests: by rank that is not
    lost."""
    first: dict[tuple[Box, ...], int] = {}
    for owner, boxes in layout.shards(shape).items():
        if owner not in digests:
            continue
        same = first.setdefault(tuple(boxes), owner)
        if digests[same] != digests[owner]:
            raise _differ(name, same, owner, what)
    return added(digests[owner] for owner in first.values())


def _differ(name: str, a: int, b: int, what: str) -> MeshcastError:
    return torn(f"the replicas of {name!r} on ranks {a} and {b} differ ({what})", b)


def torn(text: str, peer: int | None = None) -> MeshcastError:
    return MeshcastError(text, peer=peer, phase="transfer")
