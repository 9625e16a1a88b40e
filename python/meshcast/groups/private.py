"""Private groups: the ranks of one transfer, with communicators that the user's own calls never share.

A private group is made at its first use, on its own control thread, which also agrees on new transfers and
starts those that have to wait for it. User threads only enqueue. Each private group has a control thread of
its own, so that the order in which ranks meet groups cannot deadlock, and a group that waits for a rank that
never calls holds up no other group. The thread ends whenever its queue is empty.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch.distributed as dist

from .. import _C
from ..base import forks
from ..base.observe import Completable, Members
from ..errors import AbortedError, DeadlineExceededError, MeshcastError, PlanMismatchError
from ..topology import Topology
from .agreements import Agreements
from .board import Board, OtherMeetingError, refuse_meeting
from .meeting import Meeting, Met, cause_in
from .refusals import (
    CHANGED,
    NO_LANE,
    Connection,
    OpenRefusals,
    Refusal,
    Retraction,
    changed_error,
    meeting_for,
    refused_error,
)
from .shortage import Shortage, no_thread

__all__ = ["Attachment", "Command", "PrivateGroup"]

_JOIN_LIMIT = 0.5  # seconds that the control thread gets at the end of a group, at least
# Seconds by which a command may be late: it ends by itself at its deadline, unless the store holds it up.
_STUCK = 1.5


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
    meets: bool  # whether it wants the group to come up
    refusal: Exception | None  # once begun: why this rank takes no part, of which the others do not know

    def ready(self) -> bool:
        """Whether begin() would not have to wait. Only asked while no command is running."""

    def begin(self, core: _C.GroupCore | None, error: Exception | None) -> bool:
        """Does it with the running group; without one, `error` says why. Raises nothing. True: nothing has
        begun, since this life of the group is over, and it is to begin in the next."""


class PrivateGroup:
    """The ranks of both meshes of a transfer. Counts calls per lane alike on every rank."""

    def __init__(
        self,
        store: Callable[[], dist.Store],
        ranks: Sequence[int],
        rank: int,
        timeout: float,
        known: dict[int, str],
        refusals: OpenRefusals,
        within: str = "",
    ) -> None:
        """store: connects where that has not been done. known, refusals: what ranks posted when they met, and
        what this one refused; shared by the groups of a process group. within: what that is called."""
        self.ranks = tuple(ranks)
        self.rank = rank
        self.timeout = timeout
        self.name = _group_name(self.ranks)
        self.members = Members(self.name, self.ranks, within)  # as the flight record shows it
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
        self._refusals = refusals
        self._left: list[tuple[_C.GroupCore, list[Attachment]]] = []  # of lives that refused calls have ended
        self._origin, self._lives = "", 0  # what the stores of its lives are called, and how many there were
        self._refused: tuple[int, int, int, str] | None = None  # the call that ended its last life
        self.news: MeshcastError | None = None  # of a call that has ended here, for the next wait to raise
        self._next: dict[int, int] = {}  # by lane, the first ordinal of this life
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
        is_new = command.ordinal is None or command.lane == NO_LANE
        if self._refusals.open and is_new and not isinstance(command, Refusal):
            self._refusals.assume(self)
        refusal = self._submit(command)
        if refusal is not None:
            refusal.wait()

    def _submit(self, command: Command) -> Refusal | None:
        """What tells the others, where this rank refused the call as it began it."""
        refusal: Refusal | None = None
        with self._lock:
            if command.ordinal is None:
                ordinal = self._ordinals.get(command.lane, 0)
                self._ordinals[command.lane] = ordinal + 1
                command.ordinal = ordinal
            at_once = self._thread is None and self._core is not None and command.ready()
            if at_once and not command.begin(self._core, None):
                if command.refusal is None:
                    return None
                command = refusal = self._refusal_of(command)
            self._queue.append(command)
            if self._thread is not None:
                return refusal
            self._thread = threading.Thread(
                target=self._run, name=f"meshcast-control {self.name}", daemon=True
            )
            try:
                self._thread.start()
                return refusal
            except RuntimeError:  # the next command may get one
                self._thread = None
                self._queue.pop()
        self._begin_without_thread(command)
        return None

    def _begin_without_thread(self, command: Command) -> None:
        """Nobody can do it. All ranks hear of that at once, over what this thread can use, and may go on."""
        what = f"group {self.name} needs one for a call"
        error = no_thread(what, rank=self.rank, op="connect", phase="start")
        with suppress(Exception):  # where the store does not answer, the others wait to their limits
            if self._core is None and self._error is None:
                refuse_meeting(self.next_life(), str(error))
            elif self._core is not None and command.ordinal is not None:
                self._core.reject(command.lane, command.ordinal, str(error))
        command.begin(None, self._error or error)

    def refuse(self, lane: int, error: Exception, timeout: float, *, ordinal: int | None = None) -> Refusal:
        """Tells the other ranks, in the background, that this rank refused its arguments of a call: they
        raise at once instead of waiting. ordinal: of a call that has been counted."""
        limit, backward = time.monotonic() + timeout, lane == _C.AgreedPlan.REVERSE_LANE
        refusal = Refusal(self, lane, ordinal, limit, str(error), agreed=backward)
        self.submit(refusal)
        return refusal

    def refuse_call(self, error: Exception, timeout: float, *, prepares: bool) -> Refusal:
        """The same of a call of lane 0, or of prepare(), which is counted in no lane."""
        if not prepares:
            return self.refuse(0, error, timeout)
        refusal = Refusal(self, NO_LANE, 0, time.monotonic() + timeout, str(error))
        self.submit(refusal)
        return refusal

    @property
    def life(self) -> int:
        """A number for the connections that the ranks have now; a refused call may end them."""
        return self._lives

    def retract(
        self, lane: int, ordinal: int, error: Exception, timeout: float, began: Callable[[], int | None]
    ) -> Refusal:
        """Tells the other ranks, in the background, that the source of a call was changed while it may have
        travelled: those that are in the call raise, and others as they next wait for one of this group.
        began: the life in which the call began, None before that."""
        retraction = Retraction(self, lane, ordinal, time.monotonic() + timeout, str(error), began)
        self.submit(retraction)
        return retraction

    def take_news(self) -> MeshcastError | None:
        """Returns the error of an earlier call that this rank has still to raise, once."""
        news, self.news = self.news, None
        return news

    def _refusal_of(self, command: Command) -> Refusal:
        return Refusal(
            self, command.lane, command.ordinal, command.deadline, str(command.refusal), agreed=True
        )

    def next_ordinal(self, lane: int) -> int:
        """That of the next call that this rank makes."""
        if self._refusals.open:
            self._refusals.assume(self)
        return self._ordinals.get(lane, 0)

    def is_awaited(self) -> bool:
        """Whether another rank waits for the next call of this one, as far as the store knows."""
        core = self._core
        return core is not None and core.awaited_in(0, self._ordinals.get(0, 0))

    def is_up(self) -> bool:
        return self._core is not None

    def was_used(self) -> bool:
        """Whether it is up or a call of it was ever counted: it may be between two lives just now."""
        return self._core is not None or bool(self._ordinals)

    def is_untouched(self) -> bool:
        """Whether this rank is neither in it nor on the way there."""
        return self._core is None and self._thread is None and self._error is None

    def connect(self, timeout: float) -> None:
        """Brings the group up, unless it is; blocks. Raises what keeps it from coming up."""
        command = Connection(time.monotonic() + timeout)
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
            again: bool | None = True
            while again:
                again = self._begin(command)
            if again is None:
                return
            if self._core is not None:
                self._end_left()

    def _begin(self, command: Command) -> bool | None:
        """True: again, in another life. None: this thread was given up."""
        error = self._error
        if self._core is None and error is None and command.meets:
            try:
                if not self._meet(command):
                    return None
            except Shortage as short:  # of this command alone: the others know, and meet again
                error = short.error
            except Exception as cause:
                error = self._error = self._error or cause
        core = self._core
        if core is None:
            command.begin(None, error)
            self._error = _as_first_cause(self._error, self.rank)
            return False
        if command.ordinal is not None and command.ordinal < self._next.get(command.lane, 0):
            command.begin(None, self._skipped(command.ordinal))
            return False
        return bool(command.begin(core, None))

    def runs_here(self) -> bool:
        """Whether this is the control thread, which may wait for the store."""
        return self._thread is threading.current_thread()

    def left(self, core: _C.GroupCore, lane: int, ordinal: int) -> bool:
        """Whether a rank refused a call while it was in flight, so that this life of the group is over; and
        whether this call is none of those that ended with it, but for the next life."""
        refused = core.refused()
        if refused is None:
            return False
        if self._core is core:
            self._core = None
            self._left.append((core, list(self.attached.values())))
            self._refused = refused
            if CHANGED in refused[3] and refused[2] != self.rank:
                self.news = changed_error(self.rank, self.name, refused)
            self.attached = {}
            self.agreements = Agreements()
        return lane != refused[0] or ordinal > refused[1]

    def refused_error(self, core: _C.GroupCore, lane: int, ordinal: int) -> MeshcastError | None:
        """Of a call that ended with it; None where that is not why the core has failed."""
        refused = core.refused()
        return None if refused is None else refused_error(self.rank, self.name, ordinal, refused, lane)

    def begin_again(self, command: Command, core: _C.GroupCore) -> bool:
        """For who waits for a call that failed: whether that was since others had begun anew before it. Then
        it begins once more, unless there are later ones."""
        if command.ordinal is None or not self._may_begin_again(core, command.lane, command.ordinal):
            return False
        self.submit(command)
        return True

    def take_back(self, core: _C.GroupCore, lane: int, ordinal: int) -> bool:
        """The same, for who counts it once more."""
        if not self._may_begin_again(core, lane, ordinal):
            return False
        with self._lock:
            self._ordinals[lane] = ordinal
        return True

    def _may_begin_again(self, core: _C.GroupCore, lane: int, ordinal: int) -> bool:
        with self._lock:
            return self.left(core, lane, ordinal) and self._ordinals.get(lane, 0) == ordinal + 1

    def _end_left(self) -> None:
        """Ends what earlier lives of the group have left."""
        left, self._left = self._left, []
        for core, attached in left:
            for attachment in attached:
                attachment.close()
            core.shutdown()

    def _stated(self) -> dict[int, int]:
        """By lane, the next ordinal of this rank, where ranks may have been through with different ones."""
        if self._refused is None:
            return {}
        with self._lock:
            stated = dict(self._ordinals)
            for command in (self._running, *self._queue):
                if command is not None and command.ordinal is not None and command.lane in stated:
                    stated[command.lane] = min(stated[command.lane], command.ordinal)
            return stated

    def _skipped(self, ordinal: int) -> MeshcastError:
        assert self._refused is not None  # a life begins after it, or with the first calls of all ranks
        _, number, other, text = self._refused
        return PlanMismatchError(
            f"rank {self.rank}: call {ordinal} of {self.name}: other ranks were through with this call when "
            f"they heard that rank {other} refused call {number}, so nothing can be moved by it any more; "
            f"the next one works. Rank {other}: {text}",
            rank=self.rank,
            peer=None if other == self.rank else other,
            op="reshard",
            sequence=ordinal,
            phase="agree",
        )

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

    def next_life(self) -> Any:
        """The store of the next life of this group: all members come to each life exactly once. Counting
        arrivals tells this group from others that shared a store with it before."""
        store = self._open_store()
        if not self._origin:
            arrivals = int(store.add(f"{self.name}/arrivals", 1))
            self._origin = f"{self.name}/{(arrivals - 1) // len(self.ranks)}"
        self._lives += 1
        return dist.PrefixStore(f"{self._origin}/{self._lives}", store)

    def _meet(self, command: Command) -> bool:
        """Brings the group up. False: this thread was given up meanwhile."""
        prepares = isinstance(command, Connection)
        assert command.ordinal is not None  # submit() has counted it
        meeting = Meeting(
            self.ranks,
            self.rank,
            self.name,
            self.timeout,
            self._known,
            lambda: self._closing,
            meeting_for(command.lane, command.ordinal),
            lambda: self._refusals.meets(self.ranks, prepares=prepares),
        )
        met: Met | None = None
        try:
            while met is None:
                with suppress(OtherMeetingError):
                    met = meeting.run(self.next_life, command.deadline, self._stated)
        finally:
            self._refusals.has_met(self.ranks)
        self.topology, self.interfaces = met.topology, met.interfaces
        self.board, self.control, self._next = met.board, met.control, met.first
        return self._take(met.core)

    def watch(self, launch: Completable) -> None:
        """Remembers a transfer in flight, so that close() can let it finish."""
        self._flying.append(launch)
        if len(self._flying) > self._flying_limit:
            self._flying = [other for other in self._flying if not other.is_completed()]
            self._flying_limit = 2 * len(self._flying) + 64

    def cause(self) -> str | None:
        """Why the group was aborted, by this rank or another; asks the store. None while it is whole."""
        core = self._core
        found = None if core is None or core.refused() is not None else core.error()
        return found if found is not None else self.posted_cause()

    def posted_cause(self) -> str | None:
        """The cause that a rank of the group posted in the store; None where there is none. For the control
        thread: a store that does not answer holds it up."""
        return cause_in(self.control).partition("\n")[2] or None

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
        self._end_left()
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


def _group_name(ranks: tuple[int, ...]) -> str:
    text = ",".join(map(str, ranks))
    return text if len(text) <= 40 else f"{text[:32]}..{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _as_first_cause(error: Exception | None, rank: int) -> Exception | None:
    """Calls after the failing one report its cause, as an aborted group does."""
    if error is None or isinstance(error, AbortedError):
        return error
    return AbortedError(f"rank {rank}: the private group failed before: {error}", rank=rank, phase="connect")
