"""Point-to-point messages of groups of backend "meshcast" over UCX, and through shared memory inside a host:
which groups have them, and how two of their ranks meet. The messages themselves are C++
(csrc/c10d/process_group/point_to_point.h).

torch.distributed.broadcast of large tensors in groups of backend "meshcast": a reshard from one rank to all
others.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import Replicate

from .. import _C
from ..base import settings
from ..base.observe import log
from ..base.settings import memory_identity
from ..base.wire import pack, unpack
from ..errors import AbortedError, Caller, DeadlineExceededError, LayoutError, MeshcastError, PeerLostError
from ..groups.network import Network, agreed_count, interfaces, library
from ..groups.parent import ParentGroup, parent_group
from ..groups.store import store_of_generation
from ..layout import Layout
from ..planning.plan import Problem
from ..transfers.transfer import kept_transfer

__all__ = ["Broadcasts", "announce", "settle"]


class Broadcasts:
    """The multicasts of one group. Their ranks meet at the first of them, and agree once on each root and
    length: neither holds up the caller."""

    def __init__(self) -> None:
        self.key = 0  # of the backend that asks, which may outlive its Python object
        self._parent: weakref.ref[ParentGroup] | None = None
        self._ranks: list[int] = []  # global ones, in the order of the group

    def start(self, work: _C.PendingWork, data: torch.Tensor, root: int, timeout: float) -> None:
        """data: bytes in one piece, as many on every rank. root: in the group. timeout: seconds."""
        parent = self._find_parent()
        source = self._ranks[root]
        others = Layout([rank for rank in self._ranks if rank != source], [Replicate()])
        problem = Problem((data.numel(),), torch.uint8, Layout([source], [Replicate()]), others)
        transfer = kept_transfer(parent, [problem], "broadcast")
        sends = parent.rank == source
        call = transfer.launch([data if sends else None], [None if sends else data], timeout)

        def begun() -> None:
            if call.error is None:
                work.settle(call.work)
            else:
                work.fail(call.error)

        call.when_settled(begun)

    def _find_parent(self) -> ParentGroup:
        parent = None if self._parent is None else self._parent()
        if parent is None or parent.closed:
            group = _group_of(self.key)
            parent = parent_group(group, "broadcast").twin("broadcast")
            self._ranks = dist.get_process_group_ranks(group)
            self._parent = weakref.ref(parent)
        return parent


def _group_of(key: int) -> dist.ProcessGroup:
    """The process group that has this backend for the CPU, also below torch's debug wrapper."""
    for group in c10d._world.pg_map:
        try:
            found: Any = group._get_backend(torch.device("cpu"))
        except RuntimeError:
            continue  # it has none for the CPU
        if getattr(getattr(found, "wrapped_pg", found), "key", None) == key:
            return group
    raise MeshcastError("broadcast: no process group has this backend now", op="broadcast")


# Seconds between two checks for a numbered key: at first, later, and once none has come for _SOON.
_FIRST_PAUSE, _LONGEST_PAUSE, _LATE_PAUSE, _SOON = 0.0005, 0.02, 0.2, 10.0
_COUNT_PAUSE = 1.0  # seconds between two checks for addresses without a numbered key
_JOIN_LIMIT = 2.0  # seconds that a process that exits gives a thread of ours
_OP = "send, recv"


def announce(store: Any, rank: int, size: int) -> Any:
    """Says whether this rank can use UCX, before the ranks of a group wait for one another. Returns the store
    of this generation of the group."""
    generation = store_of_generation(store, size)
    _C.Conversation(generation, rank, size).say("transport", pack(_ability()))
    return generation


class _Ability(NamedTuple):
    """The transport that a rank can use: kind is "ucx", "gloo", or "none" with the reason why. choice: what
    its settings ask for. memory: ranks with the same text share it; "" for none."""

    kind: str
    choice: str
    why: str = ""
    memory: str = ""


def _ability() -> _Ability:
    """Looks for the library without loading it."""
    choice = "ucx"  # a value that is none is an order that cannot be carried out
    try:
        choice = settings.TRANSPORT.choice()
        if choice == "gloo":
            return _Ability("gloo", choice)
        if not hasattr(_C, "UcxPlane"):
            raise MeshcastError("this copy of meshcast was built without the headers of UCX")
        library()
    except MeshcastError as error:
        return _Ability("gloo" if choice == "auto" else "none", choice, str(error))
    try:
        if settings.SHM.choice() == "0":
            return _Ability("ucx", choice)
        _C.HostMemory.set_budget(settings.SHM_MB.integer() << 20)
    except MeshcastError as error:
        return _Ability("none", choice, str(error))
    return _Ability("ucx", choice, memory=memory_identity())


