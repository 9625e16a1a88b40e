"""The agent that leads a job: starts its workers, replaces those that die, and calls all together.

The agent of another host: starts workers there, and does what the agent that leads the job orders.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, Std
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext, to_map
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from . import rendezvous as meet
from .rendezvous import Ended, JobGoneError, Order, Worker

__all__ = ["Agent", "Config", "Follower", "Workers"]


@dataclass(frozen=True)
class Config:
    """least: ranks in all that the job needs; most: workers on this host. Times in seconds. join_timeout: for
    members of a rendezvous, and for hosts, to come; a worker that does not is killed. last_call: that a
    worker which is ready waits for others that are starting. hosts: least and most. endpoint: of the job's
    store; None where only this host has workers. leads: the store is this host's; None where the endpoint
    shows it. keep_alive: for which an agent may be silent to another."""

    command: str
    arguments: tuple[str, ...]
    least: int
    most: int
    max_restarts: int = 0
    interval: float = 0.1
    join_timeout: float = 600.0
    last_call: float = 5.0
    shutdown_timeout: float = 30.0
    role: str = "default"
    run_id: str = "none"
    log_dir: str | None = None
    redirects: Std | dict[int, Std] = Std.NONE
    tee: Std | dict[int, Std] = Std.NONE
    shown: frozenset[int] | None = None  # local ranks whose output comes to the console; None: all
    hosts: tuple[int, int] = (1, 1)
    endpoint: tuple[str, int] | None = None
    leads: bool | None = None
    keep_alive: float = 6.0


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Delays the handlers of signals that end a job until the block is left."""
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread alone
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda which, _: came.append(which)) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


class _Context(SubprocessContext):
    """Torch's context of one process. A signal between the start of the process and the note of its pid would
    leave a process that nothing ends."""

    def _start(self) -> None:
        with _signals_held():
            super()._start()


class Workers:
    """The workers of this host, which has a number. endpoint: of the job's store. logs: folder."""

    def __init__(self, config: Config, host: int, endpoint: tuple[str, int], logs: str) -> None:
        self.number, self.most = host, config.most
        self._config, self._endpoint, self._logs = config, endpoint, logs
        self._processes: dict[Worker, PContext] = {}
        self._living: set[Worker] = set()

    def _start(self, worker: Worker) -> None:
        config, local_rank = self._config, worker.local_rank
        size, world = str(config.most), str(config.most * config.hosts[1])
        rank = str(self.number * config.most + local_rank)
        environment = {
            **dict.fromkeys(("RANK", "ROLE_RANK"), rank),
            **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), world),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": size,
            "GROUP_RANK": str(self.number),
            "GROUP_WORLD_SIZE": str(config.hosts[1]),
            "ROLE_NAME": config.role,
            "MASTER_ADDR": self._endpoint[0],
            "MASTER_PORT": str(self._endpoint[1]),
            "TORCHELASTIC_RESTART_COUNT": str(worker.restart),
            "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
            "TORCHELASTIC_RUN_ID": config.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": str(True),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        shown = config.shown is None or local_rank in config.shown
        # One process each: torch's context of several ends all of them where one fails.
        context = self._processes[worker] = _Context(
            name=config.role,
            entrypoint=config.command,
            args={0: config.arguments},
            envs={0: environment},
            logs_specs=DefaultLogsSpecs(
                log_dir=os.path.join(self._logs, f"worker_{worker}"),
                redirects=to_map(config.redirects, config.most)[local_rank],
                tee=to_map(config.tee, config.most)[local_rank],
                local_ranks_filter=None if shown else {-1},
            ),
            log_line_prefixes={0: f"[{config.role}{rank}]:"},
        )
        try:
            context.start()
        finally:
            if context.subprocess_handlers:  # also where a signal came meanwhile: the process is to be ended
                self._living.add(worker)

    def pid(self, worker: Worker) -> int:
        return int(self._processes[worker].pids()[0])

    def ended(self) -> list[Ended]:
        """Returns the workers that have ended since the last look."""
        ended = []
        for worker in sorted(self._living):
            result = self._processes[worker].wait(0)
            if result is not None:
                self._living.remove(worker)
                self._kill(worker)  # processes that it has started and left behind
                failure, end = result.failures.get(0), Ended(worker)
                if failure is not None:
                    text = str(failure.message)  # a dictionary where torch's record() noted an exception
                    facts = failure.exitcode, failure.error_file, text, failure.timestamp
                    end = Ended(worker, failure.pid, *facts)
                ended.append(end)
        return ended

    def carry_out(self, order: Order) -> None:
        assert order.worker is not None
        if order.what == "start":
            self._start(order.worker)
        elif order.what == "kill":
            self._kill(order.worker)
        else:
            self.shutdown(signal.Signals(order.signal), [order.worker])

    def _kill(self, worker: Worker, number: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid(worker), number)  # a worker leads a session of its own

    def shutdown(self, death: signal.Signals, workers: Iterable[Worker] | None = None) -> None:
        """Ends these workers, or all that live, with a signal, and by SIGKILL those that are deaf to it."""
        asked = self._living.copy() if workers is None else set(workers)
        limit = time.monotonic() + self._config.shutdown_timeout
        while living := sorted(asked & self._living):
            try:
                for worker in living:  # all at once: closing one waits for it
                    self._kill(worker, death)
                for worker in living:
                    self._processes[worker].close(death, max(1, int(limit - time.monotonic())))
                    self._kill(worker)
                    self._living.remove(worker)
            except SignalException:  # asked again: no patience is left
                death, limit = signal.SIGKILL, time.monotonic()


