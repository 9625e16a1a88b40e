"""Refused calls: a rank notifies the ranks of the call, as far as its arguments name them; else those that
are seen to wait for this rank.

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
from typing import Any, Protocol

from .. import _C

__all__ = ["NO_LANE", "OpenRefusal", "OpenRefusals"]

NO_LANE = -1  # of prepare(), which is counted in none

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.05  # seconds between two looks for ranks that wait
_HOLD = 0.6  # seconds that a refusing call waits for a first answer: then later calls know whose it was
_JOIN_LIMIT = 0.5  # seconds that these looks get to end when their process group does
_MEETING = "meeting"  # topic of which groups meet
_lock = threading.Lock()  # of all open refusals: one may be open in several process groups


class Group(Protocol):
    """The part of a private group that is used here."""

    rank: int
    ranks: tuple[int, ...]

    def refuse_call(self, error: Exception, timeout: float, *, prepares: bool) -> _C.Refusal: ...
    def is_awaited(self) -> bool: ...
    def is_up(self) -> bool: ...
    def was_used(self) -> bool: ...
    def is_untouched(self) -> bool: ...


@dataclass(eq=False)
class OpenRefusal:
    """A refusal of which it is not known whose call it was. known: ranks that are in it. prepares: it was no
    call, but prepare(). limit: seconds for what tells it."""

    error: Exception
    known: frozenset[int]
    prepares: bool
    limit: float
    closed: threading.Event = field(default_factory=threading.Event)
    told: _C.Refusal | None = None  # by which it was closed


class OpenRefusals:
    """The open refusals of one process group, and which of its groups meet here."""

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
        if self._meetings:
            self._conversation().say(_MEETING, json.dumps(list(self._meetings.items())))
        else:
            self._conversation().forget(_MEETING)

    def _others_meetings(self) -> Iterable[tuple[Sequence[int], bool]]:
        conversation = self._conversation()
        for other in self._others:
            if (text := conversation.heard(_MEETING, other)) is not None:
                yield from json.loads(text)

    def _conversation(self) -> _C.Conversation:
        return _C.Conversation(self._store(), self._rank, len(self._others) + 1)
