"""Private groups: the ranks of one transfer, with communicators that the user's own calls never share.

A private group is made at its first use, on its own control thread, which also agrees on new transfers and
starts those that have to wait for it. User threads only enqueue. Each private group has a control thread of
its own, so that the order in which ranks meet groups cannot deadlock, and a group that waits for a rank that
never calls holds up no other group. The thread ends whenever its queue is empty.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch.distributed as dist

from .. import _C
from ..base import forks
from ..base.host import host_identity
from ..base.observe import Completable, log
from ..errors import AbortedError, DeadlineExceededError, MeshcastError
from ..topology import Topology
from .agreements import Agreements
from .board import LOOK, Board, NotPostedError, Watches, meet, refuse_meeting
from .network import Network
from .rails import agreed_count, first_rails, interfaces
from .shared_memory import LocalMemory
from .shortage import Shortage, as_shortage, few_descriptors, no_thread
from .store import store_failed

__all__ = ["Attachment", "Command", "PrivateGroup"]

_JOIN_LIMIT = 0.5  # seconds that the control thread gets at the end of a group, at least
# Seconds by which a command may be late: it ends by itself at its deadline, unless the store holds it up.
_STUCK = 1.5
_PEER_LOST = "4"  # ErrorKind::PeerLost of a posted cause


class Attachment(Protocol):
    """What a layer above keeps with a group, under a key of its own, for as long as the group lives."""

    def abort(self, reason: str) -> None:
        """The group has failed. Any thread; never blocks."""

    def close(self) -> None:
        """The group ends, and nothing new comes: lets go also what waits inside."""


class Command(Protocol):
    """Something that a group does in call order. ordinal: its position in `lane`, None until it is counted.
    deadline: by time.monotonic()."""

    lane: int
    ordinal: int | None
    deadline: float

    def ready(self) -> bool:
        """Whether begin() would not have to wait. Only asked while no command is running."""

    def begin(self, core: _C.GroupCore | None, error: Exception | None) -> None:
        """Does it with the running group; without one, `error` says why. Raises nothing."""


class PrivateGroup:
    """The ranks of both meshes of a transfer. Counts calls per lane alike on every rank."""

    def __init__(
        self,
        store: Callable[[], dist.Store],
        ranks: Sequence[int],
        rank: int,
        timeout: float,
        known: dict[int, str],
    ) -> None:
        """store: connects where that has not been done. known: what ranks posted when they met, shared by the
        groups of a process group."""
        self.ranks = tuple(ranks)
        self.rank = rank
        self.timeout = timeout
        self.name = _group_name(self.ranks)
        self.topology: Topology | None = None  # of these ranks, known once they have met
        self.interfaces = 1  # of each host, likewise
        self.agreements = Agreements()  # touched by commands alone
        self.transfers: dict[Any, Any] = {}  # compiled ones, kept by make.py
        self.board: Board | None = None  # of this life of the group, once its ranks have met
        self.control: Any = None  # store of the core, likewise
        self.attached: dict[str, Attachment] = {}
        self._born = forks.count
        self._open_store = store
        self._known = known
        self._core: _C.GroupCore | None = None
        self._error: Exception | None = None
        self._closing = ""  # why, once the group is being ended
        self._ordinals: dict[int, int] = {}
        self._lock = threading.Lock()
        self._queue: deque[Command] = deque()
        self._thread: threading.Thread | None = None
        self._running: Command | None = None  # what the thread is at
        self._flying: list[Completable] = []
        self._flying_limit = 64

    def submit(self, command: Command) -> None:
        """Counts a command, unless it has its ordinal already, and begins it behind all earlier ones: at once
        in this thread if nothing is queued, the group is up and it is ready; else on the control thread.
        Raises AbortedError in a forked child."""
        forks.check(self._born, "reshard")
        with self._lock:
            if command.ordinal is None:
                ordinal = self._ordinals.get(command.lane, 0)
                self._ordinals[command.lane] = ordinal + 1
                command.ordinal = ordinal
            if self._thread is None and self._core is not None and command.ready():
                command.begin(self._core, None)
                return
            self._queue.append(command)
            if self._thread is not None:
                return
            self._thread = threading.Thread(
                target=self._run, name=f"meshcast-control {self.name}", daemon=True
            )
            try:
                self._thread.start()
                return
            except RuntimeError:  # the next command may get one
                self._thread = None
                self._queue.pop()
        self._begin_without_thread(command)

    def _begin_without_thread(self, command: Command) -> None:
        """Nobody can do it. All ranks hear of that at once, over what this thread can use, and may go on."""
        what = f"group {self.name} needs one for a call"
        error = no_thread(what, rank=self.rank, op="connect", phase="start")
        with suppress(Exception):  # where the store does not answer, the others wait to their limits
            if self._core is None and self._error is None:
                refuse_meeting(self._life(), str(error))
            elif self._core is not None and command.ordinal is not None:
                self._core.reject(command.lane, command.ordinal, str(error))
        command.begin(None, self._error or error)

    def refuse(self, lane: int, error: Exception, timeout: float, *, ordinal: int | None = None) -> None:
        """Tells the other ranks, in the background, that this rank refused its arguments of a call: they
        raise at once instead of waiting. ordinal: of a call that has been counted."""
        self.submit(_Refusal(lane, ordinal, time.monotonic() + timeout, f"rank {self.rank}: {error}"))

    def connect(self, timeout: float) -> None:
        """Brings the group up, unless it is; blocks. Raises what keeps it from coming up."""
        command = _Connection(time.monotonic() + timeout)
        try:
            self.submit(command)
            while not command.done.wait(max(command.deadline - time.monotonic(), 0.0) + _STUCK):
                self.give_up_if_stuck()
        except BaseException as raised:
            self.interrupted("prepare", raised)
            raise
        if command.error is not None:
            raise command.error

    def give_up_if_stuck(self) -> None:
        """For who waits for a command that is overdue. Where the command that is running should have ended,
        the store holds it up, maybe for good: the group has failed then."""
        with self._lock:
            command = self._running
            if command is None or time.monotonic() < command.deadline + _STUCK:
                return
            queue, self._queue = self._queue, deque()
            self._thread = self._running = None
            core = self._core
            reason = (
                f"a call of group {self.name} could not begin within its limit: the rendezvous store does "
                "not answer. Its process or its host is frozen, or cut off"
            )
            error = DeadlineExceededError(
                f"rank {self.rank}: {reason}",
                rank=self.rank,
                op="connect" if core is None else "reshard",
                phase="connect" if core is None else "agree",
            )
            self._error = _as_first_cause(error, self.rank)
        self.abort(reason)
        command.begin(None, error)
        for each in queue:
            each.begin(None, self._error)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._thread is not threading.current_thread():
                    return  # given up
                self._running = self._queue.popleft() if self._queue else None
                if self._running is None:
                    self._thread = None
                    return
                command = self._running
            error = self._error
            if self._core is None and error is None:
                try:
                    if not self._take(self._meet(command.deadline)):
                        return
                except Shortage as short:  # of this command alone: the others know, and meet again
                    error = short.error
                except Exception as cause:
                    error = self._error = self._error or cause
            core = self._core
            if core is None:
                command.begin(None, error)
                self._error = _as_first_cause(self._error, self.rank)
            else:
                command.begin(core, None)

    def _take(self, core: _C.GroupCore) -> bool:
        """The group has come up, unless its thread was given up meanwhile."""
        with self._lock:
            mine = self._thread is threading.current_thread()
            if mine:
                self._core = core
        if not mine:
            core.shutdown()
        elif self._closing:  # abort() came while it connected and found nothing to abort
            core.abort(self._closing)
        return mine

    def _life(self) -> Any:
        """The store of this life of the group. All members come to each life exactly once, so counting
        arrivals tells lives apart even where they share a store."""
        store = self._open_store()
        arrivals = int(store.add(f"{self.name}/arrivals", 1))
        return dist.PrefixStore(f"{self.name}/{(arrivals - 1) // len(self.ranks)}", store)

    def _meet(self, deadline: float) -> _C.GroupCore:
        """Waits until every member is here, then connects. Raises Shortage where a rank has run out of
        something before that: the members may meet again, in another life."""
        what = f"connecting the private group of ranks {list(self.ranks)}"
        where: Any = {"rank": self.rank, "op": "connect", "phase": "connect"}
        known = Watches(self._known)
        try:
            store = self._life()
            board = Board(store, self.rank)
            try:
                if few := few_descriptors():
                    raise MeshcastError(few, **where)
                threads = _C.WorkThread()  # kept by the core as well
                memory = LocalMemory(len(self.ranks))
                names, told = interfaces()
                network = Network(names, self.timeout)
            except Exception as error:
                short = as_shortage(error, **where)
                if short is None:
                    raise
                if not refuse_meeting(store, str(short)):
                    raise short from error
                raise Shortage(short) from error
            known.watch_by(lambda text: network.watch(json.loads(text)[3]))
            mine = json.dumps([host_identity(), memory.offer, told, network.offer()])
            said = meet(board, self.ranks, mine, deadline, lambda: self._closing, known)
        except (MeshcastError, Shortage):
            raise
        except Exception as error:
            short = as_shortage(error, **where)
            raise short or self._meeting_failed(error, what, known, deadline) from error
        self.control = dist.PrefixStore("control", store)
        try:
            return self._connect(board, memory, network, said, known, deadline)
        except Exception as error:
            failure = error
            if not isinstance(error, MeshcastError):
                failure = as_shortage(error, **where) or self._meeting_failed(error, what, known, deadline)
            # The others have met this rank and would wait for it.
            with suppress(Exception):
                _C.post_cause(self.control, self.rank, failure)
            if failure is error:
                raise
            raise failure from error
        finally:
            del threads

    def _connect(
        self,
        board: Board,
        memory: LocalMemory,
        network: Network,
        said: dict[int, str],
        watches: Watches,
        deadline: float,
    ) -> _C.GroupCore:
        members: dict[int, list[Any]] = {rank: json.loads(text) for rank, text in said.items()}
        hosts: dict[int, str] = {rank: member[0] for rank, member in members.items()}
        count = agreed_count({rank: member[2] for rank, member in members.items()}, self.rank)
        self.topology = Topology.from_hosts(hosts, nics_per_host=count)
        self.interfaces = count
        self.board = Board(dist.PrefixStore("board", board.store), self.rank)
        offers = {rank: member[1] for rank, member in members.items() if member[0] == hosts[self.rank]}
        looked = time.monotonic()

        def lost() -> tuple[int, str] | None:
            """Who of those that have met has gone, as far as this rank sees or another told; raises where one
            has given up for another reason."""
            nonlocal looked
            if time.monotonic() - looked < LOOK:
                return None
            looked = time.monotonic()
            head, _, cause = self._posted().partition("\n")
            if not cause:
                return watches.lost(board, self.ranks)
            kind, _, peer = head.split()
            if kind == _PEER_LOST and int(peer) != self.rank:
                return int(peer), cause
            raise AbortedError(f"rank {self.rank}: {cause}", rank=self.rank, op="connect", phase="connect")

        memory.meet(board, self.ranks, offers, deadline, lost)
        transport = network.transport(
            {rank: members[rank][3] for rank in self.ranks},
            first_rails(self.ranks, self.topology, count),
            self.rank,
            board.store,
            deadline,
        )
        self._known.update(said)
        log.info("rank %d: connected with ranks %s", self.rank, self.name)
        return _C.GroupCore(
            transport,
            self.control,
            list(self.ranks),
            self.rank,
            self.name,
            memory.settle(board, deadline, lost),
        )

    def _meeting_failed(
        self, error: Exception, what: str, watches: Watches, deadline: float
    ) -> MeshcastError:
        """For what torch or the system raised. The process of the store may be a member's."""
        if isinstance(error, NotPostedError) and time.monotonic() >= deadline:
            return DeadlineExceededError(
                f"rank {self.rank}: {what} did not finish in time: {error}",
                rank=self.rank,
                peer=error.ranks[0],
                op="connect",
                phase="connect",
            )
        lost = watches.lost_soon(self.ranks, self.rank)
        return store_failed(error, what, lost, rank=self.rank, op="connect", phase="connect")

    def watch(self, launch: Completable) -> None:
        """Remembers a transfer in flight, so that close() can let it finish."""
        self._flying.append(launch)
        if len(self._flying) > self._flying_limit:
            self._flying = [other for other in self._flying if not other.is_completed()]
            self._flying_limit = 2 * len(self._flying) + 64

    def cause(self) -> str | None:
        """Why the group was aborted, by this rank or another; asks the store. None while it is whole."""
        core = self._core
        found = None if core is None else core.error()
        return found if found is not None else self.posted_cause()

    def posted_cause(self) -> str | None:
        """The cause that a rank of the group posted in the store; None where there is none. For the control
        thread: a store that does not answer holds it up."""
        return self._posted().partition("\n")[2] or None

    def _posted(self) -> str:
        """As csrc/c10d/bulletin.cpp encodes it: kind, reporter and peer, then a line with the text."""
        try:
            if self.control is None or not self.control.check(["cause"]):
                return ""
            return str(self.control.get("cause").decode(errors="replace"))
        except Exception:  # the store has gone: it has nothing more to say, and the limit holds
            return ""

    def interrupted(self, op: str, raised: BaseException) -> None:
        """A handler of a signal has ended a wait of this rank: the others would wait for it."""
        text = f": {raised}" if str(raised) else ""
        self.abort(f"rank {self.rank} was interrupted in {op} by {type(raised).__name__}{text}")

    def abort(self, reason: str) -> None:
        """Fails this group's calls, here and on the other ranks, with AbortedError(reason). Never blocks;
        idempotent."""
        if self._born != forks.count:
            return
        self._closing = self._closing or reason
        core = self._core
        if core is not None:
            core.abort(reason)
        for attachment in list(self.attached.values()):
            attachment.abort(reason)

    def close(self, limit: float) -> None:
        """Ends the group in any state. Transfers in flight may finish until `limit`, by time.monotonic(): a
        rank that only sends returns from its call before its peers have the data. Queued commands fail."""
        while time.monotonic() < limit and not all(launch.is_completed() for launch in self._flying):
            time.sleep(0.002)
        self._closing = self._closing or "the process group was destroyed"
        for attachment in list(self.attached.values()):
            attachment.close()  # also a start that holds the lock while NCCL connects
        with self._lock:
            queue, self._queue = self._queue, deque()
            thread = self._thread
            self._error = self._error or AbortedError(self._closing, rank=self.rank, phase="connect")
        for command in queue:
            command.begin(None, self._error)
        if self._core is not None:
            self._core.shutdown()
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(_JOIN_LIMIT, limit - time.monotonic()))
        # Compiled transfers refer to their group. Left in this cycle, the communicators would keep their
        # threads, which look for messages 100 times a second, until the garbage collector comes by.
        with self._lock:
            self._core = None
            self.attached.clear()
        self._flying.clear()
        self.transfers.clear()


