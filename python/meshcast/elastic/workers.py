"""The workers of a job on one host: processes that its agent starts and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, Std
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext, to_map
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from . import rendezvous as meet

__all__ = ["Config", "Workers"]


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