def settle(generation: Any, rank: int, ranks: Sequence[int], timeout: float) -> _C.PointToPoint | None:
    """Returns what carries the messages of this group, the same on all its ranks: UCX where all can use it,
    else None, for gloo. Where a rank was set to use UCX and not all can, every message raises LayoutError.
    Waits until all have announced, as they have once gloo has connected them.

    generation: from announce(). rank: in the group. ranks: global ones. timeout: seconds, of the group."""
    late = (
        f"{_OP}: ranks {{missing}} of the group have not said whether they can use UCX within {{elapsed}} s"
    )
    texts = _C.Conversation(generation, rank, len(ranks)).hear(
        "transport", range(len(ranks)), time.monotonic() + timeout, late, _OP, "connect"
    )
    said = {ranks[at]: unpack(_Ability, text) for at, text in texts.items()}
    obstacle = _obstacle(said)
    if not obstacle and any(each.kind == "gloo" for each in said.values()):
        if any(each.kind == "ucx" for each in said.values()):
            log.info("rank %d: send and recv go over gloo, since not all ranks can use UCX", ranks[rank])
        return None
    messages = _C.PointToPoint(list(ranks), rank)
    if obstacle:
        for peer in range(len(ranks)):
            messages.refuse(peer, LayoutError(obstacle, rank=ranks[rank], op=_OP, phase="connect"))
    else:
        mine = said[ranks[rank]].memory
        near = [at for at, other in enumerate(ranks) if mine and said[other].memory == mine]
        messages.meet_by(_Meetings(messages, generation, rank, ranks, near, timeout).want)
    return messages


def _obstacle(said: Mapping[int, _Ability]) -> str:
    for rank, each in said.items():
        if each.kind == "none":
            return f"{_OP}: rank {rank}: {each.why}"
    kinds = {each.kind for each in said.values()}
    if len(kinds) > 1 and any(each.choice == "ucx" for each in said.values()):
        found = ", ".join(f"{each.kind} on rank {rank}" for rank, each in said.items())
        return (
            f"{_OP}: all ranks of a group must use one transport, found {found}; set "
            f"{settings.TRANSPORT.name} to the same, or leave it unset for gloo where UCX is not everywhere"
        )
    return ""


class _Address(NamedTuple):
    """Addresses of a rank, for another that it wants to meet."""

    interfaces: str  # of interfaces()
    network: str  # of Network
    memory: str = ""  # of PairMemory; "": there is none


