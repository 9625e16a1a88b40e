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
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from .. import _C
from .._C import Flight, Members, calls_begun
from ..errors import LayoutError
from . import checks, forks, settings  # noqa: F401  forks has to be there before the first fork
from .whereabouts import call_site, main_thread_site, raised_site, site_text

__all__ = [
    "FORMAT",
    "LISTENER",
    "Flight",
    "Members",
    "calls_begun",
    "dump_flight_record",
    "flight_record",
    "job_ids",
    "join_job",
    "log",
    "set_up",
]

log = logging.getLogger("meshcast")

FORMAT = "meshcast.flight/1"  # of the file
LISTENER = "mc-record"  # name of the thread that waits for SIGUSR1: `python -m meshcast dump` looks for it
_JOB = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")  # by launchers
_LEVELS = ("debug", "info", "warning", "error")
_MOST_JOBS = 16  # ids
_jobs: list[str] = []  # ids of the stores that this process has made groups in
_started = time.time()
_raised: dict[str, Any] | None = None  # what has ended the program
_ended = False  # the program came to its end without an exception
_set_up = False


class _Observer:
    """Does what the record of calls leaves to Python. Each step returns at once."""

    site = staticmethod(call_site)

    def is_verbose(self) -> bool:
        return log.isEnabledFor(logging.DEBUG)

    def called(self, rank: int, op: str, group: str) -> None:
        log.debug("rank %d: %s in group %s called", rank, op, group)

    def agreed(self, rank: int, descriptor: str) -> None:
        log.info("rank %d: agreed on %s", rank, descriptor)

    def ended(self, rank: int, op: str, group: str, seconds: float) -> None:
        log.debug("rank %d: %s in group %s ended after %.6f s", rank, op, group, seconds)

    def failed(self, rank: int, op: str, text: str) -> None:
        log.error("rank %d: %s failed: %s", rank, op, text)
        _dump_for(rank)


def _as_dict(flight: Flight) -> dict[str, Any]:
    progress = flight.progress()
    plan, seconds = progress["plan"], progress["seconds"]
    record: dict[str, Any] = {
        "op": flight.op,
        "what": flight.what,
        "group": flight.group.name,
        "ranks": flight.group.ranks,
        "within": flight.group.within,
        "rank": flight.rank,
        "state": progress["state"],
        "site": site_text(flight.site),
        "begun": flight.begun,
        **{name: progress[name] for name in ("seconds", "lane", "position", "run", "error")},
    }
    if progress["error"] is not None:
        record |= {name: progress[name] for name in ("peer", "phase")}
    if plan is not None:
        bound = plan["bound"]
        ratio = seconds / bound if seconds is not None and bound > 0 else None
        record |= {**plan, "ratio": ratio}
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
    return [_as_dict(flight) for flight in _C.flights()]


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
    if rank is None:
        rank = next((flight.rank for flight in reversed(_C.flights())), None)
    return rank, world


def set_up() -> None:
    """Follows the environment. At the import of meshcast; idempotent."""
    global _set_up
    if _set_up:
        return
    _set_up = True
    _C.observe_by(_Observer())
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
