"""The thread by which a worker hears of the next rendezvous while it computes."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from ..base.observe import log
from . import rendezvous as meet

__all__ = ["Watch"]

_PAUSE = 0.05  # seconds between two looks
_LAST = 20.0  # seconds that a worker without an agent gets to end by itself


class Watch:
    """abort: called from the thread, with the reason, where members have died."""

    def __init__(self, store: dist.Store, abort: Callable[[str], None]) -> None:
        self._store = store
        self._abort = abort
        self._gone = meet.gone_key(int(os.environ.get("GROUP_RANK", "0")))
        self._changed = threading.Condition(threading.RLock())
        self._calls: dict[int, meet.Call] = {}
        self._broken = 0  # the last rendezvous of which a member died
        self._expected = 1  # number of the next
        self.orphan = ""  # why nobody leads this worker any more
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshcast-elastic", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def _run(self) -> None:
        while not self._stop.wait(_PAUSE):
            try:
                while self._look():
                    pass
                given_up = self._store.check([self._gone])
            except RuntimeError:  # the agent has the store
                self._alone("the agent of meshcast.elastic.run is gone")
                return
            if given_up:
                self._alone("the job goes on without this host, whose agent was silent")
                return

    def _look(self) -> bool:
        """Returns whether there was a call. Aborts before it notifies of a loss, so that groups made after
        that are not aborted."""
        if self._broken < self._expected - 1 and self._store.check([meet.broken_key(self._expected - 1)]):
            self._abort("a worker died")
            with self._changed:
                self._broken = self._expected - 1
                self._changed.notify_all()
        said = meet.found(self._store, meet.call_key(self._expected))
        if said is None:
            return False
        call = meet.Call(*said)
        if call.lost or not call.members:
            self._abort(f"workers {', '.join(call.lost)} died" if call.lost else "the job is over")
        with self._changed:
            self._calls[self._expected] = call
            self._expected += 1
            self._changed.notify_all()
        return True

    def _alone(self, why: str) -> None:
        with self._changed:
            self.orphan = why
            self._changed.notify_all()
        self._abort(why)
        if not self._stop.wait(_LAST):
            log.error("elastic: %s; the process ends after %.0f s", why, _LAST)
            os._exit(1)

    def newest(self, since: int) -> tuple[int, meet.Call] | None:
        """The last call, if it is later than that rendezvous."""
        with self._changed:
            last = self._expected - 1
            return (last, self._calls[last]) if last > since else None

    def lost(self, since: int) -> bool:
        """Returns whether members have died since that rendezvous, the job is over, or nobody leads this
        worker."""
        with self._changed:
            calls = [call for number, call in self._calls.items() if number > since]
            called = any(call.lost or not call.members for call in calls)
            return bool(self.orphan) or called or self._broken >= max(since, 1)

    def wait_for_call(self, since: int) -> bool:
        """A second, or until there is a later call or the agent is gone. False where there is none."""
        return self._wait(lambda: self._expected - 1 > since or bool(self.orphan), 1.0)

    def wait_for_loss(self, since: int, limit: float) -> bool:
        """lost(), which may take `limit` seconds to show."""
        return self._wait(lambda: self.lost(since), limit)

    def _wait(self, done: Callable[[], bool], limit: float) -> bool:
        end = time.monotonic() + limit
        with self._changed:
            while not done():
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.5))  # signals are handled in between
            return True

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self.stop)
