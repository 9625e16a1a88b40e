"""How a rank tells the others that it refused a call: those whose call it is, as far as its arguments say;
else those that are seen to wait for this rank.

A rank that waits for others to meet writes in the store which group meets. One that waits for an agreement,
or in a transfer, has written so for its group. What nobody waits for stays open: it is taken for a call of
the group that this rank uses next, as it is where all ranks refused their own.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import MeshcastError, PlanMismatchError
from .board import refuse_meeting

if TYPE_CHECKING:
    from .. import _C

__all__ = [
    "CHANGED",
    "NO_LANE",
    "Connection",
    "OpenRefusal",
    "OpenRefusals",
    "Refusal",
    "Retraction",
    "changed_error",
    "meeting_for",
    "refused_error",
]

NO_LANE = -1  # of commands that are counted in none
CHANGED = "was changed in place before wait()"  # in the text of a refusal: the call has run, maybe to its end

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.05  # seconds between two looks for ranks that wait


def meeting_for(lane: int, ordinal: int) -> str:
    """What a command calls the meeting of its ranks."""
    return "prepare" if lane == NO_LANE else f"{lane}.{ordinal}"


_TOLD = 0.7  # seconds that a refusing call waits until others are told, at most
_HOLD = 0.6  # seconds that a refusing call waits for a first answer: then later calls know whose it was
_JOIN_LIMIT = 0.5  # seconds that these looks get to end when their process group does
_NONE = "\x01none"
_lock = threading.Lock()  # of all open refusals: one may be open in several process groups


class Group(Protocol):
    """What is used of a private group."""

    rank: int
    ranks: tuple[int, ...]

    @property
    def life(self) -> int: ...
    def next_life(self) -> Any: ...
    def left(self, core: _C.GroupCore, lane: int, ordinal: int) -> bool: ...
    def refuse_call(self, error: Exception, timeout: float, *, prepares: bool) -> Refusal: ...
    def is_awaited(self) -> bool: ...
    def is_up(self) -> bool: ...
    def was_used(self) -> bool: ...
    def is_untouched(self) -> bool: ...


class Refusal:
    """Command of a group: this rank refused its arguments of a call, or, in no lane, to prepare. Never in the
    caller's own thread: the store may hold it up. Where the ranks have yet to meet, those that do raise, and
    may meet again."""

    refusal: Exception | None = None
    meets = False

    def __init__(
        self,
        group: Group,
        lane: int,
        ordinal: int | None,
        deadline: float,
        message: str,
        *,
        agreed: bool = False,
    ) -> None:
        """agreed: this rank has agreed on the call with the others."""
        self.lane, self.ordinal, self.deadline = lane, ordinal, deadline
        self._group, self._message, self._agreed = group, message, agreed
        self._over = threading.Event()

    def ready(self) -> bool:
        return False

    def wait(self) -> None:
        """Returns once all ranks can know of it, or soon: a call made at once could else be over before."""
        self._over.wait(_TOLD)

    def begin(self, core: _C.GroupCore | None, error: Exception | None) -> bool:
        again = self._begin(core, error)
        if not again:
            self._over.set()
        return again

    def _begin(self, core: _C.GroupCore | None, error: Exception | None) -> bool:
        assert self.ordinal is not None  # submit() has counted it
        if core is not None and self.lane != NO_LANE:
            core.refuse(self.lane, self.ordinal, self._message, self._agreed)
            return self._group.left(core, self.lane, self.ordinal)
        if core is None and error is None:
            with suppress(Exception):  # where the store does not answer, the others wait to their limits
                what = meeting_for(self.lane, self.ordinal)
                refuse_meeting(self._group.next_life(), self._message, by=self._group.rank, what=what)
        return False


class Retraction(Refusal):
    """Command of a group: the same of a call that this rank has begun, and that may have ended: what it moved
    is not what the source was at the call. began: in which life of the group; in another one there is nobody
    to tell."""

    def __init__(
        self,
        group: Group,
        lane: int,
        ordinal: int,
        deadline: float,
        message: str,
        began: Callable[[], int | None],
    ) -> None:
        super().__init__(group, lane, ordinal, deadline, message, agreed=True)
        self._began = began

    def _begin(self, core: _C.GroupCore | None, error: Exception | None) -> bool:
        if core is not None and self._began() == self._group.life and core.error() is None:
            super()._begin(core, error)
        return False


class Connection:
    """Command of a group: it comes up, if it is not. Counted in no lane."""

    lane = NO_LANE
    ordinal: int | None = 0
    refusal: Exception | None = None
    meets = True

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.done = threading.Event()
        self.error: Exception | None = None

    def ready(self) -> bool:
        return True

    def begin(self, core: _C.GroupCore | None, error: Exception | None) -> bool:  # noqa: ARG002
        self.error = error
        self.done.set()
        return False


@dataclass(eq=False)
class OpenRefusal:
    """A refusal of which it is not known whose call it was. known: ranks that are in it. prepares: it was no
    call, but prepare(). limit: seconds for what tells it."""

    error: Exception
    known: frozenset[int]
    prepares: bool
    limit: float
    closed: threading.Event = field(default_factory=threading.Event)
    told: Refusal | None = None  # by which it was closed


class OpenRefusals:
    """Those of one process group, and which of its groups meet here."""

    def __init__(
        self,
        store: Callable[[], Any],
        ranks: Iterable[int],
        rank: int,
        groups: Callable[[], list[Group]],
        group_of: Callable[[Sequence[int]], Group],
    ) -> None:
        """groups: the private groups that there are; group_of: makes one."""
        self.open: list[OpenRefusal] = []
        self._searches: dict[OpenRefusal, threading.Thread] = {}
        self._store, self._rank = store, rank
        self._others = [other for other in ranks if other != rank]
        self._groups, self._group_of = groups, group_of
        self._meetings: dict[tuple[int, ...], bool] = {}
        self._meetings_lock = threading.Lock()

    def add(self, refusal: OpenRefusal, *, keeps: bool) -> None:
        """Looks for ranks that wait for this one, in the background, and tells those. keeps: what nobody has
        waited for by the next call is taken for one of that call's group."""
        if keeps:
            self.open.append(refusal)
        thread = threading.Thread(target=self._search, args=(refusal,), name="meshcast-refusal", daemon=True)
        self._searches[refusal] = thread
        with suppress(RuntimeError):  # without a thread, the next call tells
            thread.start()

    def close(self) -> None:
        """Nobody is looked for any more. A thread that the store holds up is left behind."""
        searches = dict(self._searches)
        for refusal in searches:
            refusal.closed.set()
        end = time.monotonic() + _JOIN_LIMIT
        for thread in searches.values():
            with suppress(RuntimeError):  # it was never started, or is this one
                thread.join(max(end - time.monotonic(), 0.0))

    @staticmethod
    def settle(refusal: OpenRefusal, where: Sequence[OpenRefusals]) -> None:
        """Returns once it has been told, or soon. Where nobody is seen to wait, but there is only one group
        that can be meant, that is told, if it is up: others may see one up that is between two lives here."""
        if not refusal.closed.wait(_HOLD) and not refusal.prepares:
            with _lock:
                meant = [(each, it) for each in where for it in each._fitting(refusal) if it.was_used()]
                if len(meant) == 1 and meant[0][1].is_up() and not refusal.closed.is_set():
                    each, group = meant[0]
                    each._tell(refusal, group)
                    each._forget_closed()
        if refusal.told is not None:
            refusal.told.wait()

    def assume(self, group: Group) -> None:
        """Before a call of a group: what is open was meant for it, where it may have been."""
        with _lock:
            for refusal in list(self.open):
                if refusal.closed.is_set() or not refusal.known.issubset(group.ranks):
                    continue
                if refusal.prepares and not group.is_untouched():
                    refusal.closed.set()  # nobody can wait for that any more
                else:
                    self._tell(refusal, group)
            self._forget_closed()

    def _fitting(self, refusal: OpenRefusal) -> list[Group]:
        return [group for group in self._groups() if refusal.known.issubset(group.ranks)]

    def _tell(self, refusal: OpenRefusal, group: Group) -> None:
        refusal.told = group.refuse_call(refusal.error, refusal.limit, prepares=refusal.prepares)
        refusal.closed.set()

    def _forget_closed(self) -> None:
        self.open[:] = [refusal for refusal in self.open if not refusal.closed.is_set()]

    def _search(self, refusal: OpenRefusal) -> None:
        try:
            self._search_until_closed(refusal)
        finally:
            self._searches.pop(refusal, None)

    def _search_until_closed(self, refusal: OpenRefusal) -> None:
        end, pause = time.monotonic() + refusal.limit, _FIRST_PAUSE
        while not refusal.closed.wait(pause) and time.monotonic() < end:
            try:
                group = self._awaiting(refusal)
            except Exception:  # the store has gone, or the process group
                return
            if group is not None:
                with _lock, suppress(Exception):
                    if not refusal.closed.is_set():
                        self._tell(refusal, group)
                        self._forget_closed()
                return
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def _awaiting(self, refusal: OpenRefusal) -> Group | None:
        """A group of which a rank waits for this one."""
        if not refusal.prepares:
            for group in self._fitting(refusal):
                if group.is_awaited():
                    return group
        for ranks, prepares in self._others_meetings():
            fits = prepares == refusal.prepares and self._rank in ranks and refusal.known.issubset(ranks)
            if fits:
                group = self._group_of(ranks)
                if group.is_untouched():
                    return group
        return None

    def meets(self, ranks: tuple[int, ...], *, prepares: bool) -> None:
        """A group has waited here for some time for its ranks to meet. prepares: for prepare()."""
        with self._meetings_lock:
            self._meetings[ranks] = prepares
            self._write_meetings()

    def has_met(self, ranks: tuple[int, ...]) -> None:
        """Or does not meet any more."""
        if ranks in self._meetings:
            with self._meetings_lock, suppress(Exception):
                del self._meetings[ranks]
                self._write_meetings()

    def _write_meetings(self) -> None:
        store, key = self._store(), f"meeting/{self._rank}"
        if self._meetings:
            store.set(key, json.dumps(list(self._meetings.items())))
        else:
            store.delete_key(key)

    def _others_meetings(self) -> Iterable[tuple[Sequence[int], bool]]:
        store = self._store()
        for other in self._others:
            # In one question, see csrc/core/group/bulletin.cpp.
            text = store.compare_set(f"meeting/{other}", _NONE, _NONE).decode()
            if text != _NONE:
                yield from json.loads(text)


def refused_error(
    rank: int, name: str, ordinal: int, refused: tuple[int, int, int, str], lane: int
) -> PlanMismatchError:
    """Of a call that came to a life of its group that a refused call has ended."""
    _, number, other, text = refused
    what = (
        "refused its arguments" if (lane, ordinal) == refused[:2] else f"refused call {number} of this group"
    )
    return PlanMismatchError(
        f"rank {rank}: call {ordinal} of {name}: rank {other} {what}: {text}",
        rank=rank,
        peer=None if other == rank else other,
        op="reshard",
        sequence=ordinal,
        phase="agree",
    )


def changed_error(rank: int, name: str, refused: tuple[int, int, int, str]) -> MeshcastError:
    """The error of a call that ended here, whose source another rank changed while it may have travelled."""
    _, number, other, text = refused
    return MeshcastError(
        f"rank {rank}: call {number} of {name}: rank {other} says: {text} What that call gave on this rank "
        "may mix them as well.",
        rank=rank,
        peer=other,
        op="reshard",
        sequence=number,
        phase="transfer",
    )
