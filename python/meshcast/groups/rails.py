"""The network interfaces that private groups use: one gloo context for each, and messages that take them in
turns, so that any rank can send through all of them at once.

`MESHCAST_IFNAMES=eth0,eth1` names them, on all hosts equally many of about the same speed: the first one of a
host talks to the first ones of the others, and so on. Without it there is one, chosen by gloo
(`GLOO_SOCKET_IFNAME`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..base import settings
from ..errors import DeadlineExceededError, LayoutError, MeshcastError, PeerLostError
from .shortage import as_shortage
from .store import first_line

if TYPE_CHECKING:
    from ..topology import Topology

__all__ = ["agreed_count", "connect", "first_rails", "interfaces"]

_KEY = re.compile(r"gloo\d+/(?:[^/\s]+/)?(\d+)")


def interfaces() -> tuple[tuple[str, ...], str]:
    """The names, () for gloo's choice, and what this rank tells the others: their number, or why they are
    wrong here."""
    names = settings.IFNAMES.names()
    if problem := settings.IFNAMES.problem():
        return (), problem
    return names, str(len(names) or 1)


def agreed_count(told: Mapping[int, str], rank: int) -> int:
    """Interfaces of every host, from what the ranks told: {rank: text of interfaces()}. Raises
    LayoutError, alike on every rank, where a name is wrong or hosts have unlike numbers."""
    for other, text in sorted(told.items()):
        if not text.isdigit():
            raise LayoutError(f"rank {other}: {text}", rank=rank, peer=other, op="connect", phase="connect")
    if len(set(told.values())) > 1:
        raise LayoutError(
            f"{settings.IFNAMES.name} must name equally many interfaces on every rank; found "
            + ", ".join(f"{count} on rank {other}" for other, count in sorted(told.items())),
            rank=rank,
            op="connect",
            phase="connect",
        )
    return int(next(iter(told.values())))


def first_rails(ranks: Sequence[int], topology: Topology, count: int) -> list[int]:
    """The interface of each rank's first message to any other, by its position among the ranks of its host;
    the next message takes the next one."""
    rails = {rank: at % count for host in topology.hosts for at, rank in enumerate(host.ranks)}
    return [rails[rank] for rank in ranks]


def connect(
    store: Any, ranks: Sequence[int], rank: int, names: Sequence[str], deadline: float, timeout: float
) -> list[dist.ProcessGroupGloo]:
    """One gloo context of `ranks` for each interface, or one by gloo's choice. Blocks; `deadline` is by
    time.monotonic(), `timeout` (seconds) is what operations get later. Raises DeadlineExceededError or
    PeerLostError."""
    rails = []
    for index, name in enumerate(names or ("",)):
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        how: Any = left
        if name:
            gloo: Any = dist.ProcessGroupGloo
            how = gloo._Options()
            how._timeout, how._threads = left, 2
            how._devices = [gloo.create_device(interface=name)]
        # Connecting waits in the store, and a wait locks out every other user of its connection: two
        # groups that connect at once over one connection could wait for each other for ever.
        try:
            rail = dist.ProcessGroupGloo(
                dist.PrefixStore(f"gloo{index}", store.clone()), ranks.index(rank), len(ranks), how
            )
        except Exception as error:
            raise _failed(error, ranks, rank, deadline) from error
        rail._set_default_timeout(timedelta(seconds=timeout))
        rails.append(rail)
    return rails


def _failed(error: Exception, ranks: Sequence[int], rank: int, deadline: float) -> MeshcastError:
    """For what gloo raises while it connects: it names a peer by the key under which that was to post its
    address, "gloo0/0/2" for the third rank."""
    short = as_shortage(error, rank=rank, op="connect", phase="connect")
    if short is not None:
        return short
    named = _KEY.search(str(error))
    position = int(named[1]) if named else len(ranks)
    peer = ranks[position] if position < len(ranks) else None
    late = time.monotonic() >= deadline
    whom = "the others" if peer is None else f"rank {peer}"
    why = "within the limit; it is dead, stuck or unreachable" if late else f": {first_line(error)}"
    kind = DeadlineExceededError if late else PeerLostError
    return kind(
        f"rank {rank}: connecting with {whom} of ranks {list(ranks)} over gloo failed {why}",
        rank=rank,
        peer=peer,
        op="connect",
        phase="connect",
    )
