"""Messages that the agent of `meshcast.elastic.run` and its workers exchange in the agent's store.

A worker is a process that an agent started. Whenever the workers that there are change, they come together: a
rendezvous, which has a number.

1. The agent calls the members of rendezvous n (`Call`). Ranks are places in that list.
2. Each member leaves its process group and reports which state it has (`Arrival`).
3. The agent answers once all are there (`Start`), or calls another rendezvous where one of them died.

Each message is written once, under a key of its type and its place, and looked for rather than waited for: a
process that waits in a store cannot be notified of anything else.

Messages that the agents of several hosts exchange in the store of the first.

Hosts are numbered as they come; 0 is the one with the store, whose agent leads the job. The agent of another
host, a follower, starts its workers, reports which of them have ended, and does what it is ordered. Workers
use the store themselves.

Each side treats silence as failure. The leader then continues without the workers of that host, and the
follower ends its own: no worker that the job has given up continues alone.
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, NamedTuple, TypeVar

import torch.distributed as dist

from ..base.observe import log
from ..base.wire import pack, unpack

HOST = "127.0.0.1"
_LIMIT = timedelta(seconds=300)
# Plain texts in the store, next to the messages.
AGENT = "elastic/agent"  # there from the start, the job's id: the store is that of an agent
JOB = "elastic/job"  # id of the job in flight records
HOSTS = "elastic/hosts"  # the number of hosts that have come, and of the next one

T = TypeVar("T")


class JobGoneError(Exception):
    """There is no job for this host, or no longer one; or no host for the job."""


class Worker(NamedTuple):
    """The name of a worker, never given twice. As text "LOCAL_RANK.RESTART", on another host than that of the
    store "LOCAL_RANK.RESTART@HOST"."""

    local_rank: int
    restart: int
    host: int = 0

    def __str__(self) -> str:
        return f"{self.local_rank}.{self.restart}" + (f"@{self.host}" if self.host else "")

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def here(cls) -> Worker:
        """Returns the name of this process, from its environment."""
        names = ("LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT", "GROUP_RANK")
        return cls(*(int(os.environ.get(name, "0")) for name in names))


class Version(NamedTuple):
    """The version of the state that a worker holds; the later is the greater. rendezvous: whose ranks it is
    laid out over; 0 before the first. steps: that are committed."""

    rendezvous: int
    steps: int


@dataclass(frozen=True)
class Ready:
    """A worker can come to a rendezvous. Key: the worker."""


@dataclass(frozen=True)
class Call:
    """Calls workers to a rendezvous. Key: its number. lost: members of the one before that died. No members:
    the job is over."""

    members: list[Worker]
    lost: list[Worker]


@dataclass(frozen=True)
class Arrival:
    """A member has come to a rendezvous. Key: number, worker. version: of its state, None where it has
    none."""

    version: Version | None


@dataclass(frozen=True)
class Broken:
    """A member of that rendezvous has died. The call to the next may have to wait. Key: number."""


@dataclass(frozen=True)
class Start:
    """The start of a process group. Key: number of the rendezvous. port: of its store; 0 where another
    rendezvous was called instead. version: the latest that any member has, None where no member has any.
    previous: the members of that version's rendezvous."""

    port: int
    version: Version | None
    previous: list[Worker]


@dataclass(frozen=True)
class Finished:
    """A worker has ended the job in agreement with all others."""


@dataclass(frozen=True)
class Hello:
    """The first message of a follower. Key: host. name: of its machine; workers: how many it starts."""

    name: str
    workers: int


@dataclass(frozen=True)
class Welcome:
    """The answer to it. Key: host. refused: why the job does not take the host, or ""."""

    refused: str


@dataclass(frozen=True)
class Beat:
    """A sign of life of a follower, written again and again. Key: host."""

    number: int


@dataclass(frozen=True)
class Ended:
    """A worker has ended; exitcode 0 is a good end. Key: host, number of the message. error_file: of torch's
    record(), on that host; message: what it says, or that there is none."""

    worker: Worker
    pid: int = 0
    exitcode: int = 0
    error_file: str = ""
    message: str = ""
    timestamp: int = 0


@dataclass(frozen=True)
class Order:
    """An order to the workers of a host: "start" the worker, "kill" it, "end" it with a signal and patience;
    "over": end all with that signal; a follower then exits with `status`. Key: host, number of the message.
    """

    what: Literal["start", "kill", "end", "over"]
    worker: Worker | None = None
    signal: int = 0
    status: int = 0


