"""What a handle's future keeps, and what it raises."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from meshcast.errors import PeerLostError
from meshcast.transfers.handle import Handle


class Later:
    """A call that waits in the queue of its group, and fails there."""

    op, work = "reshard", None

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._settled = threading.Event()
        self._calls: list[Callable[[], None]] = []

    def fail(self, error: Exception) -> None:
        self.error = error
        self._settled.set()
        for call in self._calls:
            call()
        self._calls.clear()

    def wait(self) -> None:
        assert self._settled.wait(20.0)
        assert self.error is not None
        raise self.error.with_traceback(None)

    def wait_unchanged(self) -> bool:
        self.wait()
        return True

    def is_completed(self) -> bool:
        return self._settled.is_set()

    def is_settled(self) -> bool:
        return self._settled.is_set()

    def when_settled(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def make_final(self) -> None:
        pass

    def figures(self) -> None:
        pass


def _failed_call() -> tuple[weakref.ref[Later], weakref.ref[torch.Tensor]]:
    """A call that has failed, of whose error this frame, with the future, was part."""
    call, result = Later(), torch.zeros(3)
    future = Handle(call, result, lambda: 0.0).get_future()
    call.fail(PeerLostError("rank 2 is gone", peer=2, op="reshard"))
    for _ in range(2):
        with pytest.raises(PeerLostError, match="rank 2 is gone") as caught:
            future.wait()
        assert (caught.value.peer, caught.value.op) == (2, "reshard")
    chained = future.then(lambda done: done.value())
    with pytest.raises(Exception, match="rank 2 is gone"):
        chained.wait()
    return weakref.ref(call), weakref.ref(result)


def test_a_failed_future_keeps_neither_its_call_nor_its_tensors() -> None:
    kept = _failed_call()
    # The thread that told of the failure lets go of it a moment later.
    limit = time.monotonic() + 20.0
    while any(each() is not None for each in kept) and time.monotonic() < limit:
        gc.collect()
        time.sleep(0.01)
    assert [each() for each in kept] == [None, None]


def test_a_future_raises_errors_that_cannot_be_copied() -> None:
    class OddError(Exception):
        def __init__(self, first: str, second: str) -> None:
            super().__init__(first + second)

    call = Later()
    future = Handle(call, None, lambda: 0.0).get_future()
    call.fail(OddError("no ", "way"))
    with pytest.raises(OddError, match="no way"):
        future.wait()
