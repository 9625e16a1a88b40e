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
_LOST = "lost "  # and the rank: posted by a rank that leaves because of that

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
        self._lost: int | None = None  # a rank that went while this host's ranks met
        if settings.SHM.choice() == "0":
            self.offer = f"off {settings.SHM.name} is 0"
            return
        _C.SharedMemory.set_budget(settings.SHM_MB.integer() << 20)
        try:
            self._core = _C.SharedMemory(ranks)
            self.offer = f"at {self._core.address}"
        except MeshcastError as error:
            self.offer = f"no {error}"

    def meet(
        self, board: Board, group: Sequence[int], offers: Mapping[int, str], deadline: float, lost: Lost
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
            self._core.meet(list(group), addresses, board.rank, limit, lambda: _check(lost, board.rank))
        except AbortedError:
            raise
        except PeerLostError as error:
            self._core, self._lost = None, error.peer
            self._look_after_ranks(board)
            raise
        except MeshcastError as error:
            self._core = None  # closes its socket, so that nobody goes on waiting for this rank
            self._outcome = f"rank {board.rank}: {error}"

    def settle(self, board: Board, deadline: float, lost: Lost) -> _C.SharedMemory | None:
        """The memory if every rank of this host connected, else None, with a warning. Raises PeerLostError
        where a rank has gone, NotPostedError where one does not tell before `deadline`."""
        if not self._ranks:
            return None
        board.post("shm", self._outcome)

        def check() -> None:
            self._look_after_ranks(board)
            _check(lost, board.rank)

        said = board.gather("shm", self._ranks, deadline, check)
        failures = [text for text in said.values() if text]
        if not failures:
            return self._core
        self._core = None
        self._warn(failures[0])
        return None

    def _look_after_ranks(self, board: Board) -> None:
        """Raises PeerLostError where a rank that others wait for has gone. One that left since it lost
        another has said so, and is not to blame."""
        gone = [] if self._core is None else self._core.gone()
        for rank in gone if self._lost is None else [self._lost]:
            lost = rank
            if board.has("shm", rank):
                said = board.read("shm", [rank])[rank]
                if not said.startswith(_LOST):
                    continue
                lost = int(said.removeprefix(_LOST))
            board.post("shm", f"{_LOST}{lost}")
            raise PeerLostError(
                f"rank {board.rank}: rank {lost} has gone while the ranks {list(self._ranks)} of this host "
                "connected. Look at that rank's own output first.",
                rank=board.rank,
                peer=lost,
                op="connect",
                phase="connect",
            )

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