class _Meetings:
    """Lets this rank meet others of its group, in the background.

    Each of two ranks writes the other a message: the addresses of its plane and a nonce. For each message it
    sets the next of the receiver's numbered keys: there is one key to look for, for any writer. A rank
    writes when it first wants to exchange something with the other, and it answers messages while one of its
    calls waits for a rank. A rank that has written and read knows the other end: its memory where both have
    offered that, else its plane.
    """

    def __init__(
        self,
        messages: _C.PointToPoint,
        store: Any,
        rank: int,
        ranks: Sequence[int],
        near: Sequence[int],
        timeout: float,
    ) -> None:
        """near: those with which this rank shares memory, if it can be had."""
        self._messages, self._store = messages, store
        self._rank, self._ranks, self._near, self._timeout = rank, ranks, near, timeout
        self._changed = threading.Condition()
        self._unwritten: list[int] = []
        self._thread: threading.Thread | None = None
        # The rest is the thread's alone.
        self._conversation: _C.Conversation | None = None
        self._written: dict[int, _Address] = {}  # by peer
        self._read: dict[int, _Address] = {}
        self._memory: dict[int, _C.PairMemory] = {}  # that an address has offered, by peer
        self._met: set[int] = set()  # with or without success, or in a thread that connects
        self._connecting: list[threading.Thread] = []
        self._next_key = 1  # number of the next
        self._next_count = 0.0
        self._network: Network | None = None

    def want(self, peer: int) -> None:
        """A call waits for this rank of the group, or for any with -1. Returns at once."""
        with self._changed:
            if peer >= 0:
                self._unwritten.append(peer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="meshcast-meet", daemon=True)
                self._thread.start()
            self._changed.notify()
        _live.add(self)

    def close(self) -> None:
        """At the end of the process: what is under way gets a short time."""
        self._messages.shutdown()
        for thread in (self._thread, *self._connecting):
            if thread is not None:
                thread.join(_JOIN_LIMIT)

    def _run(self) -> None:
        begin, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            with self._changed:
                if not self._unwritten and not self._messages.awaits():
                    self._thread = None
                    return
                unwritten, self._unwritten = self._unwritten, []
            try:
                if self._conversation is None:
                    # On its own connection: others wait in that of the group, which blocks all its users.
                    self._conversation = _C.Conversation(self._store.clone(), self._rank, len(self._ranks))
                for peer in unwritten:
                    self._write(self._conversation, peer)
                senders = self._senders(self._conversation)
            except Exception as error:
                for peer in range(len(self._ranks)):
                    if peer not in self._met and peer != self._rank:
                        self._refuse(peer, error)
                continue
            if unwritten or senders:
                begin, pause = time.monotonic(), _FIRST_PAUSE
            with self._changed:
                if not self._unwritten:
                    self._changed.wait(pause)
            waited = time.monotonic() - begin
            pause = min(pause * 1.5, _LONGEST_PAUSE if waited < _SOON else _LATE_PAUSE)

    def _senders(self, conversation: _C.Conversation) -> bool:
        """Reads the addresses that have come. Answers whether there was one."""
        senders: list[int] = []
        while key := conversation.verdict(f"key/{self._rank}/{self._next_key}"):
            senders.append(int(key))
            self._next_key += 1
        if not senders and time.monotonic() > self._next_count:
            self._next_count = time.monotonic() + _COUNT_PAUSE
            count = conversation.count(f"keys/{self._rank}", 0)
            # One died before it set its key, but others may have set theirs since.
            if count >= self._next_key:
                self._next_key = count + 1
                senders = list(range(len(self._ranks)))
        for peer in senders:
            if peer not in self._read and (address := conversation.heard(f"address/{self._rank}", peer)):
                self._read[peer] = unpack(_Address, address)
                self._write(conversation, peer)
                self._meet(peer)
        return bool(senders)

    def _write(self, conversation: _C.Conversation, peer: int) -> None:
        if peer in self._written:
            return
        names, interfaces_text = interfaces()
        if self._network is None:
            self._network = Network(names, self._timeout, "ucx")
        memory = self._offer_memory(peer)
        address = self._written[peer] = _Address(interfaces_text, self._network.offer(), memory)
        conversation.say(f"address/{peer}", pack(address))
        number = conversation.count(f"keys/{peer}", 1)
        conversation.verdict(f"key/{peer}/{number}", str(self._rank))
        if self._network.failure:  # the other receives the reason, once it calls
            self._join(peer, {self._rank: address})

    def _offer_memory(self, peer: int) -> str:
        if peer not in self._near:
            return ""
        try:
            memory = self._memory[peer] = _C.PairMemory()
        except RuntimeError as error:
            self._tell_once(error)
            return ""
        return memory.address

    def _tell_once(self, why: Exception) -> None:
        if str(why) in _told:
            return
        _told.add(str(why))
        rank = self._ranks[self._rank]
        log.warning(
            "rank %d: messages to ranks of its host go over UCX, since shared memory cannot be used: %s",
            rank,
            why,
        )

    def _meet(self, peer: int) -> None:
        if peer not in self._met:
            self._join(peer, {self._rank: self._written[peer], peer: self._read[peer]})

    def _join(self, peer: int, addresses: Mapping[int, _Address]) -> None:
        assert self._network is not None
        ends = {self._ranks[at]: addresses[at] for at in sorted(addresses)}
        rank = self._ranks[self._rank]
        try:
            agreed_count({at: address.interfaces for at, address in ends.items()}, rank)
            memory = self._memory.pop(peer, None)  # its address is of use once
            if memory is not None and peer in addresses and addresses[peer].memory:
                self._met.add(peer)
                self._share(peer, memory, addresses)
            else:
                self._messages.connect(peer, self._over_network(addresses))
                self._met.add(peer)
        except Exception as error:
            self._refuse(peer, error)

    def _over_network(self, addresses: Mapping[int, _Address]) -> _C.ProbingTransport:
        assert self._network is not None
        offers = {self._ranks[at]: addresses[at].network for at in sorted(addresses)}
        rank = self._ranks[self._rank]
        transport = self._network.transport(offers, sorted(addresses), rank, self._store, 0.0)
        assert isinstance(transport, _C.ProbingTransport)
        return transport

    def _share(self, peer: int, memory: _C.PairMemory, addresses: Mapping[int, _Address]) -> None:
        """Connects the memories, in a thread of its own: each waits for the other, which may be about to
        connect with a third. Where one of the two cannot, both go over the network."""
        rank, other = self._ranks[self._rank], self._ranks[peer]
        memories = [memory]  # dropped where it is of no use: the other notices that

        def connect() -> None:
            transport: _C.ProbingTransport
            limit = time.monotonic() + self._timeout
            try:
                try:
                    transport = memories.pop().meet(
                        self._messages, self._rank, peer, addresses[peer].memory, limit
                    )
                except DeadlineExceededError as error:
                    text = f"connecting shared memory with rank {other} failed: {error}"
                    raise Caller(_OP, rank, "connect").error(type(error), text, peer=other) from error
                except AbortedError:  # the group has ended: the other learns that over the network
                    transport = self._over_network(addresses)
                except Exception as error:
                    self._tell_once(error)
                    transport = self._over_network(addresses)
                self._messages.connect(peer, transport)
            except Exception as error:
                self._refuse(peer, error)

        thread = threading.Thread(target=connect, name="meshcast-share", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # there are no more threads to be had
            memories.clear()
            self._tell_once(error)
            self._messages.connect(peer, self._over_network(addresses))
            return
        self._connecting = [each for each in self._connecting if each.is_alive()] + [thread]

    def _refuse(self, peer: int, error: Exception) -> None:
        self._met.add(peer)
        if not isinstance(error, MeshcastError):
            other = self._ranks[peer]
            error = Caller(_OP, self._ranks[self._rank], "connect").error(
                PeerLostError, f"the store did not let this rank meet rank {other}: {error}", peer=other
            )
        self._messages.refuse(peer, error)


_told: set[str] = set()  # why there is no memory: one warning for each
_live: weakref.WeakSet[_Meetings] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for meetings in list(_live):
        meetings.close()
