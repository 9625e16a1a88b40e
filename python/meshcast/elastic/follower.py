"""The agent of another host: starts workers there, and does what the agent that leads the job orders."""

from __future__ import annotations

import logging
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException

from . import rendezvous as meet
from .agent import Config, Workers
from .rendezvous import JobGoneError

__all__ = ["Follower"]

log = logging.getLogger("torch.distributed.elastic.meshcast")


class Follower:
    def __init__(self, config: Config) -> None:
        self._config = config
        assert config.endpoint is not None
        self._endpoint = config.endpoint

    def run(self) -> int:
        """Until the job is over; returns its exit status. Raises JobGoneError, or SignalException where a
        signal ended it; no worker is left on this host in any case."""
        store, number = self._join()
        death = signal.SIGTERM
        with tempfile.TemporaryDirectory(prefix="torchelastic_") as folder:
            workers = Workers(self._config, number, self._endpoint, self._config.log_dir or folder)
            link = _Link(store, number, self._config)
            try:
                for local_rank in range(self._config.most):
                    workers.start(local_rank, 0)
                while True:
                    for name, failure in workers.ended():
                        local_rank, _ = meet.parts_of(name)
                        ended = meet.Ended(name, local_rank, 0, 0, "", 0)
                        if failure is not None:
                            log.warning("worker %s (pid %d) died: %s", name, failure.pid, failure.message)
                            facts = (failure.pid, failure.exitcode, failure.message, failure.timestamp)
                            ended = meet.Ended(name, local_rank, *facts)
                        link.said.append(ended)
                    while (order := link.next()) is not None:
                        if order.what == "over":
                            death = signal.Signals(order.number)
                            return order.status
                        _carry_out(order, workers)
                    time.sleep(self._config.interval)
            except SignalException as error:
                death = error.sigval
                raise
            finally:
                workers.shutdown(death)
                link.close()

    def _join(self) -> tuple[dist.TCPStore, int]:
        host, port = self._endpoint
        limit = time.monotonic() + self._config.join_timeout
        try:
            store = meet.connect(port, host, timedelta(seconds=self._config.join_timeout))
            known = time.monotonic() + self._config.keep_alive  # the agent listens before it says what it is
            while not store.check([meet.AGENT]):
                if time.monotonic() > known:
                    raise JobGoneError(f"what listens at {host}:{port} is no agent of meshcast.elastic.run")
                time.sleep(self._config.interval)
            if (its := store.get(meet.AGENT).decode()) != self._config.run_id:
                raise JobGoneError(
                    f"the job at {host}:{port} has the id {its!r}, not {self._config.run_id!r}"
                )
            number = store.add(meet.HOSTS, 1) - 1
            hello = meet.Hello(socket.gethostname(), self._config.most)
            meet.tell(store, meet.hello_key(number), hello)
            while (refused := meet.found(store, meet.welcome_key(number))) is None:
                if time.monotonic() > limit:
                    raise JobGoneError(f"the agent at {host}:{port} does not answer")
                time.sleep(self._config.interval)
        except RuntimeError as error:
            raise JobGoneError(f"no agent of meshcast.elastic.run at {host}:{port}: {error}") from None
        if refused:
            raise JobGoneError(f"the agent at {host}:{port} does not take this host: {refused}")
        return store, number


def _carry_out(order: meet.Order, workers: Workers) -> None:
    if order.what == "start":
        workers.start(*meet.parts_of(order.worker))
    elif order.what == "kill":
        workers.kill(order.worker)
    elif order.what == "end":
        workers.shutdown(signal.Signals(order.number), [order.worker])


class _Link:
    """The talk with the leader, in a thread of its own: a store whose host has gone does not answer at all.
    said: workers that have ended, to be told."""

    def __init__(self, store: dist.TCPStore, number: int, config: Config) -> None:
        self.said: deque[meet.Ended] = deque()
        self._store, self._number, self._config = store, number, config
        self._orders: deque[meet.Order] = deque()
        self._heard = time.monotonic()
        self._lost = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshcast-agent", daemon=True)
        self._thread.start()

    def next(self) -> meet.Order | None:
        """The next order. Raises JobGoneError where the leader is gone or has given this host up."""
        if self._orders:
            return self._orders.popleft()
        silent = time.monotonic() - self._heard
        if self._lost or silent > self._config.keep_alive:
            raise JobGoneError(self._lost or f"the job's agent has been silent for {silent:.0f} s")
        return None

    def close(self) -> None:
        """Tells the leader that no worker is left here, where it still listens."""
        self._stop.set()
        self._thread.join(self._config.keep_alive)

    def _run(self) -> None:
        beats = told = taken = 0
        try:
            while not self._stop.wait(self._config.interval):
                self._store.set(meet.beat_key(self._number), str(beats := beats + 1))
                while self.said:
                    meet.tell(self._store, meet.ended_key(self._number, told), self.said.popleft())
                    told += 1
                while (said := meet.found(self._store, meet.order_key(self._number, taken))) is not None:
                    self._orders.append(meet.Order(*said))
                    taken += 1
                if self._store.check([meet.gone_key(self._number)]):
                    self._lost = "the job goes on without this host, whose agent was silent"
                    return
                self._heard = time.monotonic()
            self._store.set(meet.done_key(self._number), "")
        except RuntimeError as error:
            self._lost = f"the job's agent is gone: {error}".splitlines()[0]
