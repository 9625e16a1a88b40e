"""Ranks that share no process group of torch, and meet in a store that one of them has: the questions and
offers by which they find each other, and the buckets in which they send tensors.

Keys in the store, by the number n of a question: `ask/n` is the question, "" once it is answered; `offers/n`
counts the offers, which are `offer/n/1` and so on; `meet/n` names those that the reader has chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ..errors import LayoutError
from ..groups.parent import ParentGroup, StoreConnection
from ..layout import Box, Layout
from .state_arguments import Given
from .state_entries import Target
from .state_run import ReshardedState, StateRun, conversation

__all__ = [
    "AGAIN",
    "CHOOSE",
    "KEPT",
    "PAUSE",
    "TORN",
    "Ask",
    "Holding",
    "Meeting",
    "Offered",
    "Questions",
    "Served",
    "Taken",
    "buckets",
    "others",
    "waited",
]

T = TypeVar("T")

_DRAIN = 1.0  # seconds that a transfer in flight gets when the meeting ends
PAUSE, _LONGEST_PAUSE = 0.001, 0.02  # seconds between two looks into the store
AGAIN = 0.5  # seconds until a question is put again, to ranks that have had no version
KEPT, _SWEEP = 256, 64  # answered questions whose keys stay in the store; questions between two sweeps
_BETWEEN = timedelta(seconds=1)  # that a reader has between the number of its question and the question
CHOOSE = 5.0  # seconds that a reader has to choose; and that the store has to answer ranks that push
TORN = "torn"  # sent instead of digests


class Served(NamedTuple):
    """A tensor that is served. layout: with all ranks that have a part."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout


Holding = dict[str, Served]


class Ask(NamedTuple):
    """A question. least: the oldest version that will do. timeout: seconds for all of it. contact: of the
    reader."""

    least: int
    timeout: float
    contact: str


class Offered(NamedTuple):
    """A rank that has the version, -1 where it has none. job: of the WeightSync; later ones are larger.
    holding: the key of what is served. ranks: those of its group, one more than the largest. contact: of the
    rank. of: how many ranks offer this, where that is known."""

    version: int
    rank: int = -1
    job: str = ""
    holding: str = ""
    ranks: int = 0
    contact: str = ""
    of: int = 0


class Taken(NamedTuple):
    """The offers that a reader takes, by their numbers, and the ranks that made them, in the same order, with
    their contacts. number: of the reader, in the meeting. boxes: of which each of the offers is to send
    digests, by name."""

    version: int
    offers: tuple[int, ...]
    ranks: tuple[int, ...]
    contacts: tuple[str, ...]
    number: int
    digest: bool
    timeout: float
    boxes: dict[int, dict[str, tuple[Box, ...]]]