class Distant:
    """The workers of another host, as the leader sees and orders them."""

    def __init__(self, store: dist.Store, number: int, hello: meet.Hello, keep_alive: float) -> None:
        self.number, self.name, self.most = number, hello.name, hello.workers
        self._store, self._keep_alive = store, keep_alive
        self._beat: meet.Beat | None = None
        self._heard = time.monotonic()
        self._read = self._ordered = 0

    def is_lost(self) -> bool:
        """Returns whether its agent has been silent for too long, or has left. Notifies the agent and its
        workers if so."""
        beat = meet.found(self._store, meet.Beat, self.number)
        if beat != self._beat:
            self._beat, self._heard = beat, time.monotonic()
        left = meet.is_there(self._store, meet.Done, self.number)
        if not left and time.monotonic() - self._heard < self._keep_alive:
            return False
        meet.post(self._store, meet.GivenUp(), self.number)
        return True

    def ended(self) -> list[Ended]:
        ended = []
        while (end := meet.found(self._store, Ended, self.number, self._read)) is not None:
            self._read += 1
            ended.append(replace(end, message=f"host {self.name}: {end.message}"))
        return ended

    def carry_out(self, order: Order) -> None:
        meet.post(self._store, order, self.number, self._ordered)
        self._ordered += 1


log = logging.getLogger("torch.distributed.elastic.meshcast")

# Seconds that the store of a group outlives one of its members. Ranks learn of the death meanwhile and leave
# the group: torch prints a stack for each call to a store that is closed.
# A rank that waits there for a failed one waits longer.
_LINGER = 0.2
# Seconds that followers get, in addition to their patience with workers, to report that they are done.
_LAST_WORD = 5.0


