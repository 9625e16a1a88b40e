"""Muster: all ranks of a group say through the store that they are ready, before they do something together
that cannot be called off.

Ranks that call for it come when they like; the others answer. So nobody waits in a transfer for a rank that
is busy, frozen or not there: it is known before, and nothing has begun. A muster asks the store a number of
questions that does not grow with the ranks, but for naming those that are missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..base.observe import Flight, Members
from ..base.whereabouts import Site
from ..errors import (
    AbortedError,
    DeadlineExceededError,
    MeshcastError,
    PeerLostError,
    PlanMismatchError,
)
from .board import FIRST_PAUSE, LONGEST_PAUSE, SLICE, Board, Watches
from .network import Network
from .rails import interfaces

__all__ = ["Late", "Muster"]

_PREFIX = "muster"
_DAY = timedelta(days=1)
_GO, _LATE = "go", "late"  # verdicts of one muster; the others end all that would follow
_ENDS: dict[str, type[MeshcastError]] = {
    "closed": AbortedError,
    "failed": AbortedError,
    "refused": PlanMismatchError,
    "lost": PeerLostError,
}


class Late(Exception):  # noqa: N818  no error of its own: it never leaves the package
    """Some rank was not ready in time. Nothing has begun, and later musters may succeed."""

    def __init__(self, error: DeadlineExceededError) -> None:
        super().__init__(str(error))
        self.error = error


class Muster:
    """One after the other, numbered alike on all ranks. Each rank uses it from one thread at a time.

    The ranks that call for a muster take part in every one. Those that answer may be any number behind: they
    find the verdicts that they have missed, one by one.
    """

    def __init__(
        self,
        name: str,
        store: Callable[[], dist.Store],
        another_store: Callable[[], dist.Store],
        ranks: Sequence[int],
        rank: int,
        limit: float,
        within: str,
    ) -> None:
        """name: for errors. store: the connection of the process group; another_store: makes one that
        nothing else uses. limit: of what connects with a rank to look after it, seconds. within: the process
        group, for the flight record."""
        self.number = 0
        self.ended: MeshcastError | None = None  # what has ended them all, once this rank has heard of it
        self._here: dict[int, str] = {}  # what ranks said of themselves
        self._name, self._limit = name, limit
        self._open_store, self._open_another = store, another_store
        self._waiting: Any = None  # the store, where it may be waited in
        self._ranks, self._rank = sorted(ranks), rank
        self._members = Members(name, tuple(self._ranks), f"{within}/{_PREFIX}")
        self._first = 0  # whose keys are in the store

    def open(self, calls: bool) -> None:
        """Tells the others that this rank is here, and does not wait for them. calls: it is one of those that
        call for musters."""
        store = dist.PrefixStore(_PREFIX, self._open_store())
        # A store may outlive the process group. Every life adds as many arrivals as there are ranks.
        self._life = (int(store.add("arrivals", 1)) - 1) // len(self._ranks)
        self._store: Any = dist.PrefixStore(str(self._life), store)
        self._board = Board(self._store, self._rank)
        self._network = Network(interfaces()[0], self._limit)
        self._watches = Watches(self._here, lambda text: self._network.watch(json.loads(text)["network"]))
        self._board.post("here", json.dumps({"calls": calls, "network": self._network.offer()}))

    def called(self) -> bool:
        """Whether somebody has called for the next muster, or ended them all."""
        return self._has(f"called/{self.number}")

    def wait_for_call(self) -> None:
        """Returns once that is so, or a day has passed. For a thread of its own, which needs no CPU time
        meanwhile; what ends it is `end`, of this rank or another."""
        if self._waiting is None:
            store = dist.PrefixStore(_PREFIX, self._open_another())
            self._waiting = dist.PrefixStore(str(self._life), store)
        with suppress(dist.DistStoreError):  # torch prints a warning each time that a wait comes to its limit
            self._waiting.wait([f"called/{self.number}"], _DAY)

    def answer(self) -> None:
        """This rank is ready for the next one, which also calls for it. It has to wait for the verdict."""
        number = self.number
        self._board.post("at", str(number))
        if int(self._store.add(f"called/{number}", 1)) < len(self._ranks):
            return
        if self._settle(number, {"kind": _GO})["kind"] == _GO:
            for past in range(self._first, number):  # all ranks have been through these
                self._store.delete_key(f"called/{past}")
                self._store.delete_key(f"verdict/{past}")

    def verdict(self, deadline: float | None, leaving: Callable[[], str], site: Site | None = None) -> None:
        """Returns once all ranks are ready, and each of them knows.

        deadline: by time.monotonic(), when this rank gives up; None: when others do. leaving(): why it
        leaves for good, "" while it does not. site: the line of the program that wants it, for the flight
        record. Raises Late, or what has ended all musters."""
        flight = Flight("muster", self._members, self._rank, self._name, 0, self.number, site)
        try:
            self._wait(deadline, leaving)
        except BaseException as raised:
            flight.failed(raised.error if isinstance(raised, Late) else raised)
            raise
        flight.ended()

    def _wait(self, deadline: float | None, leaving: Callable[[], str]) -> None:
        begin, number, pause = time.monotonic(), self.number, FIRST_PAUSE
        looked = begin
        while not self._has(f"verdict/{number}"):
            now = time.monotonic()
            if why := leaving():
                self.end("failed", why)
            elif deadline is not None and now >= deadline:
                self._settle(number, self._late(self._missing(), now - begin))
            elif deadline is not None and now - looked > SLICE:
                self.look_after(self._missing())
                looked = time.monotonic()
            else:
                time.sleep(pause)
                pause = min(pause * 1.5, LONGEST_PAUSE)
        said = json.loads(self._store.get(f"verdict/{number}"))
        self.number = number + 1
        if said["kind"] == _GO:
            self._first = number
            self._find()
        elif said["kind"] == _LATE:
            raise Late(
                DeadlineExceededError(
                    f"rank {self._rank}: {said['text']}",
                    rank=self._rank,
                    peer=said["peer"],
                    op=self._name,
                    phase="agree",
                    elapsed=said["elapsed"],
                    limit=said["elapsed"],
                )
            )
        else:
            self.ended = self._ending(said)
            raise self.ended

    def _find(self) -> None:
        """Reads what ranks say of themselves that have come meanwhile."""
        absent = [rank for rank in self._ranks if rank not in self._here]
        come = [rank for rank in absent if self._board.has("here", rank)]
        if come:
            self._here.update(self._board.read("here", come))

    def callers(self) -> list[int]:
        """Ranks that call for musters, as far as they are here."""
        self._find()
        return [rank for rank in sorted(self._here) if json.loads(self._here[rank])["calls"]]

    def gone(self) -> tuple[int, str] | None:
        """A rank that has gone, and why: asked where the store does not answer."""
        return self._watches.lost_soon(self._ranks, self._rank)

    def look_after(self, ranks: Sequence[int]) -> None:
        """Ends all musters where one of these ranks has gone."""
        lost = self._watches.lost_of(self._board, [rank for rank in ranks if rank != self._rank], "here")
        if lost is not None:
            text = f"rank {self._rank} lost rank {lost[0]}: {lost[1]}. Look at that rank's own output first."
            self.end("lost", text, lost[0])

    def end(self, kind: str, text: str, peer: int | None = None) -> None:
        """No muster succeeds after this. kind: "closed", "failed", "refused" or "lost". The other ranks get
        its error; so does this one, from the next one that it waits for."""
        number = self.number
        verdict = {"kind": kind, "text": text, "peer": self._rank if peer is None else peer}
        while self._settle(number, verdict)["kind"] in (_GO, _LATE):
            number += 1
        self._store.add(f"called/{number}", 0)  # wakes who waits for a call

    def _missing(self) -> list[int]:
        """Ranks that are not ready for the next one."""
        there = [rank for rank in self._ranks if self._board.has("at", rank)]
        at = self._board.read("at", there)
        return [rank for rank in self._ranks if rank not in at or int(at[rank]) != self.number]

    def _late(self, missing: list[int], elapsed: float) -> dict[str, Any]:
        if not missing:  # the last one has come, and not yet said so
            return {"kind": _GO}
        texts = []
        callers = self.callers()
        away = [rank for rank in missing if rank not in self._here]
        silent = [rank for rank in missing if rank not in away and rank not in callers]
        for ranks, what in (
            (away, "have not constructed theirs"),
            ([rank for rank in missing if rank in callers], "have not called"),
            (silent, "are not ready: busy, stuck, or frozen"),
        ):
            if ranks:
                texts.append(f"ranks {ranks} {what}")
        text = f"{self._name}: after {elapsed:.1f} s {', and '.join(texts)}. Nothing was moved; call again"
        return {"kind": _LATE, "text": text, "peer": missing[0], "elapsed": elapsed}

    def _ending(self, said: dict[str, Any]) -> MeshcastError:
        return _ENDS[said["kind"]](
            f"rank {self._rank}: {self._name}: {said['text']}",
            rank=self._rank,
            peer=None if said["peer"] == self._rank else said["peer"],
            op=self._name,
            phase="agree",
        )

    def _settle(self, number: int, verdict: dict[str, Any]) -> dict[str, Any]:
        """The verdict that counts: this one, or one given before."""
        said = self._store.compare_set(f"verdict/{number}", "", json.dumps(verdict))
        return dict(json.loads(said))

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))
