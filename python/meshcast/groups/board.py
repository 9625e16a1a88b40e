"""Board: what the ranks of a group tell each other through a store, beside the data path."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import (
    AbortedError,
    DeadlineExceededError,
    MeshcastError,
    PeerLostError,
    PlanMismatchError,
)
from .shortage import Shortage

__all__ = [
    "FIRST_PAUSE",
    "LONGEST_PAUSE",
    "LOOK",
    "SLICE",
    "Board",
    "NotPostedError",
    "OtherMeetingError",
    "Watches",
    "meet",
    "refuse_meeting",
]

FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02  # seconds between two polls of the store
_FEW_RANKS = 16  # as many do not crowd a store, which answers one question at a time; more ask less often
SLICE = 0.25  # seconds of waiting after which there may be a reason to give up, or a signal
LOOK = 0.05  # seconds after which ranks that meet look after each other
_LOOK_SOON = 0.5  # seconds in which a peer that has died is seen
_ERRORS: dict[str, type[MeshcastError]] = {  # by the first word of a verdict
    "aborted": AbortedError,
    "deadline": DeadlineExceededError,
    "lost": PeerLostError,
}
_MET = "met"  # verdict of a meeting: all ranks are here
_SHORT = "short"  # first word of a verdict: a rank has run out of something, and all may meet again
_REFUSED = "refused"  # likewise: a rank refused what the others meet for


class NotPostedError(Exception):
    """Ranks that posted nothing within the limit. elapsed: seconds since the gathering began."""

    def __init__(self, ranks: Sequence[int], elapsed: float) -> None:
        super().__init__(f"ranks {list(ranks)} posted nothing within {elapsed:.1f} s")
        self.ranks = list(ranks)
        self.elapsed = elapsed


class OtherMeetingError(Exception):
    """This life of the group was for another call, which a rank refused: the next one may be for this."""


class Board:
    """Texts by topic and rank. A rank posts without waiting, and gathers with a deadline."""

    def __init__(self, store: Any, rank: int, ranks: int = 1) -> None:
        """ranks: how many may wait in the store at once."""
        self.store = store
        self.rank = rank
        self.longest_pause = LONGEST_PAUSE * max(1, ranks // _FEW_RANKS)

    def post(self, topic: str, text: str) -> None:
        self.store.set(f"{topic}/{self.rank}", text)

    def forget(self, topic: str) -> None:
        """Deletes what this rank posted. Only once nobody reads it any more."""
        self.store.delete_key(f"{topic}/{self.rank}")

    def has(self, topic: str, rank: int) -> bool:
        return bool(self.store.check([f"{topic}/{rank}"]))

    def missing(self, topic: str, ranks: Iterable[int]) -> list[int]:
        """Those that posted nothing."""
        return [rank for rank in ranks if not self.has(topic, rank)]

    def read(self, topic: str, ranks: Sequence[int]) -> dict[int, str]:
        """What ranks posted that have posted."""
        keys = [f"{topic}/{rank}" for rank in ranks]
        many = self.store.multi_get(keys) if self.store.has_extended_api() else map(self.store.get, keys)
        return {rank: text.decode() for rank, text in zip(ranks, many, strict=True)}

    def gather(
        self,
        topic: str,
        ranks: Iterable[int],
        deadline: float,
        check: Callable[[], None] = lambda: None,
        every: float = 0.0,
    ) -> dict[int, str]:
        """Waits until all `ranks` have posted, and returns their texts. check, every: see await_keys().
        Raises NotPostedError past the deadline."""
        begin, wanted = time.monotonic(), list(ranks)
        keys = [f"{topic}/{rank}" for rank in wanted]
        if not self.await_keys(keys, deadline, check, every) and (missing := self.missing(topic, wanted)):
            raise NotPostedError(missing, time.monotonic() - begin)
        return self.read(topic, wanted)

    def await_keys(
        self,
        keys: Sequence[str],
        deadline: float,
        check: Callable[[], None] = lambda: None,
        every: float = 0.0,
    ) -> bool:
        """Waits until all keys are in the store, and returns whether they are. It asks again and again: a
        wait in the store locks out the other users of its connection, and torch prints two lines for each
        that comes to its limit, which has to be short where this rank looks around meanwhile.

        Args:
            deadline: by time.monotonic().
            check: called between questions, at most once in `every` seconds, and before a wait that was too
                short; raises to end it.
        """
        pause, checked = FIRST_PAUSE, time.monotonic()
        while not self.store.check(list(keys)):
            now = time.monotonic()
            if now - checked >= every or now >= deadline:
                check()
                checked = now
            if now >= deadline:
                return False
            time.sleep(min(pause, max(deadline - now, FIRST_PAUSE)))
            pause = min(pause * 2, self.longest_pause)
        return True


class Watches:
    """How a rank that meets others looks after them: it watches the next rank of the group that has come, and
    those before it that it knows from earlier. So each rank is watched by one other, which costs it one
    connection.

    watch(text): from what a rank posted, what tells why it has gone ("" as far as this is not known), or None
    where nothing can. known: what ranks posted in groups of the same process group before.
    """

    def __init__(
        self,
        known: Mapping[int, str],
        watch: Callable[[str], Callable[[], str] | None] = lambda _: None,
    ) -> None:
        self._watch, self._known = watch, known
        self._watches: dict[int, Callable[[], str] | None] = {}

    def watch_by(self, watch: Callable[[str], Callable[[], str] | None]) -> None:
        self._watch = watch

    def lost(self, board: Board, ranks: Sequence[int], topic: str = "member") -> tuple[int, str] | None:
        """A rank that has gone, and why. topic: under which they post what they do."""
        at = ranks.index(board.rank)
        for other in [*ranks[at + 1 :], *ranks[:at]]:
            here = board.has(topic, other)
            if other not in self._watches and (here or other in self._known):
                text = board.read(topic, [other])[other] if here else self._known[other]
                self._watches[other] = self._watch(text)
            found = self._ask(other)
            if found is not None:
                return found
            if here:
                return None
        return None

    def lost_of(self, board: Board, ranks: Iterable[int], topic: str) -> tuple[int, str] | None:
        """The first of these ranks that has gone, as far as that is known by now. topic: as for lost()."""
        for other in ranks:
            if other not in self._watches and board.has(topic, other):
                self._watches[other] = self._watch(board.read(topic, [other])[other])
            found = self._ask(other)
            if found is not None:
                return found
        return None

    def lost_soon(self, ranks: Sequence[int], rank: int) -> tuple[int, str] | None:
        """The same without a store, of all ranks that are known. Waits a little where nobody is seen."""
        watched = []
        for other in ranks:
            if other != rank and other not in self._watches and other in self._known:
                self._watches[other] = self._watch(self._known[other])
            if self._watches.get(other) is not None:
                watched.append(other)
        end = time.monotonic() + _LOOK_SOON
        while watched and time.monotonic() < end:
            for other in watched:
                found = self._ask(other)
                if found is not None:
                    return found
            time.sleep(LONGEST_PAUSE)
        return None

    def _ask(self, other: int) -> tuple[int, str] | None:
        watch = self._watches.get(other)
        why = "" if watch is None else watch()
        return (other, why) if why else None


def refuse_meeting(store: Any, message: str, *, by: int | None = None, what: str = "") -> bool:
    """Ends the meeting for all ranks, which may meet again in another life of the group; message: what this
    rank has run out of, or, given `by` which rank, why it refused `what` (see meet). Answers whether that was
    the verdict."""
    verdict = f"{_SHORT} {message}" if by is None else f"{_REFUSED}/{by}/{what} {message}"
    return bool(store.compare_set("verdict", "", verdict).decode() == verdict)


def meet(
    board: Board,
    ranks: Sequence[int],
    text: str,
    deadline: float,
    closing: Callable[[], str],
    watches: Watches,
    what: str = "",
    waits: Callable[[], None] = lambda: None,
) -> dict[int, str]:
    """Posts `text` and returns everybody's, once all ranks of a group are here.

    The first rank that sees all, or gives up, decides for all: were each to judge for itself, one could leave
    while the others already connect and wait for it until their deadline. closing(): why this rank ends the
    group, "" while it does not. what: they meet for, without a blank. waits(): called once it takes longer
    than a moment. Raises DeadlineExceededError, PeerLostError, AbortedError, Shortage or OtherMeetingError.
    """
    begin, rank, store = time.monotonic(), board.rank, board.store
    late = store.check(["verdict"])
    board.post("member", text)
    here = int(store.add("members", 1))
    others = [other for other in ranks if other != rank]
    pause = FIRST_PAUSE
    told = False
    while True:
        # One question for all: were every rank to ask for each, the store would be what they wait for.
        complete = here == len(ranks) or int(store.add("members", 0)) == len(ranks)
        verdict = store.get("verdict").decode() if store.check(["verdict"]) else ""
        elapsed, left = time.monotonic() - begin, deadline - time.monotonic()
        proposal = ""
        if complete:
            proposal = _MET
        elif closing():
            proposal = f"aborted/{rank} rank {rank}: {closing()}"
        elif left <= 0:
            proposal = (
                f"deadline rank {rank}: ranks {board.missing('member', others)} did not call within "
                f"{elapsed:.1f} s; the group of "
                f"ranks {list(ranks)} exists only once each of them made its first call. Check that every "
                "rank of both meshes makes the same calls in the same order."
            )
        elif not verdict and elapsed > LOOK:
            lost = watches.lost(board, ranks)
            if lost is not None:
                proposal = (
                    f"lost/{lost[0]} rank {rank} lost rank {lost[0]} while the group of ranks {list(ranks)} "
                    f"met, after {elapsed:.1f} s: {lost[1]}. Look at that rank's own output first."
                )
        if not told and elapsed > LOOK:
            told = True
            waits()
        if proposal and not verdict:
            verdict = store.compare_set("verdict", "", proposal).decode()
        if verdict == _MET:
            return board.read("member", ranks)
        if verdict:
            # A rank that waited sees the failure itself, whichever found it first; one that comes later finds
            # a group that has failed.
            kind, message = verdict.split(" ", 1)
            if kind == _SHORT:
                raise Shortage(MeshcastError(message, rank=rank, op="connect", phase="connect"))
            kind, _, gone = kind.partition("/")
            if kind == _REFUSED:
                gone, _, refused = gone.partition("/")
                if refused != what:
                    raise OtherMeetingError
                text = f"rank {rank}: rank {gone} refused its arguments: {message}"
                raise Shortage(
                    PlanMismatchError(text, rank=rank, peer=int(gone), op="connect", phase="connect")
                )
            error = _ERRORS[kind] if not late else AbortedError
            missing = board.missing("member", others) if kind == "deadline" else []
            peer = int(gone) if gone and int(gone) != rank else next(iter(missing), None)
            raise error(
                message,
                rank=rank,
                peer=peer,
                op="connect",
                phase="connect",
                elapsed=elapsed,
                limit=elapsed if kind == "deadline" else None,
            )
        time.sleep(min(pause, max(left, FIRST_PAUSE)))
        pause = min(pause * 1.5, board.longest_pause)