class _Refusal:
    """A rank refused its arguments of a call. Never the caller's own thread: the store may hold it up."""

    def __init__(self, lane: int, ordinal: int | None, deadline: float, message: str) -> None:
        self.lane, self.ordinal, self.deadline = lane, ordinal, deadline
        self._message = message

    def ready(self) -> bool:
        return False

    def begin(self, core: _C.GroupCore | None, error: Exception | None) -> None:  # noqa: ARG002
        if core is not None and self.ordinal is not None:
            core.reject(self.lane, self.ordinal, self._message)


class _Connection:
    """The group comes up, if it is not; counted in no lane."""

    lane = 0
    ordinal: int | None = 0

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.done = threading.Event()
        self.error: Exception | None = None

    def ready(self) -> bool:
        return True

    def begin(self, core: _C.GroupCore | None, error: Exception | None) -> None:  # noqa: ARG002
        self.error = error
        self.done.set()


def _group_name(ranks: tuple[int, ...]) -> str:
    text = ",".join(map(str, ranks))
    return text if len(text) <= 40 else f"{text[:32]}..{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _as_first_cause(error: Exception | None, rank: int) -> Exception | None:
    """Calls after the failing one report its cause, as an aborted group does."""
    if error is None or isinstance(error, AbortedError):
        return error
    return AbortedError(f"rank {rank}: the private group failed before: {error}", rank=rank, phase="connect")
