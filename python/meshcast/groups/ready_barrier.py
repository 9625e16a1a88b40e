"""ReadyBarrier: all ranks of a group say through the store that they are ready, before they do something
together that cannot be called off.

Ranks that call for it come when they like; the others answer. So no rank waits in a transfer for one that is
busy, frozen or absent: it is known before, and nothing has begun. A barrier asks the store a number of
questions that does not grow with the ranks, except for naming those that are missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from .. import _C, errors
from ..base.observe import Flight, Members, Site, WaitNotice
from ..base.wire import pack, unpack
from ..errors import AbortedError, Caller, DeadlineExceededError, MeshcastError, PeerLostError
from .network import Network, interfaces
from .store import store_of_generation

__all__ = ["Late", "ReadyBarrier"]

_PREFIX = "ready"
_LOOK = 0.25  # seconds between two checks for ranks that have exited
_DAY = timedelta(days=1)
# Verdicts of one barrier. The others end all that would follow, and are named as their errors.
_GO, _LATE = "go", DeadlineExceededError.__name__


class _Here(NamedTuple):
    """Facts of a rank that has come. calls: it is one of those that call for barriers."""

    calls: bool
    network: str


class _Verdict(NamedTuple):
    """The end of a barrier. kind: _GO, or the name of an error. peer: the rank that it is about, or that
    decided it."""

    kind: str
    text: str
    peer: int
    elapsed: float | None


class Late(Exception):  # noqa: N818  no error of its own: it never leaves the package
    """Some rank was not ready in time. Nothing has begun, and later barriers may succeed."""

    def __init__(self, error: DeadlineExceededError) -> None:
        super().__init__(str(error))
        self.error = error


class ReadyBarrier:
    """One after the other, numbered the same on all ranks. Each rank uses it from one thread at a time.

    The ranks that call for a barrier take part in every one. Those that answer may be any number behind: they
    find the verdicts that they have missed, one by one.
    """

    def __init__(
        self,
        name: str,
        store: Callable[[], dist.Store],
        ranks: Sequence[int],
        rank: int,
        limit: float,
        within: str,
    ) -> None:
        """name: for errors. store: the connection of the process group. limit: of what connects with a rank
        to look after it, seconds. within: the process group, for the flight record."""
        self.number = 0
        self.ended: MeshcastError | None = None  # the error that has ended them all, once this rank knows it
        self._here: dict[int, _Here] = {}  # of the ranks that have come
        self._name, self._limit = name, limit
        self._open_store = store
        self._waiting: Any = None  # the store, where it may be waited in
        self._ranks, self._rank = sorted(ranks), rank
        self._members = Members(name, tuple(self._ranks), f"{within}/{_PREFIX}")
        self._first = 0  # whose keys are in the store

    def open(self, calls: bool) -> None:
        """Notifies the others that this rank is here, and does not wait for them. calls: it is one of those
        that call for barriers."""
        store = dist.PrefixStore(_PREFIX, self._open_store())
        self._store: Any = store_of_generation(store, len(self._ranks))
        self._conversation = _C.Conversation(self._store, self._rank, len(self._ranks))
        self._network = Network(interfaces()[0], self._limit)
        self._known = _C.KnownOffers()
        self._watches = _C.Watches(self._known, lambda text: self._network.watch(unpack(_Here, text).network))
        self._conversation.say("here", pack(_Here(calls, self._network.offer())))

    def agreed(self, topic: str, proposal: str) -> str:
        """Returns the text that all ranks have of this topic: that of the first one to propose."""
        return self._conversation.verdict(topic, proposal)

    def called(self) -> bool:
        """Returns whether a rank has called for the next barrier, or has ended them all."""
        return bool(self._conversation.verdict(self._call))

    @property
    def _call(self) -> str:
        return f"called/{self.number}"

    def await_call(self, deadline: float, leaving: Callable[[], None]) -> bool:
        """Waits until that is so, and returns whether it is. Looks after those that call. leaving(): raises
        where this rank takes no part any longer."""

        def look() -> None:
            leaving()
            self.look_after(self.callers())

        return bool(self._conversation.await_verdict(self._call, deadline, look, _LOOK))

    def wait_for_call(self) -> None:
        """The same for a day, without a look. For a thread of its own, which needs no CPU time
        meanwhile; what ends it is `end`, of this rank or another."""
        if self._waiting is None:
            self._waiting = self._store.clone()
        with suppress(dist.DistStoreError):  # torch prints a warning each time that a wait comes to its limit
            self._waiting.wait([self._call], _DAY)

    def answer(self) -> None:
        """This rank is ready for the next one, which also calls for it. It has to wait for the verdict."""
        number = self.number
        self._conversation.say("at", str(number))
        if self._conversation.count(self._call, 1) < len(self._ranks):
            return
        if self._settle(number, _GO).kind == _GO:
            for past in range(self._first, number):  # all ranks have been through these
                self._conversation.erase(f"called/{past}")
                self._conversation.erase(f"verdict/{past}")

    def verdict(self, deadline: float | None, leaving: Callable[[], str], site: Site | None = None) -> None:
        """Returns once all ranks are ready, and each of them knows.

        deadline: by time.monotonic(), when this rank gives up; None: when others do. leaving(): why it
        leaves for good, "" while it does not. site: the line of the program that wants it, for the flight
        record. Raises Late, or what has ended all barriers."""
        flight = Flight("barrier", self._members, self._rank, self._name, 0, self.number, site)
        try:
            self._wait(deadline, leaving)
        except BaseException as raised:
            flight.failed(raised.error if isinstance(raised, Late) else raised)
            raise
        flight.ended()

    def _wait(self, deadline: float | None, leaving: Callable[[], str]) -> None:
        begin = looked = time.monotonic()
        number = self.number
        notice = WaitNotice(self._rank, f"barrier call {number} of {self._name}")

        def look() -> None:
            nonlocal looked
            notice.look(self._missing)
            if why := leaving():
                self.end(AbortedError, why)
            elif deadline is not None and time.monotonic() - looked > _LOOK:
                self.look_after(self._missing())
                looked = time.monotonic()

        text = self._conversation.await_verdict(f"verdict/{number}", deadline, look)
        said = unpack(_Verdict, text) if text else self._settle_late(time.monotonic() - begin)
        self.number = number + 1
        if said.kind == _GO:
            self._first = number
            self._find()
            return
        late = said.kind == _LATE
        error: Any = Caller(self._name, self._rank, "agree").error(
            getattr(errors, said.kind),
            said.text,
            peer=None if said.peer == self._rank and not late else said.peer,
            elapsed=said.elapsed,
            limit=said.elapsed,
        )
        if late:
            raise Late(error)
        self.ended = error
        raise error

    def _find(self) -> None:
        """Reads what ranks say of themselves that have come meanwhile."""
        for rank in self._ranks:
            if rank not in self._here and (text := self._conversation.heard("here", rank)) is not None:
                self._here[rank] = unpack(_Here, text)
                self._known.add({rank: text})

    def callers(self) -> list[int]:
        """Ranks that call for barriers, as far as they are here."""
        self._find()
        return [rank for rank in sorted(self._here) if self._here[rank].calls]

    def gone(self) -> tuple[int, str] | None:
        """A rank that has exited, and why: asked where the store does not answer."""
        return self._watches.lost_soon(self._ranks, self._rank)

    def look_after(self, ranks: Sequence[int]) -> None:
        """Ends all barriers where one of these ranks has exited."""
        lost = self._watches.lost(self._conversation, "here", ranks, each=True)
        if lost is not None:
            text = f"rank {self._rank} lost rank {lost[0]}: {lost[1]}. Look at that rank's own output first."
            self.end(PeerLostError, text, lost[0])

    def end(self, kind: type[MeshcastError], text: str, peer: int | None = None) -> None:
        """No barrier succeeds after this. The other ranks get an error of this kind; so does this one, from
        the next barrier that it waits for."""
        number = self.number
        while self._settle(number, kind.__name__, text, peer).kind in (_GO, _LATE):
            number += 1
        self._conversation.count(f"called/{number}", 0)  # wakes ranks that wait for a call

    def _missing(self) -> list[int]:
        """Ranks that are not ready for the next one."""
        number = str(self.number)
        return [rank for rank in self._ranks if self._conversation.heard("at", rank) != number]

    def _settle_late(self, elapsed: float) -> _Verdict:
        missing = self._missing()
        if not missing:  # the last one has come, and has not reported it yet
            return self._settle(self.number, _GO)
        callers = self.callers()
        away = [rank for rank in missing if rank not in self._here]
        due = [rank for rank in missing if rank in callers]
        silent = [rank for rank in missing if rank not in away and rank not in callers]
        texts = [
            f"ranks {ranks} {what}"
            for ranks, what in (
                (away, "have not constructed theirs"),
                (due, "have not called"),
                (silent, "are not ready: busy, stuck, or frozen"),
            )
            if ranks
        ]
        text = f"after {elapsed:.1f} s {', and '.join(texts)}. Nothing was moved; call again"
        return self._settle(self.number, _LATE, text, missing[0], elapsed)

    def _settle(
        self, number: int, kind: str, text: str = "", peer: int | None = None, elapsed: float | None = None
    ) -> _Verdict:
        """The verdict that counts: this one, or one given before. peer: by default this rank."""
        mine = _Verdict(kind, text, self._rank if peer is None else peer, elapsed)
        return unpack(_Verdict, self._conversation.verdict(f"verdict/{number}", pack(mine)))
