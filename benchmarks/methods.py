"""Ways to move a sharded tensor between meshes: meshcast's strategies, and what is written today without it.

Each is a function (move: Move) -> None that fills move.destination on the ranks of the destination mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import meshcast
import torch
import torch.distributed as dist

Slices = tuple[slice, ...]


@dataclass
class Move:
    """One rank's part of a case."""

    shape: tuple[int, ...]
    src: meshcast.Layout
    dst: meshcast.Layout
    topology: meshcast.Topology
    source: torch.Tensor | None  # local shards
    destination: torch.Tensor | None


def slices(box: tuple[tuple[int, int], ...], base: tuple[tuple[int, int], ...]) -> Slices:
    """Where `box` lies in a local tensor that holds `base`."""
    return tuple(slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(box, base, strict=True))


def reshard(move: Move, strategy: str) -> None:
    meshcast.reshard_local(
        move.source, move.src, move.destination, move.dst,
        shape=move.shape, dtype=torch.int32, strategy=strategy, topology=move.topology, timeout=300,
    )  # fmt: skip


def gloo_point_to_point(move: Move) -> None:
    """One isend/irecv for each box and receiver, the sender being the holder that has sent least so far."""
    rank = dist.get_rank()
    held, needed = move.src.shards(move.shape), move.dst.shards(move.shape)
    load: dict[int, int] = {}
    works, arrivals = [], []
    for receiver, (wanted,) in needed.items():
        for tile in {boxes[0] for boxes in held.values()}:
            box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(tile, wanted, strict=True))
            if any(lo >= hi for lo, hi in box):
                continue
            holders = [r for r, boxes in held.items() if boxes[0] == tile]
            sender = min(holders, key=lambda r: (load.get(r, 0), r))
            load[sender] = load.get(sender, 0) + 1
            if rank == sender:
                assert move.source is not None
                works.append(dist.isend(move.source[slices(box, tile)].contiguous(), receiver))
            elif rank == receiver:
                buffer = torch.empty([hi - lo for lo, hi in box], dtype=torch.int32)
                works.append(dist.irecv(buffer, sender))
                arrivals.append((slices(box, wanted), buffer))
    for work in works:
        work.wait()
    for where, buffer in arrivals:
        assert move.destination is not None
        move.destination[where] = buffer


def gloo_broadcast_tiles(move: Move) -> None:
    """Every tile is broadcast from its first holder to all ranks, which keep what they need: what a script
    does that cannot work out who needs what."""
    rank = dist.get_rank()
    held, needed = move.src.shards(move.shape), move.dst.shards(move.shape)
    for tile in dict.fromkeys(boxes[0] for boxes in held.values()):
        root = next(r for r, boxes in held.items() if boxes[0] == tile)
        buffer = torch.empty([hi - lo for lo, hi in tile], dtype=torch.int32) if rank != root else move.source
        dist.broadcast(buffer, root)
        if rank in needed and move.destination is not None and buffer is not None:
            wanted = needed[rank][0]
            box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(tile, wanted, strict=True))
            if all(lo < hi for lo, hi in box):
                move.destination[slices(box, wanted)] = buffer[slices(box, tile)]


METHODS: dict[str, Callable[[Move], None]] = {
    "auto": partial(reshard, strategy="auto"),
    "broadcast": partial(reshard, strategy="broadcast"),
    "send_recv": partial(reshard, strategy="send_recv"),
    "gloo p2p": gloo_point_to_point,
    "gloo broadcast": gloo_broadcast_tiles,
}
# Beyond three times the bound a method's repeats only tell the same again.
ONCE = {"gloo p2p", "gloo broadcast", "send_recv"}
