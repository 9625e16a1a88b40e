"""Private groups: the ranks of one transfer, with communicators that the user's own calls never share.

The life of their calls is decided in C++ (csrc/core/group/group.h): which call comes next, when it begins, in
which life of the group, and how it fails.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from .. import _C
from ..base import forks
from ..errors import MeshcastError
from ..topology import Topology
from .meeting import Connector

__all__ = ["PrivateGroup"]

NO_LANE = -1  # of prepare(), which is counted in none

KEPT_AGREEMENTS = (
    256  # kinds of call that a group remembers, the same on all ranks; far fewer than it has slots
)


class PrivateGroup(_C.Group):
    """The ranks of both meshes of a transfer, in all lives of their connections."""

    def __init__(
        self,
        store: Callable[[], dist.Store],
        ranks: Sequence[int],
        rank: int,
        timeout: float,
        known: _C.KnownOffers,
        refusals: _C.OpenRefusals,
        within: str = "",
    ) -> None:
        """store: connects where that has not been done. known, refusals: what ranks offered when they met,
        and what this one refused; shared by the groups of a process group. within: its name."""
        self.ranks = tuple(ranks)
        self.rank = rank
        self.timeout = timeout
        self.name = _group_name(self.ranks)
        self.members = _C.Members(self.name, self.ranks, within)  # as the flight record shows it
        self.transfers: dict[Any, Any] = {}  # compiled ones, kept by make.py
        self.born = forks.count
        self._connector = Connector(self.ranks, rank, self.name, timeout, store)
        super().__init__(list(self.ranks), rank, self.name, self._connector, known, KEPT_AGREEMENTS, refusals)

    @property
    def topology(self) -> Topology | None:
        """Topology of these ranks, known once they have met."""
        return self._connector.topology

    @property
    def interfaces(self) -> int:
        """Interfaces of each host, known once the ranks have met."""
        return self._connector.interfaces

    @property
    def conversation(self) -> _C.Conversation:
        """Conversation of this life of the group, whose ranks have met."""
        assert self._connector.conversation is not None
        return self._connector.conversation

    @property
    def control(self) -> Any:
        """Store of the core, once the ranks have met."""
        return self._connector.control

    def before_call(self) -> None:
        """Raises AbortedError in a forked child."""
        forks.check(self.born, "reshard")

    def refuse(  # type: ignore[override]  # the error itself
        self, lane: int, error: Exception, timeout: float, *, ordinal: int | None = None
    ) -> _C.Refusal:
        """Tells the other ranks, in the background, that this rank refused its arguments of a call: they
        raise at once instead of waiting. ordinal: of a call that has been counted."""
        forks.check(self.born, "reshard")
        return super().refuse(lane, ordinal, str(error), timeout)

    def refuse_call(self, error: Exception, timeout: float, *, prepares: bool) -> _C.Refusal:
        """The same for a call of lane 0, or for prepare(), which is counted in no lane."""
        return self.refuse(NO_LANE if prepares else 0, error, timeout)

    def connect(self, timeout: float) -> None:
        """Brings the group up, unless it is; blocks. Raises what keeps it from coming up."""
        self.before_call()
        try:
            super().connect(timeout)
        except MeshcastError:
            raise
        except BaseException as raised:
            self.interrupted("prepare", raised)
            raise

    def interrupted(self, op: str, raised: BaseException) -> None:
        """Aborts the group after a handler of a signal has ended a wait of this rank."""
        text = f": {raised}" if str(raised) else ""
        self.abort(f"rank {self.rank} was interrupted in {op} by {type(raised).__name__}{text}")

    def close(self, limit: float) -> None:
        """Ends the group in any state. Transfers in flight may finish until `limit`, by time.monotonic().
        Queued calls fail."""
        super().close(limit)
        # Compiled transfers refer to their group. Left in this cycle, the communicators would keep their
        # threads, which look for messages 100 times a second, until the garbage collector comes by.
        self.transfers.clear()


def _group_name(ranks: tuple[int, ...]) -> str:
    text = ",".join(map(str, ranks))
    return text if len(text) <= 40 else f"{text[:32]}..{hashlib.sha256(text.encode()).hexdigest()[:16]}"
