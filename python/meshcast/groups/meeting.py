"""The machine below a private group: its store, its network and its shared memory, brought up for each of its
lives. How the ranks meet is decided in C++ (csrc/core/group/meeting.h)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .. import _C
from ..base.host import host_identity
from ..base.observe import log
from ..errors import DeadlineExceededError, MeshcastError
from ..topology import Topology
from .board import Board, NotPostedError
from .network import Network
from .rails import agreed_count, first_rails, interfaces
from .shared_memory import LocalMemory, Lost
from .shortage import Shortage, as_shortage, few_descriptors

if TYPE_CHECKING:
    from .refusals import OpenRefusals

__all__ = ["Connector"]


class Connector:
    """The machine as a group needs it. Called from its control thread.

    Attributes:
        topology: of the ranks; None before they have met.
        interfaces: of each host.
        board: of this life of the group; None before its ranks have met.
        control: the store of its core, likewise.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        name: str,
        timeout: float,
        store: Callable[[], dist.Store],
        refusals: OpenRefusals,
    ) -> None:
        self.ranks, self.rank, self.name, self.timeout = tuple(ranks), rank, name, timeout
        self.topology: Topology | None = None
        self.interfaces = 1
        self.board: Board | None = None
        self.control: Any = None
        self._open_store = store
        self._refusals: OpenRefusals | None = refusals

    def close(self) -> None:
        """Drops what refers to the process group."""
        self._refusals = None

    def store(self) -> dist.Store:
        return self._open_store()

    def join(self, prefix: str) -> _Joining:
        """Returns this rank's way into the life whose keys have this prefix."""
        return _Joining(self, dist.PrefixStore(prefix, self._open_store()))

    def shortage(self, text: str) -> MeshcastError | None:
        """Returns the error to raise where a failure with this text comes of a shortage."""
        return as_shortage(RuntimeError(text), **self.where())

    def meets(self, prepares: bool) -> None:
        if self._refusals is not None:
            self._refusals.meets(self.ranks, prepares=prepares)

    def has_met(self) -> None:
        if self._refusals is not None:
            with suppress(Exception):  # the store has gone
                self._refusals.has_met(self.ranks)

    def where(self) -> dict[str, Any]:
        return {"rank": self.rank, "op": "connect", "phase": "connect"}


class _Joining:
    """One rank's way into one life of a group. Raises Shortage where this process has run out of
    something."""

    def __init__(self, connector: Connector, store: Any) -> None:
        self._of, self._store = connector, store
        where = connector.where()
        try:
            if few := few_descriptors():
                raise MeshcastError(few, **where)
            self._threads = _C.WorkThread()  # kept by the core as well
            self._memory = LocalMemory(len(connector.ranks))
            names, self._told = interfaces()
            self._network = Network(names, connector.timeout)
        except Exception as error:
            short = as_shortage(error, **where)
            if short is None:
                raise
            raise Shortage(short) from error

    def offer(self) -> str:
        return json.dumps([host_identity(), self._memory.offer, self._told, self._network.offer()])

    def watch(self, offer: str) -> Callable[[], str] | None:
        return self._network.watch(json.loads(offer)[3])

    def connect(self, offers: dict[int, str], deadline: float, lost: Lost) -> _C.GroupCore:
        """Blocks to `deadline`, by time.monotonic()."""
        of = self._of
        ranks, rank = of.ranks, of.rank
        members: dict[int, list[Any]] = {other: json.loads(text) for other, text in offers.items()}
        hosts: dict[int, str] = {other: member[0] for other, member in members.items()}
        count = agreed_count({other: member[2] for other, member in members.items()}, rank)
        topology = Topology.from_hosts(hosts, nics_per_host=count)
        of_host = {other: member[1] for other, member in members.items() if member[0] == hosts[rank]}
        board = Board(self._store, rank, len(ranks))
        try:
            self._memory.meet(board, ranks, of_host, deadline, lost)
            transport = self._network.transport(
                {other: members[other][3] for other in ranks},
                first_rails(ranks, topology, count),
                rank,
                self._store,
                deadline,
            )
            log.info("rank %d: connected with ranks %s", rank, of.name)
            control = dist.PrefixStore("control", self._store)
            memory = self._memory.settle(board, deadline, lost)
            core = _C.GroupCore(transport, control, list(ranks), rank, of.name, memory)
        except NotPostedError as late:
            raise DeadlineExceededError(
                f"rank {rank}: connecting the private group of ranks {list(ranks)} did not finish in time: "
                f"{late}",
                peer=late.ranks[0],
                **of.where(),
            ) from late
        of.topology, of.interfaces, of.control = topology, count, control
        of.board = Board(dist.PrefixStore("board", self._store), rank, len(ranks))
        return core
