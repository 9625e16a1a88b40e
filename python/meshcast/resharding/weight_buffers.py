"""The weights that a rank of a WeightSync has: the version that it serves, and the next one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import AbortedError, DeadlineExceededError, MeshcastError
from .state_results import Memory, ReshardedState

__all__ = ["Buffer", "Buffers", "WeightProgress", "WeightStats"]

_OP = "WeightSync"
_LOOK = 0.25  # seconds between two looks for ranks that have gone


@dataclass(frozen=True)
class WeightStats:
    """The cost of one version on this rank.

    Attributes:
        version: its number.
        bytes_sent, bytes_received: as `TransferStats` counts them.
        waited: seconds until all ranks were ready.
        seconds: from then until the version was whole on every rank.
    """

    version: int
    bytes_sent: int
    bytes_received: int
    waited: float
    seconds: float


@dataclass(frozen=True)
class WeightProgress:
    """The progress of the version that is on its way. Values on GPUs count once their transfer is complete.

    Attributes:
        bytes_done: that this rank has sent and received of it.
        bytes_expected: that it will in all; 0 until the first one is planned.
    """

    bytes_done: int
    bytes_expected: int


class Buffer:
    """Memory of one version. state: what the user gets, None while it is not whole; torn: a version was on
    its way into it, and did not arrive."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.state: ReshardedState | None = None
        self.version = -1
        self.torn = False


class Buffers:
    """One or two buffers. Any thread. With two, the one that is served is never written."""

    def __init__(self, count: int, rank: int) -> None:
        self.stats: WeightStats | None = None
        self._rank = rank
        self._buffers = [Buffer() for _ in range(count)]
        self._current: Buffer | None = None  # that is served
        self._newest: Buffer | None = None  # whole, and not yet served
        self._claimed: Buffer | None = None  # that a version is to arrive in
        self._refused: Exception | None = None  # of the last push, for the next take() to tell
        self._ended: MeshcastError | None = None
        self._changed = threading.Condition()

    def claim(self) -> Buffer:
        """The buffer for the next version. One at a time."""
        with self._changed:
            free = [each for each in self._buffers if each is not self._current] or self._buffers
            # A whole version that nobody has taken gives way where the other one is being served.
            self._claimed = next((each for each in free if each is not self._newest), free[0])
            return self._claimed

    def tear(self, buffer: Buffer) -> None:
        """It is about to be written."""
        with self._changed:
            buffer.state, buffer.torn = None, True
            if self._newest is buffer:
                self._newest = None

    def fill(self, buffer: Buffer, state: ReshardedState, stats: WeightStats) -> None:
        """The version in it is whole."""
        with self._changed:
            buffer.state, buffer.version, buffer.torn = state, stats.version, False
            self._newest, self._claimed, self._refused = buffer, None, None
            self.stats = stats
            self._changed.notify_all()

    def release(self) -> None:
        """Nothing arrived in what was claimed."""
        with self._changed:
            self._claimed = None
            self._changed.notify_all()

    def refuse(self, error: Exception) -> None:
        """The next take() raises it, unless a newer version comes first."""
        with self._changed:
            self._refused = error
            self._changed.notify_all()

    def end(self, error: MeshcastError) -> None:
        """Nothing arrives any more. The first cause counts."""
        with self._changed:
            self._ended = self._ended or error
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        """``True`` where nothing arrives any more."""
        return self._ended is not None

    def check_open(self) -> None:
        """Raises where nothing can be pushed or pulled any more: the first cause."""
        error = self._ended
        if isinstance(error, AbortedError):
            raise error.with_traceback(None)
        if error is not None:
            raise AbortedError(f"{_OP} has failed before: {error}", rank=self._rank, peer=error.peer, op=_OP)

    def version(self) -> int | None:
        """Returns the version that is served; None where no whole one is."""
        with self._changed:
            current = self._current
            return None if current is None or current.torn else current.version

    def state(self) -> ReshardedState:
        with self._changed:
            current = self._current
            if current is not None and current.state is not None:
                return current.state
        text = "no version has been pulled yet"
        if current is not None:
            text = (
                f"the weights are torn: a push into them has begun and did not end, after version "
                f"{current.version}. They are served again once a pull has succeeded"
            )
        raise MeshcastError(f"rank {self._rank}: {_OP}: {text}", rank=self._rank, op=_OP)

    def take(self, wanted: int | None, deadline: float, look: Callable[[], None] = lambda: None) -> int:
        """Makes the newest whole version current, once there is one, and one as new as `wanted`. Returns the
        number of what is current then. look(): called now and then while it waits."""
        begin = time.monotonic()
        while True:
            with self._changed:
                found = self._taken(wanted)
                if found is not None:
                    return found
                now = time.monotonic()
                if now >= deadline:
                    raise self.late(wanted, now - begin)
                told = self._changed.wait(min(_LOOK, deadline - now))
            if not told:
                look()

    def _taken(self, wanted: int | None) -> int | None:
        newest, current, least = self._newest, self._current, -1 if wanted is None else wanted
        if newest is not None and newest is not self._claimed and newest.version >= least:
            self._current, self._newest = newest, None
            return newest.version
        served = current is not None and not current.torn and current.version >= least
        if current is not None and served and wanted is not None:
            return current.version
        if self._refused is not None:
            error, self._refused = self._refused, None
            raise error.with_traceback(None)
        if self._ended is not None:
            raise self._ended.with_traceback(None)
        return current.version if current is not None and served else None

    def late(self, wanted: int | None, elapsed: float) -> DeadlineExceededError:
        what = "any version" if wanted is None else f"version {wanted} or a newer one"
        why = "nobody has pushed one" if self._claimed is None else "a push is on its way, and not through"
        return DeadlineExceededError(
            f"rank {self._rank}: {_OP}.pull waited {elapsed:.1f} s for {what}: {why}",
            rank=self._rank,
            op=_OP,
            phase="wait",
            elapsed=elapsed,
            limit=elapsed,
        )
