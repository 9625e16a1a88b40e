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
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, Std
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext, to_map
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from . import rendezvous as meet
from .rendezvous import HOSTS, Distant, Hello, JobGoneError, hello_key, welcome_key

__all__ = ["Agent", "Config", "Follower", "Workers"]


@dataclass(frozen=True)
class Config:
    """least: ranks in all that the job needs; most: workers on this host. Times in seconds. join_timeout: for
    members of a rendezvous, and for hosts, to come; a worker that does not is killed. last_call: that a
    worker which is ready waits for others that are starting. hosts: least and most. endpoint: of the job's
    store; None where only this host has workers. leads: the store is this host's; None where the endpoint
    tells. keep_alive: for which an agent may be silent to another."""

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
    leave a process that nobody ends."""

    def _start(self) -> None:
        with _signals_held():
            super()._start()


class Workers:
    """The workers of this host, which has a number. endpoint: of the job's store. logs: folder."""

    def __init__(self, config: Config, host: int, endpoint: tuple[str, int], logs: str) -> None:
        self.number, self.most = host, config.most
        self._config, self._endpoint, self._logs = config, endpoint, logs
        self._processes: dict[str, PContext] = {}
        self._living: dict[str, int] = {}  # local ranks

    def start(self, local_rank: int, restart: int) -> None:
        config, name = self._config, meet.worker_name(local_rank, restart, self.number)
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
            "TORCHELASTIC_RESTART_COUNT": str(restart),
            "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
            "TORCHELASTIC_RUN_ID": config.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": str(True),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        shown = config.shown is None or local_rank in config.shown
        # One process each: torch's context of several ends all of them where one fails.
        context = self._processes[name] = _Context(
            name=config.role,
            entrypoint=config.command,
            args={0: config.arguments},
            envs={0: environment},
            logs_specs=DefaultLogsSpecs(
                log_dir=os.path.join(self._logs, f"worker_{name}"),
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
                self._living[name] = local_rank

    def pid(self, name: str) -> int:
        return int(self._processes[name].pids()[0])

    def ended(self) -> list[tuple[str, ProcessFailure | None]]:
        """Returns the workers that have ended since the last look, and how: None for a good end."""
        found = []
        for name, local_rank in list(self._living.items()):
            result = self._processes[name].wait(0)
            if result is not None:
                del self._living[name]
                self.kill(name)  # what it has started and left behind
                failure = result.failures.get(0)
                if failure is not None:
                    failure.local_rank = local_rank
                found.append((name, failure))
        return found

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid(name), number)  # a worker leads a session of its own

    def shutdown(self, death: signal.Signals, names: Iterable[str] | None = None) -> None:
        """Ends these workers, or all that live, with a signal, and by SIGKILL those that are deaf to it."""
        limit = time.monotonic() + self._config.shutdown_timeout
        while living := [name for name in (self._living if names is None else names) if name in self._living]:
            try:
                for name in living:  # all at once: closing one waits for it
                    self.kill(name, death)
                for name in living:
                    self._processes[name].close(death, max(1, int(limit - time.monotonic())))
                    self.kill(name)
                    del self._living[name]
            except SignalException:  # asked again: no patience is left
                death, limit = signal.SIGKILL, time.monotonic()


log = logging.getLogger("torch.distributed.elastic.meshcast")

# Seconds that the store of a group outlives one of its members. Ranks hear of the death meanwhile and leave
# the group: torch prints a stack for each call to a store that has gone.
# Who waits there for the dead waits longer.
_LINGER = 0.2
_LAST_WORD = (
    5.0  # seconds that followers get, beside the patience with their workers, to say that they are done
)


@dataclass
class _Worker:
    name: str
    host: Workers | Distant
    ready_at: float | None = None
    ended: bool = False


@dataclass
class Agent:
    """The agent of the host with the job's store: any rank may die."""

    config: Config
    restarts: int = 0
    _workers: dict[str, _Worker] = field(default_factory=dict)
    _hosts: dict[int, Workers | Distant] = field(default_factory=dict)  # that live
    _come: int = 1  # hosts that have a number
    _expected: set[int] = field(default_factory=set)  # of these, those that have not said who they are
    _failures: dict[str, ProcessFailure] = field(
        default_factory=dict
    )  # by worker without its restart, the last
    _number: int = 0
    _members: dict[int, list[str]] = field(default_factory=dict)  # by rendezvous
    _servers: dict[int, dist.TCPStore] = field(default_factory=dict)
    _servers_end: float = math.inf  # when those of now do
    _late: float = 0.0  # when the rendezvous that is open ends those who have not come
    _short: float | None = None  # since when there are too few workers
    _open: bool = False
    _over: bool = False

    def run(self) -> None:
        """Until the job is over. Raises ChildFailedError where it failed, SignalException where a signal
        ended it, JobGoneError where too few hosts came, OSError where the endpoint cannot be had; no worker
        is left in any case."""
        address, port = self.config.endpoint or (meet.HOST, 0)
        self._store, self._port = meet.serve(port, everywhere=self._several)
        self._store.set(HOSTS, "1")
        self._store.set(meet.AGENT, self.config.run_id)  # from here on followers come
        death, status = signal.SIGTERM, 1
        with tempfile.TemporaryDirectory(prefix="torchelastic_") as folder:
            logs = self.config.log_dir or folder
            self._here = Workers(self.config, 0, (address, self._port), logs)
            try:
                self._add(self._here)
                for local_rank in range(self._here.most):
                    self._here.start(local_rank, 0)
                while self._goes_on():
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
            name = meet.worker_name(local_rank, 0, host.number)
            self._workers[name] = _Worker(name, host)

    def _goes_on(self) -> bool:
        """One look at the workers. Raises ChildFailedError where too few are left."""
        was_over = self._over
        died = self._ended()
        self._over = self._over or self._store.check([meet.FINISHED])
        living = self._living()
        if self._over:
            if not was_over:  # the job has gone on after those of before
                last = {_place(worker) for worker in died}
                self._failures = {place: each for place, each in self._failures.items() if place in last}
            self._end(living)
            if not living and self._failures:
                self._fail()
            return bool(living)
        for worker in died:
            if worker.name in self._members.get(self._number, ()):
                self._store.set(meet.broken_key(self._number), "")
                self._servers_end = min(self._servers_end, time.monotonic() + _LINGER)
            self._replace(worker)
        if self._several:
            self._welcome()
        if time.monotonic() >= self._servers_end:
            self._end_servers()
        living = self._living()
        self._check_enough(living)
        for worker in living:
            if worker.ready_at is None and self._store.check([meet.ready_key(worker.name)]):
                worker.ready_at = time.monotonic()
        self._call(living)
        self._answer(living)
        return True

    def _check_enough(self, living: list[_Worker]) -> None:
        """Too few workers are the end, unless another host may bring more."""
        if len(living) >= self.config.least:
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
            f"{len(living)} workers on {len(self._hosts)} hosts are fewer than the {self.config.least} that "
            f"the job needs, and no other host came within {self.config.join_timeout:g} s"
        )

    def _welcome(self) -> None:
        """Takes the hosts that have come since the last look."""
        come = self._store.add(HOSTS, 0)
        self._expected.update(range(self._come, come))
        self._come = come
        for number in sorted(self._expected):
            said = meet.found(self._store, hello_key(number))
            if said is None:  # it has only just come, or died before its first word
                continue
            self._expected.remove(number)
            host = Distant(self._store, number, Hello(*said), self.config.keep_alive)
            most = self.config.hosts[1]
            refused = f"the job has its {most} hosts" if len(self._hosts) == most else ""
            log.info("host %d (%s) with %d workers %s", host.number, host.name, host.most, refused or "joins")
            meet.tell(self._store, welcome_key(host.number), refused)
            if not refused:
                self._add(host)

    def _ended(self) -> list[_Worker]:
        """Workers that have failed since the last look; one that has ended well ends the job."""
        died = []
        for host in list(self._hosts.values()):
            ended = host.ended()
            if isinstance(host, Distant) and host.gone():
                log.warning("host %d (%s) is gone", host.number, host.name)
                del self._hosts[host.number]
                left = {name for name, _ in ended}
                ended += [
                    (worker.name, _lost_with(worker, host))
                    for worker in self._living()
                    if worker.host is host and worker.name not in left
                ]
            for name, failure in ended:
                worker = self._workers[name]
                worker.ended = True
                if failure is None:
                    self._over = True
                else:
                    log.warning("worker %s (pid %d) died: exit code %d", name, failure.pid, failure.exitcode)
                    self._failures[_place(worker)] = failure
                    died.append(worker)
        return died

    def _living(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if not worker.ended]

    def _replace(self, worker: _Worker) -> None:
        if self.restarts < self.config.max_restarts and worker.host.number in self._hosts:
            self.restarts += 1
            local_rank, restart = meet.parts_of(worker.name)
            log.info("restart %d of at most %d", self.restarts, self.config.max_restarts)
            worker.host.start(local_rank, restart + 1)
            name = meet.worker_name(local_rank, restart + 1, worker.host.number)
            self._workers[name] = _Worker(name, worker.host)

    def _call(self, living: list[_Worker]) -> None:
        """Calls a rendezvous where members have died, or others are ready to join."""
        now, members = time.monotonic(), self._members.get(self._number, [])
        ready = {worker.name: worker for worker in living if worker.ready_at is not None}
        lost = [name for name in members if name not in ready]
        joining = [worker for name, worker in ready.items() if name not in members]
        if not (lost or joining) or len(ready) < self.config.least:
            return
        least, most = self.config.hosts
        coming = most if not members else 0  # hosts
        if not lost and (len(ready) < len(living) or len(self._hosts) < coming):
            # What is starting may be here in a moment; leaving a group costs each rank its connections.
            started = len(ready) == len(living) and len(self._hosts) >= least
            patience = self.config.last_call if members or started else self.config.join_timeout
            if now < min(worker.ready_at or now for worker in joining) + patience:
                return
        self._announce([name for name in members if name in ready] + [each.name for each in joining], lost)
        self._late, self._open = now + self.config.join_timeout, True

    def _announce(self, members: list[str], lost: list[str]) -> None:
        if self._open:
            meet.tell(self._store, meet.start_key(self._number), meet.Start(0, None, []))
            self._open = False
        self._number += 1
        self._members[self._number] = members
        log.info("rendezvous %d: members %s, lost %s", self._number, members, lost)
        meet.tell(self._store, meet.call_key(self._number), meet.Call(members, lost))

    def _answer(self, living: list[_Worker]) -> None:
        """Starts the process group once all members are there."""
        if not self._open:
            return
        members = self._members[self._number]
        said = {name: meet.found(self._store, meet.version_key(self._number, name)) for name in members}
        here = {worker.name for worker in living}
        absent = [worker for worker in living if worker.name in members and said[worker.name] is None]
        if absent or not here.issuperset(members):
            if time.monotonic() > self._late:
                for worker in absent:
                    log.warning("worker %s has not come to rendezvous %d", worker.name, self._number)
                    worker.host.kill(worker.name)
            return
        versions = [meet.Version(*version) for (version,) in said.values() if version is not None]
        latest = max(versions, default=None)
        self._end_servers()  # all have left the groups of before
        server, port = meet.serve(everywhere=self._several)
        self._servers[self._number] = server
        then = [] if latest is None else self._members[latest.rendezvous]
        start = meet.Start(port, None if latest is None else list(latest), then)
        meet.tell(self._store, meet.start_key(self._number), start)
        self._open = False

    def _end(self, living: list[_Worker]) -> None:
        """Tells that the job is over, once, and ends those who never were part of it."""
        members = self._members.get(self._number)
        if not members:
            return
        for worker in living:
            if worker.name not in members:
                worker.ended = True
                worker.host.shutdown(signal.SIGTERM, [worker.name])
        self._announce([], [])

    def _end_servers(self) -> None:
        self._servers.clear()
        self._servers_end = math.inf

    def _fail(self) -> None:
        failures = (
            dict(enumerate(self._failures.values()))
            if self._several
            else {each.local_rank: each for each in self._failures.values()}
        )
        raise ChildFailedError(self.config.command, failures)

    def _shutdown(self, death: signal.Signals, status: int) -> None:
        distant = [host for host in self._hosts.values() if isinstance(host, Distant)]
        for host in distant:
            host.over(death, status)
        self._here.shutdown(death)
        limit = time.monotonic() + self.config.shutdown_timeout + _LAST_WORD
        while time.monotonic() < limit and not all(
            host.gone() for host in distant
        ):  # the store ends with this
            time.sleep(self.config.interval)
        self._servers.clear()


def _place(worker: _Worker) -> str:
    """The same for a worker and those in its place."""
    return f"{meet.parts_of(worker.name)[0]}@{worker.host.number}"


def _lost_with(worker: _Worker, host: Distant) -> ProcessFailure:
    failure = ProcessFailure(meet.parts_of(worker.name)[0], 0, -signal.SIGKILL, "")
    failure.message = f"host {host.number} ({host.name}) is gone, with worker {worker.name}"
    return failure


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
