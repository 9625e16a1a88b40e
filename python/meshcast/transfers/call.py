"""Call: one start of a persistent transfer as Python sees it, from the moment it is made to its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from .._C import CallNumber
from ..base.observe import Flight, profiled, profiling
from ..errors import MeshcastError

__all__ = ["Call", "CallNumber"]


class _Start(Protocol):
    """The start of a call, as the call uses it. `_C.Start` is one."""

    begun_again: int  # how often

    @property
    def work(self) -> Any: ...
    @property
    def error(self) -> Exception | None: ...
    def wait(self) -> None: ...
    def is_completed(self) -> bool: ...
    def is_settled(self) -> bool: ...
    def when_settled(self, call: Callable[[], None]) -> None: ...
    def make_final(self) -> None: ...


class _Settled:
    """A start of what no group orders: a work that runs, or an error."""

    begun_again = 0

    def __init__(self, work: Any, error: Exception | None) -> None:
        self.work, self.error = work, error

    def wait(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)  # else each raise would add to the last one's
        self.work.wait()

    def is_completed(self) -> bool:
        return self.error is not None or bool(self.work.is_completed())

    def is_settled(self) -> bool:
        return True

    def when_settled(self, call: Callable[[], None]) -> None:
        call()

    def make_final(self) -> None:
        pass


class Call:
    """A call and what Python keeps for it. `start` decides when it begins and how it ends.

    driven: the caller waits at once. timeout: seconds, from now. number: where it stands in its lane.
    """

    def __init__(self, op: str, timeout: float, driven: bool = False) -> None:
        self.op = op
        self.driven = driven
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.number = CallNumber()
        self.start: _Start | None = None  # once the call has been counted, or has failed before that
        self.statistics: Callable[[], dict[str, Any]] | None = None
        self.flight: Flight | None = None  # its entry in the flight record
        self.brought: Any = None  # what its medium keeps for it
        self.interrupted: Callable[[str, BaseException], None] = lambda _op, _raised: None
        # Tells the other ranks that a source was changed; returns what waits until they can know.
        self.retract: Callable[[MeshcastError], Callable[[], None]] = lambda _: lambda: None
        self.take_news: Callable[[], MeshcastError | None] = lambda: None  # see PrivateGroup.take_news
        self._lock = threading.Lock()
        self._begun_again = 0
        self._success: Callable[[], None] | None = None

    def on_success(self, step: Callable[[], None]) -> None:
        """A last step that the first successful wait() runs. Set before anybody can wait."""
        self._success = step

    def remaining(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def started(self, work: Any, statistics: Callable[[], dict[str, Any]]) -> None:
        """For what no group orders: `work` runs."""
        self.statistics, self.start = statistics, _Settled(work, None)

    def failed(self, error: Exception) -> None:
        """For a call that has failed before it was counted."""
        if self.flight is not None:
            self.flight.failed(error)
        self.start = _Settled(None, error)

    @property
    def work(self) -> Any:
        return None if self.start is None else self.start.work

    @property
    def error(self) -> Exception | None:
        return None if self.start is None else self.start.error

    @property
    def settled(self) -> bool:
        return self.start is not None and self.start.is_settled()

    def when_settled(self, callback: Callable[[], None]) -> None:
        assert self.start is not None
        self.start.when_settled(callback)

    def make_final(self) -> None:
        """From here on the call is not begun once more in another life of its group."""
        if self.start is not None:
            self.start.make_final()

    def is_completed(self) -> bool:
        return self.start is not None and self.start.is_completed()

    def wait(self) -> None:
        """Blocks until the transfer ended; raises its typed error, each time it is called. What a handler of
        a signal raises ends the wait, and the group."""
        if not profiling():
            self._wait()
            return
        traffic = None if self.flight is None else self.flight.traffic
        with profiled("wait", self.op):
            if traffic is None:
                self._wait()
                return
            with profiled(traffic.text(), self.op):
                self._wait()

    def _wait(self) -> None:
        assert self.start is not None
        waiting, flight = time.perf_counter(), self.flight
        try:
            self.start.wait()
        except MeshcastError as error:
            if flight is not None:
                flight.failed(error)
            raise
        except BaseException as raised:  # of a handler of a signal, or of CUDA
            self.interrupted(self.op, raised)
            raise
        finally:
            self._count_new_begins()
        if self._success is not None:
            with self._lock:
                step, self._success = self._success, None
                if step is not None:
                    step()
        if flight is not None and flight.seconds is None:
            moved = None if self.statistics is None else float(self.statistics()["seconds"])
            flight.ended(waiting, moved)
        news = self.take_news()
        if news is not None:
            raise news

    def _count_new_begins(self) -> None:
        assert self.start is not None
        while self._begun_again < self.start.begun_again:
            self._begun_again += 1
            if self.flight is not None:
                self.flight.again()
