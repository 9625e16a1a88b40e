"""Calls of reshard_state_dict that run beside their caller, one after the other.

They have private groups of their own, so that they need no order with other calls of the process group.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..groups.parent import ParentGroup
from ..transfers.handle import Handle, Unordered, call_back
from ..transfers.transfer import Call
from .state_batches import Known
from .state_entries import OP
from .state_run import Conversation, Prepared, ReshardedState, conversation

__all__ = ["behind", "beside", "own_stream", "started"]

_QUEUE = "background reshard_state_dict"


class _Queue:
    """Work of one process group. Its thread ends when there is none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Work] = deque()
        self._busy = False

    def put(self, work: _Work) -> None:
        with self._lock:
            self._waiting.append(work)
            if self._busy:
                return
            self._busy = True
        thread = threading.Thread(target=self._run, name="meshcast-state", daemon=True)
        try:
            thread.start()
        except (
            RuntimeError
        ):  # no thread is to be had: the other ranks wait for this one, so it comes by itself
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


class _Work(Unordered):
    """One call, as its handle sees it. On a GPU it is behind what the caller's stream held, as a call that
    blocks would be."""

    op = OP

    def __init__(self, step: Callable[[], list[Call]]) -> None:
        self._step = step
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._made: list[Call] = []
        self._future: torch.futures.Future[None] = torch.futures.Future()
        self._stream = own_stream()

    def run(self) -> None:
        try:
            with behind(self._stream):
                self._made = self._step()
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


def beside(parent: ParentGroup, lost: Collection[int] = ()) -> Conversation:
    """The conversation of the calls that run beside others. Versions are those of the process group."""
    talk = conversation(parent.twin(OP), lost)
    talk.versions = conversation(parent, lost).versions
    return talk


def started(
    parent: ParentGroup,
    prepared: Prepared,
    limit: float,
    run: Callable[[Conversation, float, ReshardedState], tuple[Known, list[Call]]] | None = None,
    lost: Collection[int] = (),
    copy: bool = False,
) -> Handle[ReshardedState]:
    """Starts a call. limit: seconds. run: what to do in place of Conversation.run alone. lost: ranks that
    make no call any more. copy: of what is held, at once."""
    if copy:
        prepared.keep_copies()
    prepared.keep_digests()
    talk = beside(parent, lost)
    queue: _Queue = talk.parent.extras.setdefault(_QUEUE, _Queue())
    result = ReshardedState()
    bounds: list[float] = []
    deadline = time.monotonic() + limit

    def step() -> list[Call]:
        if run is None:
            kind, made = talk.run(prepared, deadline, result)
        else:
            kind, made = run(talk, deadline, result)
        bounds.extend(batch.bound() for batch in kind.batches)
        return made

    work = _Work(step)
    queue.put(work)
    return Handle(work, result, lambda: sum(bounds))
