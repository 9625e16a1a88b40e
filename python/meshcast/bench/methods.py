"""Ways to move a sharded tensor between meshes: meshcast's strategies, and what is written today without it.

Each method is a function (move: Move) -> None that fills move.destination on the ranks of the destination
mesh. All ranks of either mesh call it, in one group that holds just them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from meshcast.layout import Layout
from meshcast.local import reshard_local
from meshcast.topology import Topology

Box = tuple[tuple[int, int], ...]
Slices = tuple[slice, ...]


@dataclass
class Move:
    """One rank's part of a case."""

    shape: tuple[int, ...]
    src: Layout
    dst: Layout
    topology: Topology
    group: dist.ProcessGroup
    source: torch.Tensor | None  # local shards
    destination: torch.Tensor | None
    held: dict[int, Box] = field(init=False)  # by rank; one box each, ranks with an empty shard left out
    needed: dict[int, Box] = field(init=False)
    replicas: dict[Box, dist.ProcessGroup | None] = field(default_factory=dict)  # of the destination's tiles

    def __post_init__(self) -> None:
        self.held = {r: boxes[0] for r, boxes in self.src.shards(self.shape).items() if boxes}
        self.needed = {r: boxes[0] for r, boxes in self.dst.shards(self.shape).items() if boxes}

    def tiles(self) -> dict[Box, list[int]]:
        """Distinct source shards with their holders."""
        tiles: dict[Box, list[int]] = {}
        for rank, box in self.held.items():
            tiles.setdefault(box, []).append(rank)
        return tiles

    def put(self, box: Box, data: torch.Tensor) -> None:
        """Writes a box of the tensor into the local destination."""
        assert self.destination is not None
        self.destination[slices(box, self.needed[dist.get_rank()])] = data.view([hi - lo for lo, hi in box])


def slices(box: Box, base: Box) -> Slices:
    """Where `box` lies in a local tensor that holds `base`."""
    return tuple(slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(box, base, strict=True))


def intersection(a: Box, b: Box) -> Box | None:
    box = tuple((max(x, u), min(y, v)) for (x, y), (u, v) in zip(a, b, strict=True))
    return box if all(lo < hi for lo, hi in box) else None


def elements(box: Box) -> int:
    n = 1
    for lo, hi in box:
        n *= hi - lo
    return n


def reshard(move: Move, strategy: str) -> None:
    reshard_local(
        move.source, move.src, move.destination, move.dst, shape=move.shape, dtype=torch.int32,
        group=move.group, strategy=strategy, topology=move.topology, timeout=600,
    )  # fmt: skip


class _Unicasts:
    """Messages between pairs of ranks, posted in one order on all of them."""

    def __init__(self, move: Move) -> None:
        self._move = move
        self._rank = dist.get_rank()
        self._works: list[dist.Work | None] = []
        self._arrivals: list[tuple[Callable[[torch.Tensor], None], torch.Tensor]] = []

    def add(
        self, sender: int, receiver: int, data: Callable[[], torch.Tensor], count: int,
        place: Callable[[torch.Tensor], None],
    ) -> None:  # fmt: skip
        if sender == receiver:
            if self._rank == sender:
                place(data())
        elif self._rank == sender:
            self._works.append(dist.isend(data().contiguous(), receiver, self._move.group))
        elif self._rank == receiver:
            buffer = torch.empty(count, dtype=torch.int32)
            self._works.append(dist.irecv(buffer, sender, self._move.group))
            self._arrivals.append((place, buffer))

    def wait(self) -> None:
        for work in self._works:
            assert work is not None  # this rank is in the group
            work.wait()
        for place, buffer in self._arrivals:
            place(buffer)


def unicasts(move: Move) -> None:
    """One message for each box and receiver; senders take turns among the holders, as Megatron-LM's
    resharding does."""
    rank, batch = dist.get_rank(), _Unicasts(move)
    for receiver, wanted in move.needed.items():
        for turn, (tile, holders) in enumerate(move.tiles().items()):
            box = intersection(tile, wanted)
            if box is None:
                continue
            sender = receiver if receiver in holders else holders[(receiver + turn) % len(holders)]
            batch.add(
                sender, receiver, partial(_cut, move, box), elements(box),
                partial(move.put, box) if rank == receiver else _never,
            )  # fmt: skip
    batch.wait()


def stripes(move: Move) -> None:
    """Replicas of the destination receive a different stripe of every box each, then gather the others from
    each other: the plan of NeMo-RL's fallback. The collective is torch's all_gather."""
    rank, batch = dist.get_rank(), _Unicasts(move)
    tiles: dict[Box, list[int]] = {}
    for receiver, wanted in move.needed.items():
        tiles.setdefault(wanted, []).append(receiver)
    gathered: list[tuple[Box, torch.Tensor]] = []  # box, padded stripe of this rank
    for wanted, receivers in tiles.items():
        receivers.sort()  # as the ranks of their group, whose order the gather has
        for tile, holders in move.tiles().items():
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
                batch.add(
                    sender, receiver, partial(_stripe, move, box, index * part, count), count,
                    partial(_fill, own, count) if rank == receiver else _never,
                )  # fmt: skip
            if own is not None:
                gathered.append((box, own))
    batch.wait()
    for box, own in gathered:
        group = move.replicas.get(move.needed[rank])
        parts = [own]
        if group is not None:
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, own, group)
        move.put(box, torch.cat(parts)[: elements(box)])


def broadcasts(move: Move) -> None:
    """Every tile is broadcast from its first holder to all ranks, which keep what they need: what a script
    does that cannot work out who needs what."""
    rank = dist.get_rank()
    for tile, holders in move.tiles().items():
        extent = [hi - lo for lo, hi in tile]
        held = move.held.get(rank) == tile
        buffer = move.source if held and move.source is not None else torch.empty(extent, dtype=torch.int32)
        if rank == holders[0]:
            buffer = buffer.contiguous()
        elif held:
            buffer = torch.empty(extent, dtype=torch.int32)  # a collective fills it on every rank
        dist.broadcast(buffer, holders[0], move.group)
        box = intersection(tile, move.needed[rank]) if rank in move.needed else None
        if box is not None:
            move.put(box, buffer[slices(box, tile)].reshape(-1))


def _cut(move: Move, box: Box) -> torch.Tensor:
    assert move.source is not None
    return move.source[slices(box, move.held[dist.get_rank()])].reshape(-1)


def _stripe(move: Move, box: Box, first: int, count: int) -> torch.Tensor:
    return _cut(move, box)[first : first + count]


def _fill(own: torch.Tensor | None, count: int, data: torch.Tensor) -> None:
    assert own is not None
    own[:count] = data


def _never(_: torch.Tensor) -> None:
    raise AssertionError("not this rank's message")


METHODS: dict[str, Callable[[Move], None]] = {
    "auto": partial(reshard, strategy="auto"),
    "multicast": partial(reshard, strategy="multicast"),
    "broadcast": partial(reshard, strategy="broadcast"),
    "global_all_gather": partial(reshard, strategy="global_all_gather"),
    "local_all_gather": partial(reshard, strategy="local_all_gather"),
    "send_recv": partial(reshard, strategy="send_recv"),
    "gloo unicasts": unicasts,
    "gloo stripes": stripes,
    "gloo broadcasts": broadcasts,
}
"""The first six are meshcast's, the others what is done without it, over torch's gloo."""
