"""Private groups: the ranks of one transfer, with communicators that the user's own calls never share.

The life of their calls is decided in C++ (csrc/core/group/group.h): which call comes next, when it begins, in
which generation of the group, and how it fails.

The machine below a private group: its store, its network and its shared memory, brought up for each of its
lives. How the ranks meet is decided in C++ (csrc/core/group/meeting.h).

Ranks of one host use shared memory: `MESHCAST_SHM=0` turns it off, `MESHCAST_SHM_MB` bounds what one process
maps for all its groups (64 MiB).
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from socket import gethostname
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from .. import _C
from ..base import forks, settings
from ..base.observe import log, note_hosts
from ..base.settings import host_identity
from ..base.wire import pack, unpack
from ..errors import Caller, MeshcastError
from ..topology import AgreedFigures, MachineFigures, Topology, agreed_figures, known_figures
from .network import Network, agreed_count, first_rails, interfaces
from .store import Shortage, as_shortage, few_descriptors

__all__ = ["Cache", "Connector", "Contact", "NO_LANE", "PrivateGroup"]


Lost = Callable[[], "tuple[int, str] | None"]  # a rank of the group that has exited, and why

_warned: set[str] = set()  # reasons logged so far: one warning for each

_K = TypeVar("_K")
_V = TypeVar("_V")


class Cache(dict[_K, _V]):
    """A dictionary for what can be made again: the `most` entries that were set last. Looking one up costs
    what it costs in a dict."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: _K, value: _V) -> None:
        self.pop(key, None)
        while len(self) >= self.most:
            self.pop(next(iter(self)), None)  # another thread may have dropped it
        super().__setitem__(key, value)


class Connector:
    """The machine as a group needs it. Called from its control thread.

    Attributes:
        topology: of the ranks; None before they have met.
        figures: measured between their GPUs; None before that, and where some have none.
        interfaces: of each host.
        conversation: of this generation of the group; None before its ranks have met.
        control: the store of its core, in the same way.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        name: str,
        timeout: float,
        store: Callable[[], dist.Store],
    ) -> None:
        self.ranks, self.rank, self.name, self.timeout = tuple(ranks), rank, name, timeout
        self.topology: Topology | None = None
        self.figures: AgreedFigures | None = None
        self.interfaces = 1
        self.conversation: _C.Conversation | None = None
        self.control: Any = None
        self._open_store = store

    @property
    def caller(self) -> Caller:
        return Caller("connect", self.rank, "connect")

    def store(self) -> dist.Store:
        return self._open_store()

    def join(self, prefix: str) -> _Joining:
        """Returns this rank's way into the generation whose keys have this prefix."""
        return _Joining(self, dist.PrefixStore(prefix, self._open_store()))

    def shortage(self, text: str) -> MeshcastError | None:
        """Returns the error to raise where a failure with this text comes of a shortage."""
        return as_shortage(RuntimeError(text), self.caller)


class _Offer(NamedTuple):
    """A rank as the others have to know it when they meet."""

    host: str
    memory: str  # of HostMemory
    interfaces: str  # of interfaces()
    network: str  # of Network
    name: str  # of the host, for people
    figures: MachineFigures | None = None  # of its GPUs


class Contact:
    """This process as others may watch it that are to meet it, and have not yet. Keeps its end of the network
    up.

    text: what the others need.
    """

    def __init__(self, timeout: float) -> None:
        names, told = interfaces()
        self._network = Network(names, timeout)
        self.text = pack(_Offer(host_identity(), "", told, self._network.offer(), gethostname()))

    def watch(self, text: str) -> Callable[[], str]:
        """Returns a function that says why the process with this text has left, "" while that is not known;
        over gloo it never is."""
        return self._network.watch(unpack(_Offer, text).network) or (lambda: "")


