"""Messages that the agents of several hosts exchange in the store of the first.

Hosts are numbered as they come; 0 is the one with the store, whose agent leads the job. The agent of another
host, a follower, starts its workers, says which of them have ended, and does what it is ordered. Workers talk
to the store themselves.

An agent that says nothing for too long is taken for gone. The leader then goes on without the workers of that
host, and the follower ends its own: no worker that the job has given up goes on alone.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from . import rendezvous as meet

__all__ = ["HOSTS", "Distant", "Ended", "Hello", "JobGoneError", "Order", "beat_key", "done_key", "ended_key"]
__all__ += ["hello_key", "order_key", "welcome_key"]

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
        self._store.set(meet.gone_key(self.number), "")
        return True

    def ended(self) -> list[tuple[str, ProcessFailure | None]]:
        found: list[tuple[str, ProcessFailure | None]] = []
        while (said := meet.found(self._store, ended_key(self.number, self._read))) is not None:
            self._read += 1
            end = Ended(*said)
            failure = None
            if end.exitcode:
                failure = ProcessFailure(end.local_rank, end.pid, end.exitcode, "")
                failure.message, failure.timestamp = f"host {self.name}: {end.message}", end.timestamp
            found.append((end.worker, failure))
        return found

    def start(self, local_rank: int, restart: int) -> None:
        self._order(Order("start", meet.worker_name(local_rank, restart, self.number)))

    def kill(self, name: str) -> None:
        self._order(Order("kill", name))

    def shutdown(self, death: signal.Signals, names: Iterable[str] | None = None) -> None:
        for name in names or ():
            self._order(Order("end", name, death))

    def over(self, death: signal.Signals, status: int) -> None:
        self._order(Order("over", "", death, status))

    def _order(self, order: Order) -> None:
        meet.tell(self._store, order_key(self.number, self._ordered), order)
        self._ordered += 1
