"""Messages that the agent of `meshcast.elastic.run` and its workers exchange in the agent's store.

A worker is a process that an agent started. Its name is "LOCAL_RANK.RESTART", on another host than that of
the store "LOCAL_RANK.RESTART@HOST", and never given twice. Whenever the workers that there are change, they
come together: a rendezvous, which has a number.

1. The agent calls the members of rendezvous n (`Call`). Ranks are places in that list.
2. Each member leaves its process group and says which state it has (`version`).
3. The agent answers once all are there (`Start`), or calls another rendezvous where one of them died.

All keys are written once, and looked for rather than waited for: a process that waits in a store can be told
nothing else.

Messages that the agents of several hosts exchange in the store of the first.

Hosts are numbered as they come; 0 is the one with the store, whose agent leads the job. The agent of another
host, a follower, starts its workers, says which of them have ended, and does what it is ordered. Workers talk
to the store themselves.

An agent that says nothing for too long is taken for gone. The leader then goes on without the workers of that
host, and the follower ends its own: no worker that the job has given up goes on alone.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ..base.observe import log

__all__ = [
    "AGENT",
    "Call",
    "Distant",
    "Ended",
    "FINISHED",
    "HOSTS",
    "Hello",
    "JOB",
    "JobGoneError",
    "Order",
    "Start",
    "Version",
    "Watch",
    "beat_key",
    "broken_key",
    "call_key",
    "connect",
    "done_key",
    "ended_key",
    "found",
    "gone_key",
    "hello_key",
    "order_key",
    "parts_of",
    "ready_key",
    "serve",
    "start_key",
    "tell",
    "version_key",
    "welcome_key",
    "worker_name",
]

HOST = "127.0.0.1"
_LIMIT = timedelta(seconds=300)
AGENT = "elastic/agent"  # there from the start, the job's id: the store is that of an agent
JOB = "elastic/job"  # id of the job in flight records
FINISHED = "elastic/finished"  # a worker has ended the job in agreement with all others


class Version(NamedTuple):
    """The version of the state that a worker holds; the later is the greater. rendezvous: whose ranks it is
    laid out over; 0 before the first. steps: that are committed."""

    rendezvous: int
    steps: int


class Call(NamedTuple):
    """To a rendezvous. lost: members of the one before that died. No members: the job is over."""

    members: list[str]
    lost: list[str]


class Start(NamedTuple):
    """The start of a process group. port: of its store; 0 where another rendezvous was called instead.
    version: the latest that any member has, None where no one has any. then: the members of that version's
    rendezvous."""

    port: int
    version: list[int] | None
    then: list[str]


def worker_name(local_rank: int, restart: int, host: int = 0) -> str:
    return f"{local_rank}.{restart}@{host}" if host else f"{local_rank}.{restart}"


def parts_of(worker: str) -> tuple[int, int]:
    """Local rank and restart."""
    local_rank, restart = worker.partition("@")[0].split(".")
    return int(local_rank), int(restart)


def gone_key(host: int) -> str:
    """There once the job goes on without that host."""
    return f"elastic/host/{host}/gone"


def ready_key(worker: str) -> str:
    return f"elastic/ready/{worker}"


def call_key(number: int) -> str:
    return f"elastic/{number}/call"


def version_key(number: int, worker: str) -> str:
    """Value: [version, or None], since later keys might have more to say."""
    return f"elastic/{number}/version/{worker}"


def broken_key(number: int) -> str:
    """There once a member of that rendezvous has died. The call to the next may have to wait for a worker."""
    return f"elastic/{number}/broken"


def start_key(number: int) -> str:
    return f"elastic/{number}/start"


def tell(store: dist.Store, key: str, value: Any) -> None:
    store.set(key, json.dumps(value))


def found(store: dist.Store, key: str) -> Any:
    """The value; None where there is none yet."""
    return json.loads(store.get(key)) if store.check([key]) else None


def serve(port: int = 0, *, everywhere: bool = False) -> tuple[dist.TCPStore, int]:
    """A store in this process, and its port; only this host reaches it, unless everywhere. Raises OSError
    where that port cannot be had."""
    if not everywhere:
        listener = socket.create_server((HOST, port), backlog=1024)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", port), backlog=1024)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def connect(port: int, host: str = HOST, limit: timedelta = _LIMIT) -> dist.TCPStore:
    """limit: for the store to be there."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)


