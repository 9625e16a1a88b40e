"""Reports of meshcast about itself: log lines, the flight record of the last calls, profiler ranges.

docs/environment.md: MESHCAST_LOG shows the log on stderr, MESHCAST_FLIGHT_RECORD writes the last calls of a
rank to a file when one fails, when an exception ends the program, and on SIGUSR1, also while its main thread
waits in a call. `python -m meshcast explain` reads these files.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ..errors import LayoutError
from . import checks, forks, settings  # noqa: F401  forks has to be there before the first fork
from .counters import Traffic, of_operation
from .whereabouts import call_site, main_thread_site, raised_site, site_text

__all__ = [
    "FORMAT",
    "LISTENER",
    "Completable",
    "Flight",
    "Members",
    "dump_flight_record",
    "flight_record",
    "job_ids",
    "join_job",
    "log",
    "profiled",
    "profiling",
    "set_up",
]

log = logging.getLogger("meshcast")

FORMAT = "meshcast.flight/1"  # of the file
LISTENER = "mc-record"  # name of the thread that waits for SIGUSR1: `python -m meshcast dump` looks for it
_KEPT = 2000  # calls
_JOB = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")  # by launchers
_LEVELS = ("debug", "info", "warning", "error")
_flights: deque[Flight] = deque(maxlen=_KEPT)
_MOST_JOBS = 16  # ids
_jobs: list[str] = []  # ids of the stores that this process has made groups in
_started = time.time()
_raised: dict[str, Any] | None = None  # what has ended the program
_ended = False  # the program came to its end without an exception
_set_up = False


class Completable(Protocol):
    """A call as the record sees it."""

    def is_completed(self) -> bool: ...


class Members(NamedTuple):
    """A private group as the record shows it. ranks: global ones; within: the process group it was made in,
    named alike on all of them."""

    name: str
    ranks: tuple[int, ...] = ()
    within: str = ""


class Flight:
    """One call in the record. It outlives the call and must not keep tensors alive: hence the weak link to
    its launch; a call that waits where it is made has none."""

    __slots__ = (
        "begun",
        "clock",
        "counted",
        "error",
        "group",
        "lane",
        "launch",
        "op",
        "plan",
        "position",
        "rank",
        "run",
        "seconds",
        "site",
        "traffic",
        "what",
    )
    made: ClassVar[int] = 0  # calls that this process has begun

    def __init__(
        self, op: str, group: Members, rank: int, launch: Completable | None = None, what: str = ""
    ) -> None:
        """what: is moved, in words that are the same on all ranks."""
        self.op, self.group, self.rank, self.what = op, group, rank, what
        self.launch = None if launch is None else weakref.ref(launch)
        self.site = call_site()
        self.begun = time.time()
        self.clock = time.perf_counter()
        self.lane: int | None = None
        self.position: int | None = None  # in the lane
        self.run: int | None = None  # of its plan
        self.plan: Mapping[str, Any] | None = None  # as the record shows it
        self.seconds: float | None = None  # from the call to the end of the first wait()
        self.error: dict[str, Any] | None = None  # as the record shows it
        self.traffic: Traffic | None = None  # what it moves, once that is known; counts it
        self.counted = False
        _flights.append(self)
        Flight.made += 1
        if log.isEnabledFor(logging.DEBUG):
            log.debug("rank %d: %s in group %s called", rank, op, group.name)

    def ended(self, waiting: float | None = None, moved: float | None = None) -> None:
        """waiting: time.perf_counter() when the wait for it began, if that was not at once. moved: seconds
        from the start of the transfer to its end, where they are known."""
        if self.seconds is None:
            now = time.perf_counter()
            self.seconds = now - self.clock
            self._counter().ended(
                self,
                self.seconds if moved is None else moved,
                self.seconds if waiting is None else now - waiting,
            )
            if log.isEnabledFor(logging.DEBUG):
                log.debug(
                    "rank %d: %s in group %s ended after %.6f s",
                    self.rank,
                    self.op,
                    self.group.name,
                    self.seconds,
                )

    def failed(self, error: BaseException) -> None:
        if self.error is not None:
            return
        self.seconds = time.perf_counter() - self.clock
        self._counter().failed(self)
        text = f"{type(error).__name__}: {error}"
        peer, phase = getattr(error, "peer", None), getattr(error, "phase", None)
        self.error = {"error": text, "peer": peer, "phase": phase}
        log.error("rank %d: %s failed: %s", self.rank, self.op, text)
        _dump_for(self.rank)

    def again(self) -> None:
        """It is begun once more."""
        self._counter().again()

    def _counter(self) -> Traffic:
        return of_operation(self.op) if self.traffic is None else self.traffic

    def as_dict(self) -> dict[str, Any]:
        state = "failed" if self.error else "ended" if self.seconds is not None else "unfinished"
        if state == "unfinished" and self.launch is not None:
            launch = self.launch()
            if launch is None or launch.is_completed():
                state = "not waited for"
        record: dict[str, Any] = {
            "op": self.op,
            "what": self.what,
            "group": self.group.name,
            "ranks": self.group.ranks,
            "within": self.group.within,
            "rank": self.rank,
            "state": state,
            "site": site_text(self.site),
            "begun": self.begun,
            "seconds": self.seconds,
            "lane": self.lane,
            "position": self.position,
            "run": self.run,
            "error": None,
        }
        record |= self.error or {}
        if self.plan is not None:
            bound = self.plan["bound"]
            ratio = self.seconds / bound if self.seconds is not None and bound > 0 else None
            record |= {**self.plan, "ratio": ratio}
        return record


def join_job(identity: str) -> None:
    """This process is one of those that have this id. It has several where its process group is made anew in
    another store: the first one stays, and the last ones."""
    if identity not in _jobs:
        _jobs.append(identity)
        del _jobs[1 : 1 - _MOST_JOBS]


def job_ids() -> list[str]:
    """Ids of the job of this process. Two processes of one job share one, maybe by way of others."""
    return list(_jobs)


def flight_record() -> list[dict[str, Any]]:
    """The last 2,000 transfers of this process, oldest first, each as a dictionary.

    seconds: from the call to the end of its first wait(); begun: seconds since the epoch; site: the line of
    the program that made it; ranks, lane and position: of all that take part, which call it is; bound and
    ratio: see `meshcast.Plan`; bytes: as the plan says; state: "ended", "failed", "unfinished" or "not waited
    for".

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
    scratch.write_text(json.dumps(_document(), indent=1), encoding="utf-8")
    scratch.replace(target)


