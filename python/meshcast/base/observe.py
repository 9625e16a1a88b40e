"""Reports of meshcast about itself: log lines, the flight record of the last calls and where the program made
them, totals of all calls.

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
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from .. import _C
from .._C import Flight, Members, calls_begun
from ..errors import LayoutError
from . import checks, forks, settings  # noqa: F401  forks has to be there before the first fork

__all__ = [
    "CallCounters",
    "Counters",
    "FORMAT",
    "Flight",
    "LISTENER",
    "Members",
    "PairCounters",
    "Site",
    "call_site",
    "calls_begun",
    "counters",
    "dump_flight_record",
    "flight_record",
    "job_ids",
    "join_job",
    "log",
    "main_thread_site",
    "raised_site",
    "set_up",
    "site_text",
]

# A frame itself would keep the values of its variables alive, tensors among them.
Site: TypeAlias = tuple[CodeType, int]
_OURS = ("meshcast", "torch", "threading")  # whose frames are passed by; the last begins every thread
_files: dict[str, bool] = {}  # whether a file is of these: each call asks


def call_site() -> Site | None:
    """The innermost line outside of meshcast and torch in this thread; None in a thread without one."""
    return _users(sys._getframe(1))


def main_thread_site() -> Site | None:
    """The same of the main thread, from any other one."""
    return _users(sys._current_frames().get(threading.main_thread().ident or 0))


def raised_site(traceback: TracebackType | None) -> Site | None:
    """The innermost such line that an exception has passed."""
    found: Site | None = None
    while traceback is not None:
        frame = traceback.tb_frame
        if not _is_ours(frame):
            found = frame.f_code, traceback.tb_lineno
        traceback = traceback.tb_next
    return found


def site_text(site: Site | None) -> str | None:
    """FILE:LINE in FUNCTION, as one line."""
    if site is None:
        return None
    code, line = site
    return f"{code.co_filename}:{line} in {code.co_name}"


def _users(frame: FrameType | None) -> Site | None:
    while frame is not None:
        ours = _files.get(frame.f_code.co_filename)
        if not (_is_ours(frame) if ours is None else ours):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None


def _is_ours(frame: FrameType) -> bool:
    name, file = frame.f_globals.get("__name__"), frame.f_code.co_filename
    ours = isinstance(name, str) and name.partition(".")[0] in _OURS
    if not file.startswith("<"):  # code that was made at run time is anybody's
        _files[file] = ours
    return ours


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
    """This process is one of those that have this id. It has several where its process group is made again in
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


_T = TypeVar("_T", bound="_Totals")


@dataclass(frozen=True)
class _Totals:
    calls: int = 0
    failed: int = 0
    retries: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    bound: float = 0.0
    moving_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """moving_seconds / bound; 1.0 where nothing travels."""
        return self.moving_seconds / self.bound if self.bound > 0 else 1.0


@dataclass(frozen=True)
class CallCounters(_Totals):
    """Totals of all calls of one operation on this rank, in `Counters.calls`.

    Attributes:
        calls: that have ended without an error.
        failed: that have raised.
        retries: how often a call was begun once more, since another rank had refused the one before it.
        seconds: start to finish, as `TransferStats` has them, of the calls that ended; of what moves no
            tensor, such as an agreement of a pipeline, from the call to its end.
        waited: seconds that the program stood in wait(), or in a call that waits itself.
        bound: the plans' lower bounds together, in seconds.
        moving_seconds: those of `seconds` that belong to calls with a bound, in which something travels.
        ratio: moving_seconds / bound; 1.0 where nothing travels.
        messages: to and from other ranks.
        bytes_sent, bytes_received: to and from other ranks, as `TransferStats` counts them.
    """

    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    @property
    def bytes(self) -> int:
        """Sent plus received."""
        return self.bytes_sent + self.bytes_received


@dataclass(frozen=True)
class PairCounters(_Totals):
    """Totals of all calls that send from one rank to another, in `Counters.pairs`.

    Attributes:
        messages: from the one to the other, over the network or through shared memory.
        bytes: of these messages.

    The other attributes are those of `CallCounters`, of the calls that these messages belong to: a slow pair
    is one whose calls have a high ratio.
    """

    messages: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Counters:
    """Totals since the process has imported meshcast. Subtract an earlier one for those of a step.

    Attributes:
        calls: by operation, such as "reshard" and "reshard backward".
        pairs: by (sender, receiver), global ranks, one of which is this rank.
    """

    calls: dict[str, CallCounters]
    pairs: dict[tuple[int, int], PairCounters]

    def __sub__(self, earlier: Counters) -> Counters:
        calls = {op: _less(found, earlier.calls.get(op)) for op, found in self.calls.items()}
        pairs = {pair: _less(found, earlier.pairs.get(pair)) for pair, found in self.pairs.items()}
        return Counters(calls, pairs)


def counters() -> Counters:
    """Returns the totals of all calls of this process: what they have moved, how long they took and how long
    they were waited for.

    A call is in it once it has been waited for, or has ended if it only sends. Counting costs a call less
    than a microsecond; this function takes time in proportion to the number of compiled transfers and pairs.
    A forked child begins at zero.

    Example::

        before = meshcast.counters()
        # ... a step of training
        step = meshcast.counters() - before
        for op, found in step.calls.items():
            print(op, found.calls, found.bytes_sent, found.seconds, found.ratio, found.waited)
        for (sender, receiver), found in step.pairs.items():
            print(sender, receiver, found.messages, found.bytes)
    """
    calls, pairs = _C.counted()
    return Counters(
        {op: CallCounters(**sums) for op, sums in calls.items()},
        {pair: PairCounters(**sums) for pair, sums in pairs.items()},
    )


def _less(later: _T, earlier: _T | None) -> _T:
    if earlier is None:
        return later
    return type(later)(**{name: value - getattr(earlier, name) for name, value in vars(later).items()})