class _Joining:
    """One rank's way into one generation of a group. Raises Shortage where this process has run out of
    something."""

    def __init__(self, connector: Connector, store: Any) -> None:
        self._of, self._store = connector, store
        try:
            if few := few_descriptors():
                raise connector.caller.error(MeshcastError, few)
            self._threads = _C.WorkThread()  # the core also keeps it
            self._memory = _host_memory(len(connector.ranks))
            names, self._told = interfaces()
            self._network = Network(names, connector.timeout)
        except Exception as error:
            short = as_shortage(error, connector.caller)
            if short is None:
                raise
            raise Shortage(short) from error

    def offer(self) -> str:
        network = self._network.offer()
        figures = known_figures() if hasattr(_C, "GpuGroupCore") else None
        return pack(_Offer(host_identity(), self._memory.offer, self._told, network, gethostname(), figures))

    def watch(self, offer: str) -> Callable[[], str] | None:
        return self._network.watch(unpack(_Offer, offer).network)

    def connect(self, offers: dict[int, str], deadline: float, lost: Lost) -> _C.GroupCore:
        """Blocks to `deadline`, by time.monotonic()."""
        of = self._of
        ranks, rank = of.ranks, of.rank
        members = {other: unpack(_Offer, text) for other, text in offers.items()}
        hosts = {other: member.host for other, member in members.items()}
        note_hosts({other: member.name for other, member in members.items()})
        count = agreed_count({other: member.interfaces for other, member in members.items()}, rank)
        topology = Topology.from_hosts(hosts, nics_per_host=count)
        of_host = {other: member.memory for other, member in members.items() if member.host == hosts[rank]}
        conversation = _C.Conversation(self._store, rank, len(ranks))
        self._memory.meet(conversation, list(ranks), of_host, deadline, lost)
        transport = self._network.transport(
            {other: members[other].network for other in ranks},
            first_rails(ranks, topology, count),
            rank,
            self._store,
            deadline,
        )
        log.info("rank %d: connected with ranks %s", rank, of.name)
        self._memory.settle(conversation, deadline, lost)
        _warn_of(self._memory, sorted(of_host))
        of.control = dist.PrefixStore("control", self._store)
        core = _C.GroupCore(transport, of.control, list(ranks), rank, of.name, self._memory)
        of.topology, of.interfaces = topology, count
        of.figures = agreed_figures(hosts, {other: member.figures for other, member in members.items()})
        if of.figures is not None:
            log.info("rank %d: ranks %s plan calls between GPUs with measured figures", rank, of.name)
        of.conversation = _C.Conversation(dist.PrefixStore("board", self._store), rank, len(ranks))
        return core


def _host_memory(ranks: int) -> _C.HostMemory:
    """ranks: of the private group."""
    _C.use_large_blocks(settings.HUGE_PAGES.choice() == "1")
    if settings.SHM.choice() == "0":
        return _C.HostMemory(ranks, f"{settings.SHM.name} is 0")
    _C.HostMemory.set_budget(settings.SHM_MB.integer() << 20)
    return _C.HostMemory(ranks, "")


def _warn_of(memory: _C.HostMemory, ranks: Sequence[int]) -> None:
    if memory.obstacle and memory.obstacle not in _warned:
        _warned.add(memory.obstacle)
        warnings.warn(
            f"meshcast: ranks {list(ranks)} share a host but exchange data over the network, since "
            f"shared memory cannot be used: {memory.obstacle}. Set {settings.SHM.name}=0 on all of them if "
            "this is wanted.",
            RuntimeWarning,
            stacklevel=2,
        )


_KEPT_TRANSFERS = 256  # which this rank keeps for later calls

NO_LANE = -1  # of prepare(), which is counted in none

KEPT_AGREEMENTS = (
    256  # kinds of call that a group remembers, the same on all ranks; far fewer than it has slots
)


class PrivateGroup(_C.Group):
    """The ranks of both meshes of a transfer, in all generations of their connections."""

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
        self.transfers: Cache[Any, Any] = Cache(_KEPT_TRANSFERS)  # of transfers/transfer.py
        self.fork_count = forks.count
        self._connector = Connector(self.ranks, rank, self.name, timeout, store)
        super().__init__(list(self.ranks), rank, self.name, self._connector, known, KEPT_AGREEMENTS, refusals)

    @property
    def topology(self) -> Topology | None:
        """Topology of these ranks, known once they have met."""
        return self._connector.topology

    @property
    def figures(self) -> AgreedFigures | None:
        """Measured figures of the ranks' GPUs, known once they have met; None where some have none."""
        return self._connector.figures

    @property
    def gpu_topology(self) -> Topology | None:
        """Topology of these ranks for calls between their GPUs."""
        figures = self.figures
        return self.topology if figures is None else figures.topology

    @property
    def interfaces(self) -> int:
        """Interfaces of each host, known once the ranks have met."""
        return self._connector.interfaces

    @property
    def conversation(self) -> _C.Conversation:
        """Conversation of this generation of the group, whose ranks have met."""
        assert self._connector.conversation is not None
        return self._connector.conversation

    @property
    def control(self) -> Any:
        """Store of the core, once the ranks have met."""
        return self._connector.control

    def refuse(  # type: ignore[override]  # the error itself
        self, lane: int, error: Exception, timeout: float, *, ordinal: int | None = None
    ) -> _C.Refusal:
        """Notifies the other ranks, in the background, that this rank refused its arguments of a call: they
        raise at once instead of waiting. ordinal: of a call that has been counted."""
        forks.check(self.fork_count, "reshard")
        return super().refuse(lane, ordinal, str(error), timeout)

    def connect(self, timeout: float) -> None:
        """Brings the group up, unless it is; blocks. Raises what keeps it from coming up."""
        forks.check(self.fork_count, "prepare")
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
        # threads, which look for messages 100 times a second, until the garbage collector runs.
        self.transfers.clear()


def _group_name(ranks: tuple[int, ...]) -> str:
    text = ",".join(map(str, ranks))
    return text if len(text) <= 40 else f"{text[:32]}..{hashlib.sha256(text.encode()).hexdigest()[:16]}"