def _document() -> dict[str, Any]:
    rank, world = _place()
    return {
        "format": FORMAT,
        "rank": rank,
        "world": world,
        "job": " ".join(f"{name}={os.environ[name]}" for name in _JOB if name in os.environ),
        "jobs": job_ids(),
        "process": os.getpid(),
        "started": _started,
        "written": time.time(),
        "at": site_text(main_thread_site()),
        "exception": _raised,
        "ended": _ended,
        "calls": flight_record(),
    }


def _place() -> tuple[int | None, int | None]:
    """Rank and number of ranks, as far as they are known."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    given = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    rank, world = (int(text) if text.isascii() and text.isdecimal() else None for text in given)
    return (_flights[-1].rank if rank is None and _flights else rank), world


def profiling() -> bool:
    """Returns whether a profiler runs. Small calls ask this first: an empty context costs them 2 %."""
    return torch.autograd._profiler_enabled()


def profiled(name: str, op: str) -> AbstractContextManager[Any]:
    """A range of torch.profiler; does nothing while no profiler runs. What it tells is in its name: a trace
    shows no arguments."""
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
        _record_ends()


def _record_ends() -> None:
    """Writes the record when the program ends: that is often the first cause of what other ranks see."""
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        global _raised
        text = f"{kind.__name__}: {value}"
        _raised = {"error": text, "site": site_text(raised_site(traceback)), "raised": time.time()}
        rank, _ = _place()
        if rank is not None:
            _dump_for(rank)
        before(kind, value, traceback)

    sys.excepthook = hook
    process = os.getpid()

    def end() -> None:
        global _ended
        rank, _ = _place()
        if _raised is None and rank is not None and os.getpid() == process:  # not a child that it forked
            _ended = True
            _dump_for(rank)

    atexit.register(end)


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
                _dump_for(_place()[0] or 0)

    thread = threading.Thread(target=serve, name=LISTENER, daemon=True)
    thread.start()
    with contextlib.suppress(OSError):  # before Python 3.14 the system does not learn the name
        Path(f"/proc/self/task/{thread.native_id}/comm").write_text(LISTENER)


def _dump_for(rank: int) -> None:
    path = settings.FLIGHT_RECORD.text()
    if not path:
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        dump_flight_record(f"{path}.rank{rank}")
    except OSError as error:
        log.warning("rank %d: the flight record cannot be written: %s", rank, error)