@dataclass
class Agent:
    """The agent of the host with the job's store: any rank may die."""

    config: Config
    restarts: int = 0
    # Workers that live: when each got ready for a rendezvous, None while it starts.
    _living: dict[Worker, float | None] = field(default_factory=dict)
    _hosts: dict[int, Workers | Distant] = field(default_factory=dict)  # that live
    _answered: set[int] = field(default_factory=set)  # hosts that are taken or refused
    # The last failure of each worker and those started in its place, by the worker's first name.
    _failures: dict[Worker, Ended] = field(default_factory=dict)
    _number: int = 0
    _members: dict[int, list[Worker]] = field(default_factory=dict)  # by rendezvous
    _servers: dict[int, dist.TCPStore] = field(default_factory=dict)
    _servers_end: float = math.inf  # when the current ones do
    _late: float = 0.0  # when workers that have not come to the open rendezvous are killed
    _short: float | None = None  # since when there are too few workers
    _open: bool = False
    _over: bool = False

    def run(self) -> None:
        """Returns when the job is over. Raises ChildFailedError where it failed, SignalException where a
        signal ended it, JobGoneError where too few hosts came, OSError where the endpoint cannot be had; no
        worker is left in any case."""
        address, port = self.config.endpoint or (meet.HOST, 0)
        self._store, self._port = meet.serve(port, everywhere=self._several)
        self._store.set(meet.HOSTS, "1")
        self._store.set(meet.AGENT, self.config.run_id)  # from here on followers come
        death, status = signal.SIGTERM, 1
        with tempfile.TemporaryDirectory(prefix="torchelastic_") as folder:
            logs = self.config.log_dir or folder
            self._here = Workers(self.config, 0, (address, self._port), logs)
            try:
                self._add(self._here)
                while self._continues():
                    time.sleep(self.config.interval)
                status = 0
            except SignalException as error:
                death, status = error.sigval, 128 + error.sigval
                raise
            finally:
                self._shutdown(death, status)

    @property
    def _several(self) -> bool:
        return self.config.endpoint is not None

    def _add(self, host: Workers | Distant) -> None:
        self._hosts[host.number] = host
        for local_rank in range(host.most):
            self._start(Worker(local_rank, 0, host.number))

    def _start(self, worker: Worker) -> None:
        self._living[worker] = None
        self._order("start", worker)

    def _order(self, what: Literal["start", "kill", "end"], worker: Worker) -> None:
        self._hosts[worker.host].carry_out(Order(what, worker, signal.SIGTERM))

    def _continues(self) -> bool:
        """Looks at the workers once. Raises ChildFailedError where too few are left."""
        was_over = self._over
        died = self._ended()
        self._over = self._over or meet.is_there(self._store, meet.Finished)
        if self._over:
            if not was_over:  # the job has continued after earlier failures
                last = {_first(worker) for worker in died}
                self._failures = {first: each for first, each in self._failures.items() if first in last}
            living = bool(self._living)
            self._end()
            if not living and self._failures:
                self._fail()
            return living
        for worker in died:
            if worker in self._members.get(self._number, ()):
                meet.post(self._store, meet.Broken(), self._number)
                self._servers_end = min(self._servers_end, time.monotonic() + _LINGER)
            if self.restarts < self.config.max_restarts and worker.host in self._hosts:
                self.restarts += 1
                log.info("restart %d of at most %d", self.restarts, self.config.max_restarts)
                self._start(worker._replace(restart=worker.restart + 1))
        if self._several:
            self._welcome()
        if time.monotonic() >= self._servers_end:
            self._end_servers()
        self._check_enough()
        for worker, ready in self._living.items():
            if ready is None and meet.is_there(self._store, meet.Ready, worker):
                self._living[worker] = time.monotonic()
        self._call()
        self._answer()
        return True

    def _check_enough(self) -> None:
        """Raises where there are too few workers, unless another host may bring more."""
        if len(self._living) >= self.config.least:
            self._short = None
            return
        now = time.monotonic()
        self._short = now if self._short is None else self._short
        may_come = len(self._hosts) < self.config.hosts[1]
        if may_come and now <= self._short + self.config.join_timeout:
            return
        if self._failures:
            self._fail()
        raise JobGoneError(
            f"{len(self._living)} workers on {len(self._hosts)} hosts are fewer than the {self.config.least} "
            f"that the job needs, and no other host came within {self.config.join_timeout:g} s"
        )

    def _welcome(self) -> None:
        """Takes the hosts that have come since the last look."""
        for number in range(1, self._store.add(meet.HOSTS, 0)):
            hello = None if number in self._answered else meet.found(self._store, meet.Hello, number)
            if hello is None:  # answered; or it has only just come, or died before its first message
                continue
            self._answered.add(number)
            host = Distant(self._store, number, hello, self.config.keep_alive)
            most = self.config.hosts[1]
            refused = f"the job has its {most} hosts" if len(self._hosts) == most else ""
            log.info("host %d (%s) with %d workers %s", number, host.name, host.most, refused or "joins")
            meet.post(self._store, meet.Welcome(refused), number)
            if not refused:
                self._add(host)

    def _ended(self) -> list[Worker]:
        """Returns the workers that have failed since the last look; one that has ended well ends the job."""
        died = []
        for host in list(self._hosts.values()):
            ended = host.ended()
            if isinstance(host, Distant) and host.is_lost():
                log.warning("host %d (%s) is lost", host.number, host.name)
                del self._hosts[host.number]
                left = {end.worker for end in ended}
                lost = [each for each in self._living if each.host == host.number and each not in left]
                ended += [_lost_with(worker, host) for worker in lost]
            for end in ended:
                self._living.pop(end.worker, None)
                if end.exitcode == 0:
                    self._over = True
                else:
                    log.warning("worker %s (pid %d) died: exit code %d", end.worker, end.pid, end.exitcode)
                    self._failures[_first(end.worker)] = end
                    died.append(end.worker)
        return died

    def _call(self) -> None:
        """Calls a rendezvous where members have died, or others are ready to join."""
        now, members = time.monotonic(), self._members.get(self._number, [])
        ready = {worker: at for worker, at in self._living.items() if at is not None}
        lost = [worker for worker in members if worker not in ready]
        joining = [worker for worker in ready if worker not in members]
        if not (lost or joining) or len(ready) < self.config.least:
            return
        least, most = self.config.hosts
        coming = most if not members else 0  # hosts
        if not lost and (len(ready) < len(self._living) or len(self._hosts) < coming):
            # Starting workers may be ready in a moment; leaving a group costs each rank its connections.
            started = len(ready) == len(self._living) and len(self._hosts) >= least
            patience = self.config.last_call if members or started else self.config.join_timeout
            if now < min(ready[worker] for worker in joining) + patience:
                return
        self._announce([worker for worker in members if worker in ready] + joining, lost)
        self._late, self._open = now + self.config.join_timeout, True

    def _announce(self, members: list[Worker], lost: list[Worker]) -> None:
        if self._open:
            meet.post(self._store, meet.Start(0, None, []), self._number)
            self._open = False
        self._number += 1
        self._members[self._number] = members
        log.info("rendezvous %d: members %s, lost %s", self._number, members, lost)
        meet.post(self._store, meet.Call(members, lost), self._number)

    def _answer(self) -> None:
        """Starts the process group once all members are there."""
        if not self._open:
            return
        members = self._members[self._number]
        arrivals = {each: meet.found(self._store, meet.Arrival, self._number, each) for each in members}
        absent = [each for each, arrival in arrivals.items() if arrival is None and each in self._living]
        if absent or not self._living.keys() >= set(members):
            if time.monotonic() > self._late:
                for worker in absent:
                    log.warning("worker %s has not come to rendezvous %d", worker, self._number)
                    self._order("kill", worker)
            return
        versions = [each.version for each in arrivals.values() if each is not None]
        latest = max((each for each in versions if each is not None), default=None)
        self._end_servers()  # all have left the previous groups
        server, port = meet.serve(everywhere=self._several)
        self._servers[self._number] = server
        previous = [] if latest is None else self._members[latest.rendezvous]
        meet.post(self._store, meet.Start(port, latest, previous), self._number)
        self._open = False

    def _end(self) -> None:
        """Announces that the job is over, once, and ends workers that never were part of it."""
        members = self._members.get(self._number)
        if not members:
            return
        for worker in [each for each in self._living if each not in members]:
            del self._living[worker]
            self._order("end", worker)
        self._announce([], [])

    def _end_servers(self) -> None:
        self._servers.clear()
        self._servers_end = math.inf

    def _fail(self) -> None:
        failures = {}
        for number, end in enumerate(self._failures.values()):
            local_rank = end.worker.local_rank
            failure = ProcessFailure(local_rank, end.pid, end.exitcode, end.error_file)
            failure.timestamp = end.timestamp
            if end.worker.host:  # whose files are not here
                failure.message = end.message
            failures[number if self._several else local_rank] = failure
        raise ChildFailedError(self.config.command, failures)

    def _shutdown(self, death: signal.Signals, status: int) -> None:
        distant = [host for host in self._hosts.values() if isinstance(host, Distant)]
        for host in distant:
            host.carry_out(Order("over", None, death, status))
        self._here.shutdown(death)
        limit = time.monotonic() + self.config.shutdown_timeout + _LAST_WORD
        # The store ends with this process.
        meet.wait_until(lambda: all(host.is_lost() for host in distant), self.config.interval, limit)
        self._servers.clear()


