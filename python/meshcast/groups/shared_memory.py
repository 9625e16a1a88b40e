"""Shared memory between the ranks of one host: what each offers, how they meet, and what is said where they
cannot. It is used by all ranks of a host that are in a private group, or by none of them.

`MESHCAST_SHM=0` turns it off; `MESHCAST_SHM_MB` bounds what one process maps for all its groups (64 MiB).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence

from .. import _C
from ..base import settings
from ..errors import AbortedError, MeshcastError, PeerLostError
from .board import Board

__all__ = ["LocalMemory"]

_MEET_LIMIT = 30.0  # seconds; every member is in this call already

_warned: set[str] = set()  # reasons told so far: one warning for each


Lost = Callable[[], "tuple[int, str] | None"]  # a rank of the group that has gone, and why


def _check(lost: Lost, rank: int) -> None:
    found = lost()
    if found is not None:
        raise PeerLostError(
            f"rank {rank} lost rank {found[0]} while the ranks of their host connected their shared memory: "
            f"{found[1]}. Look at that rank's own output first.",
            rank=rank,
            peer=found[0],
            op="connect",
            phase="connect",
        )


class LocalMemory:
    """One rank's part. Publish `offer`, then meet() the ranks of this host, then settle() with them."""

    def __init__(self, ranks: int) -> None:
        """ranks: of the private group."""
        self._core: _C.SharedMemory | None = None
        self._ranks: tuple[int, ...] = ()
        self._outcome = ""  # what this rank posts: empty if it succeeded
        if settings.SHM.choice("0", "1") == "0":
            self.offer = f"off {settings.SHM.name} is 0"
            return
        _C.SharedMemory.set_budget(settings.SHM_MB.integer(1, 1 << 20) << 20)
        try:
            self._core = _C.SharedMemory(ranks)
            self.offer = f"at {self._core.address}"
        except MeshcastError as error:
            self.offer = f"no {error}"

    def meet(
        self, group: Sequence[int], offers: Mapping[int, str], rank: int, deadline: float, lost: Lost
    ) -> None:
        """Connects with the ranks of this host, given what each of them offered, until `deadline`, by
        time.monotonic(). Raises PeerLostError where a rank has gone. No other failure is raised: settle()
        tells everybody."""
        self._ranks = tuple(sorted(offers))
        refusals = {other: text for other, text in offers.items() if not text.startswith("at ")}
        if len(offers) == 1 or refusals:
            self._core = None
            if refusals and any(not text.startswith("off ") for text in offers.values()):
                other, text = next(iter(refusals.items()))
                self._warn(f"rank {other}: {text.split(' ', 1)[1]}")
            self._ranks = ()
            return
        assert self._core is not None
        addresses = {other: text.split(" ", 1)[1] for other, text in offers.items()}
        try:
            limit = min(max(deadline - time.monotonic(), 0.001), _MEET_LIMIT)
            self._core.meet(list(group), addresses, rank, limit, lambda: _check(lost, rank))
        except (AbortedError, PeerLostError):
            raise
        except MeshcastError as error:
            self._core = None  # closes its socket, so that nobody goes on waiting for this rank
            self._outcome = f"rank {rank}: {error}"

    def settle(self, board: Board, deadline: float, lost: Lost) -> _C.SharedMemory | None:
        """The memory if every rank of this host connected, else None, with a warning. Raises NotPostedError
        where a rank does not tell before `deadline`, PeerLostError where one has gone."""
        if not self._ranks:
            return None
        board.post("shm", self._outcome)
        said = board.gather("shm", self._ranks, deadline, lambda: _check(lost, board.rank))
        failures = [text for text in said.values() if text]
        if not failures:
            return self._core
        self._core = None
        self._warn(failures[0])
        return None

    def _warn(self, reason: str) -> None:
        if reason in _warned:
            return
        _warned.add(reason)
        warnings.warn(
            f"meshcast: ranks {list(self._ranks)} share a host but exchange data over the network, since "
            f"shared memory cannot be used: {reason}. Set {settings.SHM.name}=0 on all of them if this "
            "is wanted.",
            RuntimeWarning,
            stacklevel=2,
        )
