"""What meshcast tells about itself: log lines, the flight record of the last calls, profiler ranges.

docs/environment.md: MESHCAST_LOG shows the log on stderr, MESHCAST_FLIGHT_RECORD writes the last calls of a
rank to a file when one fails, and on SIGUSR1, also while its main thread waits in a call.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from ..errors import LayoutError
from . import checks, forks, settings  # noqa: F401  forks has to be there before the first fork

__all__ = [
    "Completable",
    "Flight",
    "dump_flight_record",
    "flight_record",
    "log",
    "profiled",
    "profiling",
    "set_up",
]

log = logging.getLogger("meshcast")

_KEPT = 2000  # calls
_LEVELS = ("debug", "info", "warning", "error")
_flights: deque[Flight] = deque(maxlen=_KEPT)
_set_up = False


class Completable(Protocol):
    """A call as the record sees it."""

    def is_completed(self) -> bool: ...


class Flight:
    """One call in the record. It outlives the call and must not keep tensors alive: hence the weak link to
    its launch; a call that waits where it is made has none."""

    __slots__ = ("begun", "clock", "error", "group", "launch", "number", "op", "plan", "rank", "seconds")

    def __init__(self, op: str, group: str, rank: int, launch: Completable | None = None) -> None:
        self.op, self.group, self.rank = op, group, rank
        self.launch = None if launch is None else weakref.ref(launch)
        self.begun = time.time()
        self.clock = time.perf_counter()
        self.number: tuple[int, int, int] | None = None  # lane, position in it, run of its plan
        self.plan: Mapping[str, Any] | None = None  # as the record shows it
        self.seconds: float | None = None  # from the call to the end of the first wait()
        self.error: str | None = None
        _flights.append(self)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("rank %d: %s in group %s called", rank, op, group)

    def ended(self) -> None:
        if self.seconds is None:
            self.seconds = time.perf_counter() - self.clock
            if log.isEnabledFor(logging.DEBUG):
                log.debug(
                    "rank %d: %s in group %s ended after %.6f s", self.rank, self.op, self.group, self.seconds
                )

    def failed(self, error: BaseException) -> None:
        if self.error is not None:
            return
        self.seconds = time.perf_counter() - self.clock
        self.error = f"{type(error).__name__}: {error}"
        log.error("rank %d: %s failed: %s", self.rank, self.op, self.error)
        _dump_for(self.rank)

    def as_dict(self) -> dict[str, Any]:
        state = "failed" if self.error else "ended" if self.seconds is not None else "unfinished"
        if state == "unfinished" and self.launch is not None:
            launch = self.launch()
            if launch is None or launch.is_completed():
                state = "not waited for"
        lane, position, run = self.number or (None, None, None)
        record: dict[str, Any] = {
            "op": self.op,
            "group": self.group,
            "rank": self.rank,
            "state": state,
            "begun": self.begun,
            "seconds": self.seconds,
            "lane": lane,
            "position": position,
            "run": run,
            "error": self.error,
        }
        if self.plan is not None:
            bound = self.plan["bound"]
            ratio = self.seconds / bound if self.seconds is not None and bound > 0 else None
            record |= {**self.plan, "ratio": ratio}
        return record


def flight_record() -> list[dict[str, Any]]:
    """The last 2,000 transfers of this process, oldest first, each as a dictionary.

    seconds: from the call to the end of its first wait(); begun: seconds since the epoch; bound and ratio:
    see `meshcast.Plan`; bytes: as the plan says; state: "ended", "failed", "unfinished" or "not waited for".

    Example::

        for call in meshcast.flight_record()[-3:]:
            print(call["op"], call["state"], call["seconds"])
    """
    return [flight.as_dict() for flight in list(_flights)]


def dump_flight_record(path: str | Path) -> None:
    """Writes flight_record() as JSON, replacing the file in one step.

    Raises:
        LayoutError: what is no path.
        OSError: the file cannot be written.

    Example::

        import json, pathlib, tempfile

        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "calls.json"
            meshcast.dump_flight_record(path)
            assert "calls" in json.loads(path.read_text())
    """
    if not isinstance(path, str | os.PathLike):
        raise LayoutError(f"dump_flight_record: path {checks.shown(path)}: expected a path")
    target = Path(path)
    if not target.name or "\0" in str(target):
        raise LayoutError(f"dump_flight_record: path {checks.shown(path)} names no file")
    scratch = target.with_name(f"{target.name}.{os.getpid()}.part")
    text = json.dumps({"process": os.getpid(), "written": time.time(), "calls": flight_record()}, indent=1)
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(target)


def profiling() -> bool:
    """Whether a profiler runs. Small calls ask this first: a context that does nothing costs them 2 %."""
    return torch.autograd._profiler_enabled()


def profiled(name: str, op: str) -> AbstractContextManager[Any]:
    """A range of torch.profiler; does nothing while no profiler runs."""
    if profiling():
        return torch.profiler.record_function(f"meshcast::{op} {name}")
    return contextlib.nullcontext()


def set_up() -> None:
    """Follows the environment. At the import of meshcast; idempotent."""
    global _set_up
    if _set_up:
        return
    _set_up = True
    log.addHandler(logging.NullHandler())  # failures are raised: nothing is printed unless asked for
    level = settings.LOG.text().lower()
    if level in _LEVELS:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s %(name)s %(levelname)s] %(message)s"))
        log.addHandler(handler)
        log.setLevel(level.upper())
        log.propagate = False
    elif level:
        warnings.warn(f"{settings.LOG.name}={level}: expected {settings.LOG.expected}", stacklevel=2)
    if settings.FLIGHT_RECORD.text():
        _listen()


def _listen() -> None:
    """SIGUSR1 writes the record. Python runs signal handlers in the main thread, between two instructions; a
    main thread that waits in a call has none. The low-level handler however writes to a pipe at once, which a
    thread of our own reads."""
    if threading.current_thread() is not threading.main_thread():
        warnings.warn(
            f"{settings.FLIGHT_RECORD.name}: imported outside the main thread, SIGUSR1 is not handled",
            stacklevel=2,
        )
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGUSR1, lambda _number, _frame: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def serve() -> None:
        while True:
            if signal.SIGUSR1 in os.read(reading, 64):
                _dump_for(_flights[-1].rank if _flights else 0)

    threading.Thread(target=serve, name="meshcast-flight-record", daemon=True).start()


def _dump_for(rank: int) -> None:
    path = settings.FLIGHT_RECORD.text()
    if not path:
        return
    try:
        dump_flight_record(f"{path}.rank{rank}")
    except OSError as error:
        log.warning("rank %d: the flight record cannot be written: %s", rank, error)