HOSTS = "elastic/hosts"  # how many have come; the next one's number


class JobGoneError(Exception):
    """There is no job for this host, or no more; or no host for the job."""


class Hello(NamedTuple):
    """The first message of a follower. name: of its machine; workers: how many it starts."""

    name: str
    workers: int


class Ended(NamedTuple):
    """A worker that has ended; exitcode 0 is a good end."""

    worker: str
    local_rank: int
    pid: int
    exitcode: int
    message: str
    timestamp: int


class Order(NamedTuple):
    """To a follower: "start" the worker, "kill" it, "end" it with `number` as signal and patience; "over":
    end all with that signal, and exit with `status`."""

    what: str
    worker: str = ""
    number: int = 0
    status: int = 0


def hello_key(host: int) -> str:
    return f"elastic/host/{host}/hello"


def welcome_key(host: int) -> str:
    """Value: "" or why the job does not take the host."""
    return f"elastic/host/{host}/welcome"


def beat_key(host: int) -> str:
    """Written again and again, with another number each time."""
    return f"elastic/host/{host}/beat"


def ended_key(host: int, number: int) -> str:
    return f"elastic/host/{host}/ended/{number}"


def order_key(host: int, number: int) -> str:
    return f"elastic/host/{host}/order/{number}"


def done_key(host: int) -> str:
    """There once no worker of that host is left."""
    return f"elastic/host/{host}/done"


class Distant:
    """The workers of another host, as the leader sees and orders them."""

    def __init__(self, store: dist.Store, number: int, hello: Hello, keep_alive: float) -> None:
        self.number, self.name, self.most = number, hello.name, hello.workers
        self._store, self._keep_alive = store, keep_alive
        self._beat, self._heard = b"", time.monotonic()
        self._read = self._ordered = 0

    def gone(self) -> bool:
        """Returns whether its agent has been silent for too long, or has left. Notifies the agent and its
        workers if so."""
        beat = self._store.get(beat_key(self.number)) if self._store.check([beat_key(self.number)]) else b""
        if beat != self._beat:
            self._beat, self._heard = beat, time.monotonic()
        left = self._store.check([done_key(self.number)])
        if not left and time.monotonic() - self._heard < self._keep_alive:
            return False
        self._store.set(gone_key(self.number), "")
        return True

    def ended(self) -> list[tuple[str, ProcessFailure | None]]:
        out: list[tuple[str, ProcessFailure | None]] = []
        while (said := found(self._store, ended_key(self.number, self._read))) is not None:
            self._read += 1
            end = Ended(*said)
            failure = None
            if end.exitcode:
                failure = ProcessFailure(end.local_rank, end.pid, end.exitcode, "")
                failure.message, failure.timestamp = f"host {self.name}: {end.message}", end.timestamp
            out.append((end.worker, failure))
        return out

    def start(self, local_rank: int, restart: int) -> None:
        self._order(Order("start", worker_name(local_rank, restart, self.number)))

    def kill(self, name: str) -> None:
        self._order(Order("kill", name))

    def shutdown(self, death: signal.Signals, names: Iterable[str] | None = None) -> None:
        for name in names or ():
            self._order(Order("end", name, death))

    def over(self, death: signal.Signals, status: int) -> None:
        self._order(Order("over", "", death, status))

    def _order(self, order: Order) -> None:
        tell(self._store, order_key(self.number, self._ordered), order)
        self._ordered += 1


_PAUSE = 0.05  # seconds between two looks
_LAST = 20.0  # seconds that a worker without an agent gets to end by itself


class Watch:
    """abort: called from the thread, with the reason, where members have died."""

    def __init__(self, store: dist.Store, abort: Callable[[str], None]) -> None:
        self._store = store
        self._abort = abort
        self._gone = gone_key(int(os.environ.get("GROUP_RANK", "0")))
        self._changed = threading.Condition(threading.RLock())
        self._calls: dict[int, Call] = {}
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
        if self._broken < self._expected - 1 and self._store.check([broken_key(self._expected - 1)]):
            self._abort("a worker died")
            with self._changed:
                self._broken = self._expected - 1
                self._changed.notify_all()
        said = found(self._store, call_key(self._expected))
        if said is None:
            return False
        call = Call(*said)
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

    def newest(self, since: int) -> tuple[int, Call] | None:
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