class Questions:
    """The keys that readers and those that answer them have in common. Each uses a connection of its own.
    pushing: of questions to ranks that push."""

    def __init__(self, store: dist.Store, *, pushing: bool = False) -> None:
        prefix = f"meshcast weights{' of trainers' if pushing else ''}"
        self._connection = StoreConnection(store, prefix)
        self._opened: Any = None
        self.for_meetings = StoreConnection(store, prefix)  # nothing waits in this one

    @property
    def store(self) -> Any:
        if self._opened is None:
            self._opened = self._connection()
        return self._opened

    def asked(self) -> int:
        """Returns how many questions there have been."""
        return int(self.store.add("asked", 0))

    def offering(self) -> int:
        """Returns how many ranks answer every question; some may have died."""
        return int(self.store.add("offering", 0))

    def ask(self, text: str) -> int:
        """Returns the number of the question."""
        number = before = int(self.store.add("asked", 1))
        self.store.set(f"ask/{number}", text)
        # Ranks wait for one after the other. A reader that died in between has left no question.
        while (before := before - 1) > max(number - KEPT, 0) and self.heard(f"ask/{before}") is None:
            with suppress(dist.DistStoreError):
                self.store.wait([f"ask/{before}"], _BETWEEN)
                break
            self.store.set(f"ask/{before}", "")
        return number

    def close(self, number: int) -> None:
        """The question is answered. Its keys are erased later: ranks may be about to read them."""
        store, old = self.store, number - KEPT
        store.set(f"ask/{number}", "")
        if old < 1:
            return
        keys = [f"{name}/{old}" for name in ("ask", "offers", "meet")]
        for at in range(int(store.add(f"offers/{old}", 0))):
            keys += [f"offer/{old}/{at + 1}", f"sums/{old}/{at + 1}"]
        if number % _SWEEP == 0 and hasattr(store, "list_keys"):  # those of meetings, by number
            firsts = {key: key.partition("/")[0] for key in store.list_keys()}
            keys += [key for key, first in firsts.items() if first.isdigit() and int(first) <= old]
        for key in keys:
            store.delete_key(key)

    def heard(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None


def waited(look: Callable[[], T | None], deadline: float) -> T | None:
    """Returns what look() finds, or None at the deadline."""
    pause = PAUSE
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
    return found


def others(tensors: Iterable[Served | Target], meet: Taken) -> list[int]:
    """Ranks that take part in what is served, and not in this meeting."""
    return sorted({rank for each in tensors for rank in each.layout.ranks} - set(meet.ranks))


class Meeting:
    """Ranks that the caller has brought together, and numbered. Layouts of its calls name these ranks.

    store: connected by all of them; or a function that returns a connection that nothing waits in. name: of
    this meeting in the store, one that no other has had. rank: of this process. limit: seconds, for what has
    no deadline of its own. contacts: texts of their `Contact`s, by rank: one that exits before it has come is
    noticed.
    """

    def __init__(
        self,
        store: dist.Store | Callable[[], dist.Store],
        name: str,
        ranks: Sequence[int],
        rank: int,
        limit: float,
        contacts: Mapping[int, str] | None = None,
    ) -> None:
        self.rank, self.size = rank, len(ranks)
        opened = store if callable(store) else None
        # Not opened here: a store that does not answer is the concern of the call that waits, with its limit.
        connect = StoreConnection(store, name) if opened is None else lambda: dist.PrefixStore(name, opened())
        self._parent = ParentGroup(ranks, rank, limit, name, connect)
        self._parent.expect(contacts or {})

    def move(
        self,
        state: Mapping[str, Any],
        destinations: Mapping[str, Any] | None,
        out: Mapping[str, torch.Tensor] | None = None,
        *,
        deadline: float,
        lost: Sequence[int] = (),
        still: Callable[[], bool] = lambda: True,
        wrong: Exception | None = None,
        **options: Any,
    ) -> ReshardedState:
        """reshard_state_dict among these ranks, all of which call it, with its options. deadline: by
        time.monotonic(). lost: ranks in layouts of what is held that are not of the meeting; the same on
        all. still(): asked once changes of the tensors are noticed, and at the end: whether they are what
        they were meant to be; if not, all ranks raise. wrong: why this rank has nothing to send; all ranks
        raise."""
        given = Given(state, destinations, out, lost=tuple((rank, rank) for rank in lost), **options)
        run = StateRun(self.rank, given, wrong=wrong)
        if not still():
            changed = LayoutError("the tensors have been changed since they were offered")
            run = StateRun(self.rank, given, wrong=changed)
        run.still = still
        return conversation(self._parent).run(run, deadline)

    def close(self) -> None:
        """Ends what is in flight, on all ranks."""
        self._parent.close(time.monotonic() + _DRAIN)


def buckets(items: Iterable[T], nbytes: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yields the items of about `most` bytes together, as they come."""
    bucket: list[T] = []
    filled = 0
    for item in items:
        own = nbytes(item)
        if bucket and filled + own > most:
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += own
    if bucket:
        yield bucket
