"""A thread that makes calls of reshard_state_dict concurrently with their caller, one after the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..transfers.handle import Unordered, call_back
from ..transfers.transfer import Call
from .state_entries import OP

__all__ = ["Queue", "Work", "behind", "own_stream"]


class Queue:
    """Work of one process group. Its thread ends when there is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Work] = deque()
        self._busy = False

    def put(self, work: Work) -> None:
        with self._lock:
            self._waiting.append(work)
            if self._busy:
                return
            self._busy = True
        thread = threading.Thread(target=self._run, name="meshcast-state", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread is to be had, and the other ranks wait for this one
            self._run()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy = False
                    return
                work = self._waiting.popleft()
            work.run()


def own_stream() -> torch.cuda.Stream | None:
    """The stream that the caller works on; None where it uses no GPU."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


@contextmanager
def behind(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Queues the GPU work of its block, in this thread, after what that stream holds."""
    if stream is None:
        yield
        return
    torch.cuda.set_device(stream.device)
    with torch.cuda.stream(stream):
        yield


class Work(Unordered):
    """One call, as its handle sees it. On a GPU it is behind what the caller's stream held, as a call that
    blocks would be."""

    op = OP

    def __init__(self, step: Callable[[], object], made: Sequence[Call]) -> None:
        self._step = step
        self._made = made
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[None] = torch.futures.Future()
        self._stream = own_stream()

    def run(self) -> None:
        try:
            with behind(self._stream):
                self._step()
        except BaseException as error:
            self._error = error
        finally:
            del self._step  # and the tensors that it holds
            self._ended.set()
            # Not here: a callback may wait for a later call, which this thread is to do.
            call_back(partial(self._future.set_result, None))

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)  # else each raise would add to the last one's

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def get_future(self) -> torch.futures.Future[None]:
        return self._future

    def figures(self) -> dict[str, Any]:
        each = [figures for call in self._made if (figures := call.figures()) is not None]
        return {
            name: sum(figures[name] for figures in each)
            for name in ("bytes_sent", "bytes_received", "seconds")
        }
