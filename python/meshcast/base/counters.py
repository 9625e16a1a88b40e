"""Totals of the calls of this process, for dashboards: how many, how much, how long, and between which ranks.

They are added up in C++ (csrc/core/group/record.h); whoever asks pays for the sum over all transfers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from .. import _C

__all__ = ["CallCounters", "Counters", "PairCounters", "counters"]

_T = TypeVar("_T", bound="_Totals")


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
    calls, pairs = _C.counted()
    return Counters(
        {op: CallCounters(**sums) for op, sums in calls.items()},
        {pair: PairCounters(**sums) for pair, sums in pairs.items()},
    )


def _less(later: _T, earlier: _T | None) -> _T:
    if earlier is None:
        return later
    return type(later)(**{name: value - getattr(earlier, name) for name, value in vars(later).items()})
