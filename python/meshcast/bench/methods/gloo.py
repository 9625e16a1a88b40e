"""Methods as they are written today without meshcast, over torch's gloo."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from ..cases import Case
from ..groups import Groups
from ..move import Box, CaseBatch, CaseMove, elements, extent, intersection, slices, turns
from .method import Method


class _Unicasts:
    """Messages between pairs of ranks, posted in one order on all of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank()
        self._works: list[dist.Work | None] = []
        self._arrivals: list[tuple[Callable[[torch.Tensor], None], torch.Tensor]] = []

    def add(
        self, sender: int, receiver: int, data: Callable[[], torch.Tensor], count: int,
        place: Callable[[torch.Tensor], None],
    ) -> None:  # fmt: skip
        if sender == receiver:
            if self._rank == sender:
                place(data().reshape(-1))
        elif self._rank == sender:
            self._works.append(dist.isend(data().contiguous(), receiver, self._group))
        elif self._rank == receiver:
            buffer = torch.empty(count, dtype=torch.int32)
            self._works.append(dist.irecv(buffer, sender, self._group))
            self._arrivals.append((place, buffer))

    def wait(self) -> None:
        for work in self._works:
            assert work is not None  # this rank is in the group
            work.wait()
        for place, buffer in self._arrivals:
            place(buffer)


def unicasts(batch: CaseBatch) -> None:
    """One message for each box and receiver; senders take turns among the holders, as Megatron-LM's
    resharding does."""
    messages = _Unicasts(batch.group)
    for move in batch.moves:
        for receiver, wanted in move.needed.items():
            for turn, (tile, holders) in enumerate(move.tiles.items()):
                box = intersection(tile, wanted)
                if box is not None:
                    messages.add(
                        turns(holders, receiver, turn), receiver, partial(move.cut, box), elements(box),
                        partial(move.put, box),
                    )  # fmt: skip
    messages.wait()


def stripes(batch: CaseBatch) -> None:
    """Replicas of the destination receive a different stripe of every box each, then gather the others from
    each other: the plan of NeMo-RL's fallback. The collective is torch's all_gather."""
    rank, messages = dist.get_rank(), _Unicasts(batch.group)
    gathered: list[tuple[CaseMove, Box, torch.Tensor]] = []  # box, padded stripe of this rank
    for move in batch.moves:
        for wanted, receivers in move.wanted.items():
            for tile, holders in move.tiles.items():
                box = intersection(tile, wanted)
                if box is None:
                    continue
                part = -(-elements(box) // len(receivers))
                own = torch.zeros(part, dtype=torch.int32) if rank in receivers else None
                for index, receiver in enumerate(receivers):
                    count = min(part, elements(box) - index * part)
                    if count <= 0:
                        continue
                    sender = receiver if receiver in holders else holders[index % len(holders)]
                    messages.add(
                        sender, receiver, partial(_stripe, move, box, index * part, count), count,
                        partial(_fill, own, count),
                    )  # fmt: skip
                if own is not None:
                    gathered.append((move, box, own))
    messages.wait()
    for move, box, own in gathered:
        group = move.replicas[move.needed[rank]]
        parts = [own]
        if group is not None:
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, own, group)
        move.put(box, torch.cat(parts)[: elements(box)])


def broadcasts(batch: CaseBatch) -> None:
    """Every tile is broadcast from its first holder to all ranks, which keep what they need: what a script
    does that cannot work out who needs what."""
    rank = dist.get_rank()
    for move in batch.moves:
        for tile, holders in move.tiles.items():
            held = move.held.get(rank) == tile
            if rank == holders[0] and move.source is not None:
                buffer = move.source.contiguous()
            else:  # a collective fills it on every rank, also where the tile is held
                buffer = torch.empty(extent(tile), dtype=torch.int32)
            dist.broadcast(buffer, holders[0], batch.group)
            data = move.source if held and move.source is not None else buffer
            box = intersection(tile, move.needed[rank]) if rank in move.needed else None
            if box is not None:
                move.put(box, data[slices(box, tile)].reshape(-1))


def gather_broadcast(batch: CaseBatch) -> None:
    """The whole tensor on one rank of the source mesh, a broadcast of all of it to the destination mesh, and
    each rank cuts out its shard: full_tensor() and broadcast, as most scripts that move weights do."""
    rank = dist.get_rank()
    for move, feeders in zip(batch.moves, batch.kept[GATHER_BROADCAST], strict=True):
        root = _root(move)
        whole = torch.empty(move.shape, dtype=torch.int32) if rank in (root, *move.needed) else None
        messages = _Unicasts(batch.group)
        for tile, holders in move.tiles.items():
            sender = root if root in holders else holders[0]
            messages.add(sender, root, partial(move.cut, tile), elements(tile), partial(_insert, whole, tile))
        messages.wait()
        if whole is not None:
            dist.broadcast(whole, root, feeders)
            if rank in move.needed:
                box = move.needed[rank]
                move.place(box).copy_(whole[tuple(slice(lo, hi) for lo, hi in box)])


GATHER_BROADCAST = "gloo gather+broadcast"


def _feeders(case: Case, groups: Groups) -> list[dist.ProcessGroup]:
    """For each tensor, the group of its root and its destination ranks; equal ones shared."""
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    found = []
    for tensor in case.tensors:
        move = CaseMove(*tensor)
        ranks = tuple(sorted({_root(move), *move.needed}))
        if ranks not in made:
            made[ranks] = groups.new(ranks)
        found.append(made[ranks])
    return found


def _root(move: CaseMove) -> int:
    return next(iter(move.tiles.values()))[0]


def _insert(whole: torch.Tensor | None, tile: Box, data: torch.Tensor) -> None:
    assert whole is not None
    whole[tuple(slice(lo, hi) for lo, hi in tile)] = data.view(extent(tile))


def _stripe(move: CaseMove, box: Box, first: int, count: int) -> torch.Tensor:
    return move.cut(box).reshape(-1)[first : first + count]


def _fill(own: torch.Tensor | None, count: int, data: torch.Tensor) -> None:
    assert own is not None
    own[:count] = data


METHODS = [
    Method(
        "gloo unicasts",
        unicasts,
        "one isend per box and receiver, senders in turn: what Megatron-LM's resharding does over gloo",
        prepares=False,
    ),
    Method(
        "gloo stripes",
        stripes,
        "replicas receive a stripe each, then all_gather: NeMo-RL's fallback",
        prepares=False,
    ),
    Method("gloo broadcasts", broadcasts, "every source shard is broadcast to everybody", prepares=False),
    Method(
        GATHER_BROADCAST,
        gather_broadcast,
        "the whole tensor is gathered on one rank and broadcast to the destination mesh",
        setup=_feeders,
        prepares=False,
    ),
]
