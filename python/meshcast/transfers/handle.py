"""Handle of a call in flight: wait for it, poll it, chain on it, read what it cost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from typing_extensions import Self

from .. import _C
from .._C import CHANGED, Call, CallNumber, Refusal
from ..errors import MeshcastError

__all__ = [
    "CallNumber",
    "Handle",
    "Running",
    "TransferStats",
    "Unordered",
    "call_back",
    "fail",
]


def call_back(function: Callable[[], None]) -> None:
    """Calls it soon, on a thread that may wait for what it likes. For what completes a future, and so runs
    the callbacks that a user has chained on it: no thread that others need may do that, and no lock may be
    held meanwhile. Its exceptions are printed."""
    _C.run_callback(function)


def fail(future: torch.futures.Future[Any], error: Exception) -> None:
    """Ends the future with the error, as set_exception does.

    A raised error has the frames that it passed, which may have the future. Torch's future has the error in
    turn, where no garbage collector looks: all of it would stay for ever, and the call and its group as well.
    So the future has a copy without frames, and each raise is of one more.
    """
    bare = _copy_of(error)

    def raise_it(_: Any) -> None:
        raise _copy_of(bare)

    future._set_unwrap_func(raise_it)
    future.set_result(bare)


def _copy_of(error: Exception) -> Exception:
    """Without frames and causes. The same where its type cannot be copied."""
    try:
        return copy.copy(error)
    except Exception:
        return error


T = TypeVar("T")


class Running(Protocol):
    """A call as its handle sees it; `_C.Call` is one."""

    @property
    def op(self) -> str: ...
    @property
    def work(self) -> Any: ...  # None before it was started
    def wait(self) -> None: ...
    def wait_unchanged(self) -> bool: ...  # False where a source of a _C.Call was changed
    def is_completed(self) -> bool: ...
    def is_settled(self) -> bool: ...  # it runs, or has failed
    def when_settled(self, call: Callable[[], None]) -> None: ...
    def make_final(self) -> None: ...  # it does not begin again in another generation of its group
    def figures(self) -> dict[str, Any] | None: ...  # None before it was started


@dataclass(frozen=True)
class TransferStats:
    """Cost of one finished call on this rank.

    Attributes:
        bytes_sent: to other ranks. A message that several ranks of this host read counts for each of them.
        bytes_received: from other ranks.
        seconds: start to finish.
        bound: the plan's lower bound for the whole transfer, in seconds.
    """

    bytes_sent: int
    bytes_received: int
    seconds: float
    bound: float

    @property
    def bytes(self) -> int:
        """Sent plus received."""
        return self.bytes_sent + self.bytes_received

    @property
    def ratio(self) -> float:
        """seconds / bound; 1.0 where nothing travels."""
        return self.seconds / self.bound if self.bound > 0 else 1.0


class Handle(Generic[T]):
    """Result of an asynchronous call. Keeps source and destination alive until the transfer has ended.

    Calls with ``async_op=True`` return it, and ``start`` of a Resharder or StateResharder.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        source, target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        x = distribute_tensor(torch.ones(4, 2), source, [Shard(0)])
        handle = meshcast.reshard(x, target, [Shard(1)], async_op=True)
        y = handle.wait()
        assert handle.is_completed() and handle.stats.seconds > 0
    """

    _told = False  # the other ranks, that a source was changed

    def __init__(self, call: Running | None, result: T, bound: Callable[[], float]) -> None:
        """call: None for one that moves nothing here. bound: in seconds, see TransferStats."""
        self._call: Running = _DONE if call is None else call
        self._result = result
        self._bound = bound

    def __repr__(self) -> str:
        return f"<Handle of {self._call.op}, {'completed' if self._call.is_completed() else 'in flight'}>"

    def wait(self) -> T:
        """Blocks until the data is here and returns the result. Raises the call's typed error, or
        MeshcastError if a source was changed in place in the meantime: what arrived may then be a mixture of
        old and new values. The other ranks of the call are notified: those that wait for it raise as well,
        and those that have its result do so as they next wait for a call of these ranks, once."""
        return self._wait(Refusal.wait)

    def _wait(self, until: Callable[[Refusal], None]) -> T:
        """until(retraction): may wait until the others can know that a source was changed."""
        call = self._call
        if call.wait_unchanged():
            return self._result
        assert isinstance(call, Call)  # no other watches sources
        found = call.changed()
        if found is None:  # another thread has waited for it
            return self._result
        error = _changed(call.op, *found)
        if not call.ended_unchanged and not self._told:
            self._told = True
            retraction = call.retract(str(error))
            if retraction is not None:
                until(retraction)
        with suppress(MeshcastError):  # nothing reads the source any longer once it has ended
            call.wait()
        raise error

    def is_completed(self) -> bool:
        """True once wait() would not block; never raises."""
        return self._call.is_completed()

    def get_future(self) -> torch.futures.Future[T]:
        """A future of the result. Its wait() raises the same typed errors as wait() here.

        Callbacks of ``then()`` and ``add_done_callback()`` run on threads of their own. They may start calls
        of any group and wait for them, and one that takes its time holds up no other. Chained on a future
        that is done already, they run at once, in the thread that chains them.

        Example, on the four ranks of ``torchrun --nproc-per-node 4``::

            source, target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
            x = distribute_tensor(torch.ones(4, 2), source, [Shard(0)])
            future = meshcast.reshard(x, target, [Shard(1)], async_op=True).get_future()
            back = future.then(lambda done: meshcast.reshard(done.value(), source, [Shard(0)]))
            assert back.wait().shape == (4, 2)
        """
        future: _Future[T] = _Future(self._call)
        self._call.make_final()  # the future is of this start

        def finish(_: Any = None) -> None:
            try:
                future.set_result(self._wait(lambda _: None))
            except Exception as error:
                fail(future, error)

        def chain() -> None:
            if self._call.work is None:
                finish()
            else:
                self._call.work.get_future().add_done_callback(finish)

        # A call that settles later is settled by the thread that brings its group up, for which callbacks may
        # wait.
        if self._call.is_settled():
            chain()
        else:
            self._call.when_settled(lambda: call_back(chain))
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
        found = self._call.figures() if self.is_completed() else None
        if found is None:
            raise MeshcastError(
                f"{self._call.op}: stats exist once the call has finished; wait() first", op=self._call.op
            )
        return found


def _changed(op: str, shape: list[int], version: int, now: int) -> MeshcastError:
    return MeshcastError(
        f"{op}: a source of shape {tuple(shape)} {CHANGED} (version {version} "
        f"when called, {now} now): the result may mix old and new values. Wait "
        "before changing the source, or pass copy=True.",
        op=op,
        phase="transfer",
    )


class _Future(torch.futures.Future[T]):
    """torch's wait of a future notices no signal: the call's own, which does, comes first. So it is for
    this future; what then() makes of it is torch's."""

    def __init__(self, call: Running) -> None:
        super().__init__()
        self._call = call

    def wait(self) -> T:
        with suppress(MeshcastError):  # the future has it, too, maybe with more details
            self._call.wait()
        return super().wait()


class Unordered(Running, Protocol):
    """The parts of `Running` that are the same for all calls that no group orders: each is its own work."""

    @property
    def work(self) -> Self:
        return self

    def is_settled(self) -> bool:
        return True

    def when_settled(self, call: Callable[[], None]) -> None:
        call()

    def make_final(self) -> None:
        return

    def wait_unchanged(self) -> bool:
        self.wait()
        return True


class _Done(Unordered):
    """The call of a rank that takes no part."""

    op = "reshard"

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def figures(self) -> dict[str, Any]:
        return {"bytes_sent": 0, "bytes_received": 0, "seconds": 0.0}

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


_DONE = _Done()
