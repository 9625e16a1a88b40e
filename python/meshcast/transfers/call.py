"""Call: one start of a persistent transfer, from the moment it is made to its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base import forks
from ..base.observe import Flight, profiled, profiling
from ..errors import DeadlineExceededError, MeshcastError

if TYPE_CHECKING:
    from .. import _C

__all__ = ["Call", "CallNumber"]

# A call waits behind others on its group's control thread, which applies the deadline itself; the waiter
# allows it this much more (seconds) so that the typed error of the control thread arrives first.
_GRACE = 1.6


@dataclass
class CallNumber:
    """Names one call alike on all its ranks: its position in the lane and, once it has been started, how
    often its plan had run before. agreed: that plan, where a backward may come."""

    ordinal: int = -1
    run: int = -1
    agreed: _C.AgreedPlan | None = None
    core: _C.GroupCore | None = None  # with which that was made


class Call:
    """At first queued, then a running work of the C++ engine, or an error.

    driven: the caller waits at once. timeout: seconds, from now. number: where it stands in its lane.
    """

    def __init__(self, op: str, timeout: float, driven: bool = False) -> None:
        self.op = op
        self.driven = driven
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.number = CallNumber()
        self.work: Any = None
        self.error: Exception | None = None
        self.statistics: Callable[[], dict[str, Any]] | None = None
        self.flight: Flight | None = None  # its entry in the flight record
        self.overdue: Callable[[], None] = lambda: None  # for who has waited in vain for its start
        self.brought: Any = None  # what its medium keeps for it
        # For who waits in a thread of the program, once the work has failed: see PrivateGroup.begin_again.
        self.begin_again: Callable[[], bool] | None = None
        self.interrupted: Callable[[str, BaseException], None] = lambda _op, _raised: None
        # Tells the other ranks that a source was changed; returns what waits until they can know.
        self.retract: Callable[[MeshcastError], Callable[[], None]] = lambda _: lambda: None
        self.take_news: Callable[[], MeshcastError | None] = lambda: None  # see PrivateGroup.take_news
        self._born = forks.count
        self._lock = threading.Lock()
        self._settled: threading.Event | None = None
        self._success: Callable[[], None] | None = None
        self._callbacks: list[Callable[[], None]] = []

    def on_success(self, step: Callable[[], None]) -> None:
        """A last step that the first successful wait() runs. Set before anybody can wait."""
        self._success = step

    def remaining(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def started(self, work: Any, statistics: Callable[[], dict[str, Any]]) -> None:
        self.statistics = statistics
        self._settle(work, None)

    def failed(self, error: Exception) -> None:
        if self.flight is not None:
            self.flight.failed(error)
        self._settle(None, error)

    def _settle(self, work: Any, error: Exception | None) -> None:
        with self._lock:
            self.work, self.error = work, error
            callbacks, self._callbacks = self._callbacks, []
            if self._settled is not None:
                self._settled.set()
        for callback in callbacks:
            callback()

    @property
    def settled(self) -> bool:
        return self.work is not None or self.error is not None

    def when_settled(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self.settled:
                self._callbacks.append(callback)
                return
        callback()

    def is_completed(self) -> bool:
        if self.error is not None:
            return True
        work = self.work
        if work is None or not work.is_completed():
            return False
        # What its group keeps of it, to let it finish, keeps no tensors from here on.
        if self.begin_again is not None:
            with suppress(Exception):  # wait() raises it, or begins once more
                work.wait()  # does not block any more
                self.begin_again = None
        return True

    def wait(self) -> None:
        """Blocks until the transfer ended; raises its typed error, each time it is called. What a handler of
        a signal raises ends the wait, and the group."""
        if not profiling():
            self._wait()
            return
        with profiled("wait", self.op):
            self._wait()

    def _wait(self) -> None:
        try:
            self._end(time.perf_counter())
        except MeshcastError:
            raise
        except BaseException as raised:  # of a handler of a signal, or of CUDA
            self.interrupted(self.op, raised)
            raise

    def _begins_again(self) -> bool:
        if self.begin_again is None or self._born != forks.count:
            return False
        with self._lock:
            work, self.work, self._settled = self.work, None, None
        again = False
        try:
            again = self.begin_again()
        finally:
            if not again:
                self.work = work
        return again

    def _end(self, waiting: float) -> None:
        """waiting: time.perf_counter() when that began."""
        if not self.settled:
            forks.check(self._born, self.op)
            with self._lock:
                if not self.settled and self._settled is None:
                    self._settled = threading.Event()
                event = self._settled
            if event is not None and not event.wait(self.remaining() + _GRACE):
                self.overdue()
            if not self.settled:
                raise DeadlineExceededError(
                    f"{self.op} was still queued behind earlier calls of its group after {self.timeout:g} s",
                    op=self.op,
                    phase="agree",
                    elapsed=self.timeout,
                    limit=self.timeout,
                )
        if self.error is not None:
            self.error = self.take_news() or self.error
            raise self.error.with_traceback(None)  # else each raise would add to the last one's
        try:
            if self.flight is not None and self.flight.traffic is not None and profiling():
                with profiled(self.flight.traffic.text(), self.op):
                    self.work.wait()
            else:
                self.work.wait()
        except MeshcastError as error:
            if self._begins_again():
                if self.flight is not None:
                    self.flight.again()
                return self._end(waiting)
            self.begin_again = None
            news = self.take_news()
            self.error = error = news or error
            if self.flight is not None:
                self.flight.failed(error)
            if news is not None:
                raise news from None
            raise
        self.begin_again = None  # it holds the tensors, and the plan
        if self._success is not None:
            with self._lock:
                step, self._success = self._success, None
                if step is not None:
                    step()
        if self.flight is not None and self.flight.seconds is None:
            moved = None if self.statistics is None else float(self.statistics()["seconds"])
            self.flight.ended(waiting, moved)
        news = self.take_news()
        if news is not None:
            raise news