def _first(worker: Worker) -> Worker:
    """Returns the same for a worker and those in its place."""
    return worker._replace(restart=0)


def _lost_with(worker: Worker, host: Distant) -> Ended:
    message = f"host {host.number} ({host.name}) is lost, with worker {worker}"
    return Ended(worker, 0, -signal.SIGKILL, "", message, int(time.time()))


class Follower:
    def __init__(self, config: Config) -> None:
        self._config = config
        assert config.endpoint is not None
        self._endpoint = config.endpoint

    def run(self) -> int:
        """Returns the job's exit status when it is over. Raises JobGoneError, or SignalException where a
        signal ended it; no worker is left on this host in any case."""
        store, number = self._join()
        death = signal.SIGTERM
        with tempfile.TemporaryDirectory(prefix="torchelastic_") as folder:
            workers = Workers(self._config, number, self._endpoint, self._config.log_dir or folder)
            link = _Link(store, number, self._config)
            try:
                while True:
                    for end in workers.ended():
                        if end.exitcode:
                            log.warning("worker %s (pid %d) died: %s", end.worker, end.pid, end.message)
                        link.ended.append(end)
                    while (order := link.next()) is not None:
                        if order.what == "over":
                            death = signal.Signals(order.signal)
                            return order.status
                        workers.carry_out(order)
                    time.sleep(self._config.interval)
            except SignalException as error:
                death = error.sigval
                raise
            finally:
                workers.shutdown(death)
                link.close()

    def _join(self) -> tuple[dist.TCPStore, int]:
        config, (host, port) = self._config, self._endpoint
        limit = time.monotonic() + config.join_timeout
        try:
            store = meet.connect(port, host, timedelta(seconds=config.join_timeout))
            known = time.monotonic() + config.keep_alive  # the agent listens before it identifies itself
            if not meet.wait_until(lambda: store.check([meet.AGENT]), config.interval, known):
                raise JobGoneError(f"what listens at {host}:{port} is no agent of meshcast.elastic.run")
            if (its := store.get(meet.AGENT).decode()) != config.run_id:
                raise JobGoneError(f"the job at {host}:{port} has the id {its!r}, not {config.run_id!r}")
            number = store.add(meet.HOSTS, 1) - 1
            meet.post(store, meet.Hello(socket.gethostname(), config.most), number)
            welcome = meet.wait_until(lambda: meet.found(store, meet.Welcome, number), config.interval, limit)
        except RuntimeError as error:
            raise JobGoneError(f"no agent of meshcast.elastic.run at {host}:{port}: {error}") from None
        if welcome is None:
            raise JobGoneError(f"the agent at {host}:{port} does not answer")
        if welcome.refused:
            raise JobGoneError(f"the agent at {host}:{port} does not take this host: {welcome.refused}")
        return store, number


