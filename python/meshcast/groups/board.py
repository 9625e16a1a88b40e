"""Board: what the ranks of a group tell each other through a store, beside the data path."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "FIRST_PAUSE",
    "LONGEST_PAUSE",
    "SLICE",
    "Board",
    "NotPostedError",
    "Watches",
]

FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02  # seconds between two polls of the store
_FEW_RANKS = 16  # as many do not crowd a store, which answers one question at a time; more ask less often
SLICE = 0.25  # seconds of waiting after which there may be a reason to give up, or a signal
_LOOK_SOON = 0.5  # seconds in which a peer that has died is seen


class NotPostedError(Exception):
    """Ranks that posted nothing within the limit. elapsed: seconds since the gathering began."""

    def __init__(self, ranks: Sequence[int], elapsed: float) -> None:
        super().__init__(f"ranks {list(ranks)} posted nothing within {elapsed:.1f} s")
        self.ranks = list(ranks)
        self.elapsed = elapsed


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
