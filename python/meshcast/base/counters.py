"""Totals of the calls of this process, for dashboards: how many, how much, how long, and between which ranks.

A call adds to one tally, which all calls of a persistent transfer share; whoever asks pays for the sum over
the tallies. One whose transfer is gone is added to the sums of its operation and its pairs, so that their
number stays small.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

__all__ = [
    "CallCounters",
    "Counters",
    "Moved",
    "PairCounters",
    "Traffic",
    "begun",
    "counters",
    "of_operation",
]


@dataclass(frozen=True)
class _Totals:
    calls: int = 0
    failed: int = 0
    retries: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    bound: float = 0.0
    moving_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """moving_seconds / bound; 1.0 where nothing travels."""
        return self.moving_seconds / self.bound if self.bound > 0 else 1.0


@dataclass(frozen=True)
class CallCounters(_Totals):
    """Totals of all calls of one operation on this rank, in `Counters.calls`.

    Attributes:
        calls: that have ended without an error.
        failed: that have raised.
        retries: how often a call was begun once more, since another rank had refused the one before it.
        seconds: start to finish, as `TransferStats` has them, of the calls that ended; of what moves no
            tensor, such as an agreement of a pipeline, from the call to its end.
        waited: seconds that the program stood in wait(), or in a call that waits itself.
        bound: the plans' lower bounds together, in seconds.
        moving_seconds: those of `seconds` that belong to calls with a bound, in which something travels.
        ratio: moving_seconds / bound; 1.0 where nothing travels.
        messages: to and from other ranks.
        bytes_sent, bytes_received: to and from other ranks, as `TransferStats` counts them.
    """

    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    @property
    def bytes(self) -> int:
        """Sent plus received."""
        return self.bytes_sent + self.bytes_received


@dataclass(frozen=True)
class PairCounters(_Totals):
    """Totals of all calls that send from one rank to another, in `Counters.pairs`.

    Attributes:
        messages: from the one to the other, over the network or through shared memory.
        bytes: of these messages.

    The other attributes are those of `CallCounters`, of the calls that these messages belong to: a slow pair
    is one whose calls have a high ratio.
    """

    messages: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Counters:
    """Totals since the process has imported meshcast. Subtract an earlier one for those of a step.

    Attributes:
        calls: by operation, such as "reshard" and "reshard backward".
        pairs: by (sender, receiver), global ranks, one of which is this rank.
    """

    calls: dict[str, CallCounters]
    pairs: dict[tuple[int, int], PairCounters]

    def __sub__(self, earlier: Counters) -> Counters:
        calls = {op: _less(found, earlier.calls.get(op)) for op, found in self.calls.items()}
        pairs = {pair: _less(found, earlier.pairs.get(pair)) for pair, found in self.pairs.items()}
        return Counters(calls, pairs)


class Moved(NamedTuple):
    """Messages and bytes of one call, between this rank and another."""

    sender: int
    receiver: int
    messages: int
    nbytes: int


class Countable(Protocol):
    """A call, as it is counted: once."""

    counted: bool


class _Tally:
    """Sums over all calls that move the same. Guarded by _lock."""

    __slots__ = ("bound", "calls", "failed", "held", "moved", "op", "rank", "retries", "seconds", "waited")

    def __init__(self, op: str, bound: float, rank: int, moved: Sequence[Moved]) -> None:
        self.op, self.bound, self.rank, self.moved = op, bound, rank, moved
        self.calls = self.failed = self.retries = 0
        self.seconds = self.waited = 0.0
        self.held: weakref.ref[Traffic] | None = None

    def totals(self) -> _Totals:
        moving = self.seconds if self.bound > 0 else 0.0
        bound = self.calls * self.bound
        return _Totals(self.calls, self.failed, self.retries, self.seconds, self.waited, bound, moving)


class Traffic:
    """The messages that each call of a transfer carries on this rank, with these calls' tally. Thread-safe.

    bound: of the plan, in seconds. moved: by sender and receiver; one of them is `rank`.
    """

    __slots__ = ("__weakref__", "_tally", "only_sends")

    def __init__(self, op: str, bound: float = 0.0, rank: int = -1, moved: Sequence[Moved] = ()) -> None:
        self._tally = tally = _Tally(op, bound, rank, tuple(moved))
        self.only_sends = all(each.sender == rank for each in moved)
        gone = _dropped.append  # no lock: anything may end it, at the end of the program too
        tally.held = weakref.ref(self, lambda _: gone(tally))
        with _lock:
            _fold()
            _tallies[id(tally)] = tally

    def ended(self, call: Countable, seconds: float, waited: float) -> None:
        """Counts an ended call; only its wait, if it was counted before anybody waited for it."""
        tally = self._tally
        _open.pop(id(call), None)
        with _lock:
            tally.waited += waited
            if not call.counted:
                call.counted = True
                tally.calls += 1
                tally.seconds += seconds

    def failed(self, call: Countable) -> None:
        _open.pop(id(call), None)
        with _lock:
            if not call.counted:
                call.counted = True
                self._tally.failed += 1

    def again(self) -> None:
        with _lock:
            self._tally.retries += 1

    def text(self) -> str:
        """Such as "sends 48 B, receives 0 B", each time."""
        moved, rank = self._tally.moved, self._tally.rank
        sent = sum(each.nbytes for each in moved if each.sender == rank)
        return f"sends {sent} B, receives {sum(each.nbytes for each in moved) - sent} B"


_Open = tuple[
    Countable, Traffic, Any, Callable[[], dict[str, Any]]
]  # work, figures of it once it is completed
_T = TypeVar("_T", bound=_Totals)
_lock = threading.Lock()
_tallies: dict[int, _Tally] = {}  # by id
_dropped: deque[_Tally] = deque()  # whose Traffic is gone
_operations: dict[str, Traffic] = {}  # of calls that move nothing
_calls: dict[str, CallCounters] = {}  # of tallies that are gone
_pairs: dict[tuple[int, int], PairCounters] = {}
_open: dict[int, _Open] = {}  # calls that may never be waited for, by id, until they are counted
_most_open = 64  # before a look which of them have ended


def counters() -> Counters:
    """Returns the totals of all calls of this process: what they have moved, how long they took and how long
    they were waited for.

    A call is in it once it has been waited for, or has ended if it only sends. Counting costs a call less
    than a microsecond; this function takes time in proportion to the number of compiled transfers and pairs.
    A forked child begins at zero.

    Example::

        before = meshcast.counters()
        # ... a step of training
        step = meshcast.counters() - before
        for op, found in step.calls.items():
            print(op, found.calls, found.bytes_sent, found.seconds, found.ratio, found.waited)
        for (sender, receiver), found in step.pairs.items():
            print(sender, receiver, found.messages, found.bytes)
    """
    _look()
    with _lock:
        _fold()
        calls, pairs = dict(_calls), dict(_pairs)
        for tally in list(_tallies.values()):
            _add(tally, calls, pairs)
    return Counters({op: found for op, found in calls.items() if found != CallCounters()}, pairs)


def of_operation(op: str) -> Traffic:
    """For calls of this operation that move nothing, or did not come to that."""
    found = _operations.get(op)
    return _operations.setdefault(op, Traffic(op)) if found is None else found


def begun(call: Countable, traffic: Traffic, work: Any, figures: Callable[[], dict[str, Any]]) -> None:
    """A call is on its way that may never be waited for, as a backward is that only sends. figures: bytes and
    seconds of the work, as GroupCore.stats. Both are kept until the call is counted, with what they hold."""
    _open[id(call)] = (call, traffic, work, figures)
    if len(_open) > _most_open:
        _look()


def _look() -> None:
    """Counts calls that have ended without a wait."""
    global _most_open
    for call, traffic, work, figures in list(_open.values()):
        if not work.is_completed():
            continue
        found = figures()
        if found["bytes_done"] >= found["bytes_sent"] + found["bytes_received"]:
            traffic.ended(call, float(found["seconds"]), 0.0)
        else:
            traffic.failed(call)
    _most_open = 2 * len(_open) + 64


def _fold() -> None:
    """Adds what is left of tallies that nobody adds to any more. Under _lock."""
    while _dropped:
        tally = _dropped.popleft()
        if _tallies.pop(id(tally), None) is not None:
            _add(tally, _calls, _pairs)
        tally.held = None


def _add(tally: _Tally, calls: dict[str, CallCounters], pairs: dict[tuple[int, int], PairCounters]) -> None:
    if not (tally.calls or tally.failed or tally.retries):
        return
    totals = vars(tally.totals())
    sent = received = messages = 0
    for sender, receiver, count, nbytes in tally.moved:
        messages += count
        sent += nbytes * (sender == tally.rank)
        received += nbytes * (receiver == tally.rank)
        pair = sender, receiver
        more = PairCounters(**totals, messages=tally.calls * count, bytes=tally.calls * nbytes)
        pairs[pair] = _sum(pairs.get(pair), more)
    n = tally.calls
    calls[tally.op] = _sum(
        calls.get(tally.op),
        CallCounters(**totals, messages=n * messages, bytes_sent=n * sent, bytes_received=n * received),
    )


def _sum(one: _T | None, other: _T) -> _T:
    if one is None:
        return other
    return type(other)(**{name: value + getattr(one, name) for name, value in vars(other).items()})


def _less(later: _T, earlier: _T | None) -> _T:
    if earlier is None:
        return later
    return type(later)(**{name: value - getattr(earlier, name) for name, value in vars(later).items()})


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that is not there may have it
    for each in (_tallies, _dropped, _operations, _calls, _pairs):
        each.clear()
    _inherited.extend(_open.values())  # kept: its works belong to the parent
    _open.clear()


_inherited: list[_Open] = []
os.register_at_fork(after_in_child=_in_child)
atexit.register(_open.clear)  # works end before Python does