class _Link:
    """Talks with the leader in a thread of its own: a store whose host is lost does not answer at all.
    ended: workers to be reported."""

    def __init__(self, store: dist.TCPStore, number: int, config: Config) -> None:
        self.ended: deque[Ended] = deque()
        self._store, self._number, self._config = store, number, config
        self._orders: deque[Order] = deque()
        self._heard = time.monotonic()
        self._lost = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshcast-agent", daemon=True)
        self._thread.start()

    def next(self) -> Order | None:
        """Returns the next order. Raises JobGoneError where the leader has exited or has given this host
        up."""
        if self._orders:
            return self._orders.popleft()
        silent = time.monotonic() - self._heard
        if self._lost or silent > self._config.keep_alive:
            raise JobGoneError(self._lost or f"the job's agent has been silent for {silent:.0f} s")
        return None

    def close(self) -> None:
        """Notifies the leader that no worker is left here, where it still listens."""
        self._stop.set()
        self._thread.join(self._config.keep_alive)

    def _run(self) -> None:
        store, host = self._store, self._number
        beats = sent = taken = 0
        try:
            while not self._stop.wait(self._config.interval):
                meet.post(store, meet.Beat(beats := beats + 1), host)
                while self.ended:
                    meet.post(store, self.ended.popleft(), host, sent)
                    sent += 1
                while (order := meet.found(store, Order, host, taken)) is not None:
                    self._orders.append(order)
                    taken += 1
                if meet.is_there(store, meet.GivenUp, host):
                    self._lost = "the job continues without this host, whose agent was silent"
                    return
                self._heard = time.monotonic()
            meet.post(store, meet.Done(), host)
        except RuntimeError as error:
            self._lost = f"the job's agent has exited: {error}".splitlines()[0]
