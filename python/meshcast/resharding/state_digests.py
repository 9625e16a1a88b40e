"""Checks that what arrived is what was sent: digests of a call's moves, and source tensors left unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..base.boxes import Piece
from ..errors import MeshcastError
from ..layout import Box, Layout
from ..planning.plan import Problem
from ..transfers.digest import added, pieces_digest, shard_digest
from .meshes import ranks_text
from .state_batches import Part
from .state_sources import Origin
from .state_specs import OP, mismatch

__all__ = ["Digests", "check_twins", "check_whole", "torn"]

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