@dataclass(frozen=True)
class GivenUp:
    """The job continues without that host. Key: host."""


@dataclass(frozen=True)
class Done:
    """No worker of that host is left. Key: host."""


def _key(kind: type, place: tuple[object, ...]) -> str:
    return "/".join(["elastic", kind.__name__, *map(str, place)])


def post(store: dist.Store, message: object, *place: object) -> None:
    """Writes a message. place: its key, as its class says."""
    store.set(_key(type(message), place), pack(message))


def is_there(store: dist.Store, kind: type, *place: object) -> bool:
    return bool(store.check([_key(kind, place)]))


def found(store: dist.Store, kind: type[T], *place: object) -> T | None:
    """Returns the message; None where there is none yet."""
    return unpack(kind, store.get(_key(kind, place)).decode()) if is_there(store, kind, *place) else None


def wait_until(look: Callable[[], T], pause: float, deadline: float = math.inf) -> T:
    """Returns what look() gives once that is true, or after the deadline, by time.monotonic(), anyway.

    pause: seconds between two looks.
    """
    while not (seen := look()) and time.monotonic() < deadline:
        time.sleep(pause)
    return seen


def serve(port: int = 0, *, everywhere: bool = False) -> tuple[dist.TCPStore, int]:
    """Returns a store in this process, and its port; only this host reaches it, unless everywhere. Raises
    OSError where that port cannot be had."""
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


_PAUSE = 0.05  # seconds between two checks
_LAST = 20.0  # seconds that a worker without an agent gets to end by itself


class Watch:
    """A worker's thread that looks for calls. host: the worker's. abort: called from the thread, with the
    reason, where members have died."""

    def __init__(self, store: dist.Store, host: int, abort: Callable[[str], None]) -> None:
        self._store, self._host, self._abort = store, host, abort
        self._changed = threading.Condition(threading.RLock())
        self._newest = 0, Call([], [])  # the last call, and the number of its rendezvous
        self._lost = 0  # members of each rendezvous before this number have lost others
        self.agent_lost = ""  # why no agent leads this worker any longer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshcast-elastic", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def _run(self) -> None:
        while not self._stop.wait(_PAUSE):
            try:
                while self._look():
                    pass
                given_up = is_there(self._store, GivenUp, self._host)
            except RuntimeError:  # the agent has the store
                self._alone("the agent of meshcast.elastic.run has exited")
                return
            if given_up:
                self._alone("the job continues without this host, whose agent was silent")
                return

    def _look(self) -> bool:
        """Returns whether there was a call. Aborts before it notifies of a loss, so that groups made after
        that are not aborted."""
        last = self._newest[0]
        if last >= max(self._lost, 1) and is_there(self._store, Broken, last):
            self._abort("a worker died")
            with self._changed:
                self._lost = last + 1
                self._changed.notify_all()
        call = found(self._store, Call, last + 1)
        if call is None:
            return False
        over = not call.members
        if call.lost or over:
            self._abort(f"workers {', '.join(map(str, call.lost))} died" if call.lost else "the job is over")
        with self._changed:
            self._newest = last + 1, call
            self._lost = last + 1 if call.lost or over else self._lost
            self._changed.notify_all()
        return True

    def _alone(self, why: str) -> None:
        with self._changed:
            self.agent_lost = why
            self._changed.notify_all()
        self._abort(why)
        if not self._stop.wait(_LAST):
            log.error("elastic: %s; the process ends after %.0f s", why, _LAST)
            os._exit(1)

    def newest(self, since: int, limit: float = 0.0) -> tuple[int, Call] | None:
        """Returns the last call and its number, if it is later than that rendezvous. Waits for it so many
        seconds, but only while there is an agent."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest[0] > since or bool(self.agent_lost), limit)
            return self._newest if self._newest[0] > since else None

    def lost(self, since: int) -> bool:
        """Returns whether members have died since that rendezvous, the job is over, or no agent leads this
        worker."""
        with self._changed:
            return bool(self.agent_lost) or self._lost > since

    def wait_for_loss(self, since: int, limit: float) -> bool:
        """Returns lost(), which may take `limit` seconds to show."""
        with self._changed:
            return self._changed.wait_for(lambda: self.lost(since), limit)

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        atexit.unregister(self.stop)
