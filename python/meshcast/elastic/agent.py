"""The agent: starts the workers of a job on this host, replaces those that die, and calls all together."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import tempfile
import time
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, Std, start_processes
from torch.distributed.elastic.multiprocessing.api import SignalException, to_map
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from . import rendezvous as meet

__all__ = ["Agent", "Config"]

log = logging.getLogger("torch.distributed.elastic.meshcast")

# Seconds that the store of a group outlives one of its members. Ranks hear of the death meanwhile and leave
# the group: torch prints a stack for each call to a store that has gone.
# Who waits there for the dead waits longer.
_LINGER = 0.2


@dataclass(frozen=True)
class Config:
    """least, most: ranks. Times in seconds. join_timeout: for members of a rendezvous to come to it; who does
    not is killed. last_call: that a worker which is ready waits for others that are starting."""

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


@dataclass
class _Worker:
    name: str
    local_rank: int
    process: PContext
    ready_at: float | None = None
    ended: bool = False


@dataclass
class Agent:
    """Of one host. The job's store lives here: any rank may die."""

    config: Config
    restarts: int = 0
    _workers: dict[str, _Worker] = field(default_factory=dict)
    _failures: dict[int, ProcessFailure] = field(default_factory=dict)  # by local rank, the last
    _number: int = 0
    _members: dict[int, list[str]] = field(default_factory=dict)  # by rendezvous
    _servers: dict[int, dist.TCPStore] = field(default_factory=dict)
    _servers_end: float = math.inf  # when those of now do
    _late: float = 0.0  # when the rendezvous that is open ends those who have not come
    _open: bool = False
    _over: bool = False

    def run(self) -> None:
        """Until the job is over. Raises ChildFailedError where it failed, SignalException where a signal
        ended it; no worker is left in any case."""
        self._store, self._port = meet.serve()
        self._store.set(meet.AGENT, "")
        death = signal.SIGTERM
        with tempfile.TemporaryDirectory(prefix="torchelastic_") as folder:
            self._logs = self.config.log_dir or folder
            try:
                for local_rank in range(self.config.most):
                    self._start(local_rank, 0)
                while self._goes_on():
                    time.sleep(self.config.interval)
            except SignalException as error:
                death = error.sigval
                raise
            finally:
                self._shutdown(death)

    def _start(self, local_rank: int, restart: int) -> None:
        config, name = self.config, f"{local_rank}.{restart}"
        size = str(config.most)
        environment = {
            **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(local_rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": config.role,
            "MASTER_ADDR": meet.HOST,
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_RESTART_COUNT": str(restart),
            "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
            "TORCHELASTIC_RUN_ID": config.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": str(True),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        shown = config.shown is None or local_rank in config.shown
        # One process each: torch's context of several ends all of them where one fails.
        process = start_processes(
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
            log_line_prefixes={0: f"[{config.role}{local_rank}]:"},
        )
        self._workers[name] = _Worker(name, local_rank, process)

    def _goes_on(self) -> bool:
        """One look at the workers. Raises ChildFailedError where too few are left."""
        was_over = self._over
        died = [worker for worker in self._living() if self._has_died(worker)]
        self._over = self._over or self._store.check([meet.FINISHED])
        living = self._living()
        if self._over:
            if not was_over:  # the job has gone on after those of before
                last = {worker.local_rank for worker in died}
                self._failures = {rank: each for rank, each in self._failures.items() if rank in last}
            self._end(living)
            if not living and self._failures:
                self._fail()
            return bool(living)
        for worker in died:
            if worker.name in self._members.get(self._number, ()):
                self._store.set(meet.broken_key(self._number), "")
                self._servers_end = min(self._servers_end, time.monotonic() + _LINGER)
            self._replace(worker)
        if time.monotonic() >= self._servers_end:
            self._end_servers()
        living = self._living()
        if len(living) < self.config.least:
            self._fail()
        for worker in living:
            if worker.ready_at is None and self._store.check([meet.ready_key(worker.name)]):
                worker.ready_at = time.monotonic()
        self._call(living)
        self._answer(living)
        return True

    def _living(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if not worker.ended]

    def _has_died(self, worker: _Worker) -> bool:
        """Whether it has failed since the last look; one that has ended well ends the job."""
        result = worker.process.wait(0)
        if result is None:
            return False
        worker.ended = True
        _signal(worker, signal.SIGKILL)  # what it has started and left behind
        failure = result.failures.get(0)
        if failure is None:
            self._over = True
            return False
        failure.local_rank = worker.local_rank
        log.warning("worker %s (pid %d) died: exit code %d", worker.name, failure.pid, failure.exitcode)
        self._failures[worker.local_rank] = failure
        return True

    def _replace(self, worker: _Worker) -> None:
        if self.restarts < self.config.max_restarts:
            self.restarts += 1
            restart = int(worker.name.split(".")[1]) + 1
            log.info("restart %d of at most %d", self.restarts, self.config.max_restarts)
            self._start(worker.local_rank, restart)

    def _call(self, living: list[_Worker]) -> None:
        """Calls a rendezvous where members have died, or others are ready to join."""
        now, members = time.monotonic(), self._members.get(self._number, [])
        ready = {worker.name: worker for worker in living if worker.ready_at is not None}
        lost = [name for name in members if name not in ready]
        joining = [worker for name, worker in ready.items() if name not in members]
        if not (lost or joining) or len(ready) < self.config.least:
            return
        if not lost and len(ready) < len(living):
            # What is starting may be here in a moment; leaving a group costs each rank its connections.
            patience = self.config.last_call if members else self.config.join_timeout
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
                    _signal(worker, signal.SIGKILL)
            return
        versions = [meet.Version(*version) for (version,) in said.values() if version is not None]
        latest = max(versions, default=None)
        self._end_servers()  # all have left the groups of before
        server, port = meet.serve()
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
                worker.process.close(signal.SIGTERM, int(self.config.shutdown_timeout))
        self._announce([], [])

    def _end_servers(self) -> None:
        self._servers.clear()
        self._servers_end = math.inf

    def _fail(self) -> None:
        raise ChildFailedError(self.config.command, self._failures)

    def _shutdown(self, death: signal.Signals) -> None:
        limit = time.monotonic() + self.config.shutdown_timeout
        while living := self._living():
            try:
                for worker in living:  # all at once: closing one waits for it
                    _signal(worker, death)
                for worker in living:
                    worker.process.close(death, max(1, int(limit - time.monotonic())))
                    _signal(worker, signal.SIGKILL)
                    worker.ended = True
            except SignalException:  # asked again: no patience is left
                death, limit = signal.SIGKILL, time.monotonic()
        self._servers.clear()


def _signal(worker: _Worker, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.process.pids()[0], number)  # a worker leads a session of its own
