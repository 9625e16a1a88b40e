"""Handle of a call in flight: wait for it, poll it, chain on it, read what it cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ..base.observe import Flight, profiled
from ..errors import DeadlineExceededError, MeshcastError

__all__ = ["Handle", "Launch", "TransferStats"]

T = TypeVar("T")

# A launch waits behind others on its group's control thread, which applies the deadline itself; the waiter
# allows it this much more (seconds) so that the typed error of the control thread arrives first.
_GRACE = 2.0


@dataclass(frozen=True)
class TransferStats:
    """Cost of one finished call on this rank. bytes: sent plus received here, where a message that several
    ranks of this host read counts once for each of them; seconds: start to finish;
    bound: the plan's lower bound in seconds for the whole transfer; ratio: seconds / bound, 1.0 where nothing
    travels."""

    bytes_sent: int
    bytes_received: int
    seconds: float
    bound: float

    @property
    def bytes(self) -> int:
        return self.bytes_sent + self.bytes_received

    @property
    def ratio(self) -> float:
        return self.seconds / self.bound if self.bound > 0 else 1.0


class Launch:
    """A transfer from the moment it is called: at first queued, then a running work of the C++ engine, or an
    error."""

    def __init__(self, op: str, timeout: float, driven: bool = False) -> None:
        self.op = op
        self.driven = driven  # who called waits at once
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.work: Any = None
        self.error: Exception | None = None
        self.statistics: Callable[[], dict[str, Any]] | None = None
        self._lock = threading.Lock()
        self._settled: threading.Event | None = None
        self._success: Callable[[], None] | None = None
        self.flight: Flight | None = None  # its entry in the flight record
        self.passage: Any = None  # of a transfer between CPUs and GPUs
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
        return self.error is not None or (self.work is not None and self.work.is_completed())

    def wait(self) -> None:
        """Blocks until the transfer ended; raises its typed error, each time it is called."""
        with profiled("wait", self.op):
            self._wait()

    def _wait(self) -> None:
        if not self.settled:
            with self._lock:
                if not self.settled and self._settled is None:
                    self._settled = threading.Event()
                event = self._settled
            if event is not None and not event.wait(self.remaining() + _GRACE):
                raise DeadlineExceededError(
                    f"{self.op} was still queued behind earlier calls of its group after {self.timeout:g} s",
                    op=self.op,
                    phase="agree",
                    elapsed=self.timeout,
                    limit=self.timeout,
                )
        if self.error is not None:
            raise self.error.with_traceback(None)  # else each raise would add to the last one's
        try:
            self.work.wait()
        except Exception as error:
            self.error = error
            if self.flight is not None:
                self.flight.failed(error)
            raise
        if self._success is not None:
            with self._lock:
                step, self._success = self._success, None
                if step is not None:
                    step()
        if self.flight is not None:
            self.flight.ended()


class Handle(Generic[T]):
    """Result of an asynchronous call. Keeps source and destination alive until the transfer has ended."""

    def __init__(
        self,
        launch: Launch | None,
        result: T,
        bound: Callable[[], float],
        sources: Sequence[torch.Tensor] = (),
    ) -> None:
        self._launch = launch or _nothing_to_do()
        self._result = result
        self._bound = bound
        # Tensors made in inference mode do not count what is written on them.
        self._sources = [(tensor, tensor._version) for tensor in sources if not tensor.is_inference()]

    def wait(self) -> T:
        """Blocks until the data is here and returns the result. Raises the call's typed error, or
        MeshcastError if a source was changed in place in the meantime: what arrived may then be a mixture of
        old and new values."""
        self._launch.wait()
        self._check_sources()
        return self._result

    def is_completed(self) -> bool:
        """True once wait() would not block; never raises."""
        return self._launch.is_completed()

    def get_future(self) -> torch.futures.Future[T]:
        """A future of the result. Its wait() raises the same typed errors as wait() here."""
        future: torch.futures.Future[T] = torch.futures.Future()

        def finish(_: Any = None) -> None:
            try:
                future.set_result(self.wait())
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]

        def chain() -> None:
            if self._launch.work is None:
                finish()
            else:
                self._launch.work.get_future().add_done_callback(finish)

        self._launch.when_settled(chain)
        return future

    @property
    def stats(self) -> TransferStats:
        """Bytes and seconds of the finished call. Raises MeshcastError while it is still in flight."""
        figures = self.figures()
        return TransferStats(
            bytes_sent=int(figures["bytes_sent"]),
            bytes_received=int(figures["bytes_received"]),
            seconds=float(figures["seconds"]),
            bound=self._bound(),
        )

    def figures(self) -> dict[str, Any]:
        """bytes_sent, bytes_received and seconds of `stats`, for callers that count them often."""
        if not self.is_completed() or self._launch.statistics is None:
            raise MeshcastError(
                f"{self._launch.op}: stats exist once the call has finished; wait() first", op=self._launch.op
            )
        return self._launch.statistics()

    def _check_sources(self) -> None:
        for tensor, version in self._sources:
            if tensor._version != version:
                raise MeshcastError(
                    f"{self._launch.op}: a source of shape {tuple(tensor.shape)} was changed in place "
                    "before wait() "
                    f"(version {version} when called, {tensor._version} now): the result may mix old and "
                    "new values. "
                    "Wait before changing the source, or pass a clone.",
                    op=self._launch.op,
                    phase="transfer",
                )


class _Done:
    """The work of a rank that takes no part in a call."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


def _nothing_to_do() -> Launch:
    launch = Launch("reshard", 0.0)
    launch.started(_Done(), lambda: {"bytes_sent": 0, "bytes_received": 0, "seconds": 0.0})
    return launch
