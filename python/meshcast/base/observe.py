"""Reports of meshcast about itself: log lines, the flight record of the last calls and where the program made
them, totals of all calls.

docs/environment.md: MESHCAST_LOG shows the log on stderr. A rank writes its last calls to a file when one
fails, when an exception ends the program, when `python -m meshcast dump` asks for them, and on SIGUSR1, also
while its main thread waits in a call. MESHCAST_FLIGHT_RECORD names the file. `python -m meshcast explain`
reads these files. A rank that waits for long in a call says so, see MESHCAST_WAIT_NOTICE.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import stat
import struct
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from .. import _C
from .._C import Flight, Members, calls_begun
from ..errors import LayoutError, MeshcastError
from . import checks, forks, settings  # noqa: F401  forks has to be there before the first fork

__all__ = [
    "CallCounters",
    "Counters",
    "FORMAT",
    "Flight",
    "Members",
    "PairCounters",
    "SOCKETS",
    "Site",
    "WaitNotice",
    "ask",
    "call_site",
    "calls_begun",
    "counters",
    "dump_flight_record",
    "flight_record",
    "job_ids",
    "join_job",
    "log",
    "main_thread_site",
    "note_hosts",
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
    if not file.startswith("<"):  # code that was made at run time may be of any origin
        _files[file] = ours
    return ours


log = logging.getLogger("meshcast")

FORMAT = "meshcast.flight/1"  # of the file
_JOB = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")  # by launchers
_MOST_JOBS = 16  # ids
_jobs: list[str] = []  # ids of the stores that this process has made groups in
_LAUNCHED = ("RANK", "WORLD_SIZE")  # set by launchers, for their ranks
SOCKETS = "meshcast-record/"  # begins their names
_PATIENCE = 2.0  # seconds for the line of one that has connected
_PAUSE = 0.1  # seconds after a request that failed
_MOST_BYTES = 1 << 16  # of a line
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_open: tuple[socket.socket, int] | None = None  # where this process listens, and a counter of signals
_AGAIN = 1.0  # seconds between two records of failed calls, where no path is set
_KEPT_FOLDERS = 32  # of jobs, where no path is set
_started = time.time()
_raised: dict[str, Any] | None = None  # the exception that has ended the program
_ended = False  # the program came to its end without an exception
_set_up = False
_recorded = 0  # process whose end is
_written = float("-inf")  # when, by time.monotonic()
_patience = 0.0  # seconds of a wait that are worth a line; 0: none are
_noticed = float("-inf")  # when a wait was last reported
_hosts: dict[int, str] = {}  # names, by rank


class _Observer:
    """Does what the record of calls leaves to Python. Each step returns at once."""

    is_ours = staticmethod(_is_ours)  # of a frame, asked once for its code

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
        if settings.FLIGHT_RECORD.text() or time.monotonic() - _written > _AGAIN:
            _dump_for(rank)

    def waits(self, rank: int, call: str, state: str, ranks: Sequence[int], seconds: float) -> None:
        global _noticed
        text = _wait_text(rank, call, state, ranks, seconds)
        if time.monotonic() - _noticed < _patience:  # of another group, or in a step after that one
            log.info(text)
            return
        _noticed = time.monotonic()
        _show(text)


class WaitNotice:
    """One wait in a call for other ranks, which is worth one line."""

    def __init__(self, rank: int, call: str) -> None:
        self._rank, self._call, self._begun, self._posted = rank, call, time.monotonic(), False

    def look(self, missing: Callable[[], Sequence[int]]) -> None:
        """Called now and then by who waits. missing(): the ranks that it waits for."""
        waited = time.monotonic() - self._begun
        if not self._posted and 0 < _patience <= waited:
            self._posted = True
            _Observer().waits(self._rank, self._call, "", missing(), waited)


def _wait_text(rank: int, call: str, state: str, ranks: Sequence[int], seconds: float) -> str:
    waits = f"rank {rank} has waited for {seconds:.3g} s in {call}" + (f" ({state})" if state else "")
    if not ranks:
        return f"{waits}; all its ranks are in it, so a rank or the network is slow. {_ADVICE}"
    by_host: dict[str, list[int]] = {}
    for each in ranks:
        by_host.setdefault(_hosts.get(each, ""), []).append(each)
    whom = " and ".join(
        f"rank{'s' if len(those) > 1 else ''} {checks.runs_text(those)}" + (f" on {host}" if host else "")
        for host, those in by_host.items()
    )
    return (
        f"{waits}: {whom} did not call, or is busy, frozen, dead, or done with its part. Look at its output. "
        f"{_ADVICE}"
    )


_ADVICE = "`python -m meshcast dump`, on each host, writes what all ranks are doing"


def _show(text: str) -> None:
    """A warning, also where the program shows no log."""
    log.warning(text)
    at: logging.Logger | None = log
    while at is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in at.handlers):
            return
        at = at.parent if at.propagate else None
    print(f"[meshcast] {text}", file=sys.stderr, flush=True)


def note_hosts(names: Mapping[int, str]) -> None:
    """Names of the hosts of ranks, for what a person reads."""
    _hosts.update(names)


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
    _listen()
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
    global _set_up, _patience
    if _set_up:
        return
    _set_up = True
    _C.observe_by(_Observer())
    log.addHandler(logging.NullHandler())  # failures are raised: nothing is printed unless asked for
    for each in settings.ALL:
        if each.is_harmless and (problem := each.problem()):
            warnings.warn(problem, stacklevel=2)
    if settings.LOG.text() and not settings.LOG.problem():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s %(name)s %(levelname)s] %(message)s"))
        log.addHandler(handler)
        log.setLevel(settings.LOG.text().upper())
        log.propagate = False
    if not _C.also_catch(signal.SIGUSR1):
        log.info("this program ignores SIGUSR1: `python -m meshcast dump` works without it")
    notice = settings.WAIT_NOTICE
    _patience = float(notice.default if notice.problem() else notice.text())
    _C.notify_of_long_waits(_patience)
    if _set_path() or all(name in os.environ for name in _LAUNCHED):
        _listen()


def _set_path() -> str:
    path = settings.FLIGHT_RECORD.text()
    return "" if path == settings.NOWHERE else path


def _record_ends() -> None:
    """Writes the record when the program ends: that is often the first cause of what other ranks see. A child
    that it forks writes none, unless it connects with others itself."""
    global _recorded
    if _recorded:
        _recorded = os.getpid()
        return
    _recorded = os.getpid()
    before = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        global _raised
        text = f"{kind.__name__}: {value}"
        _raised = {"error": text, "site": site_text(raised_site(traceback)), "raised": time.time()}
        rank, _ = _place()
        path = None if rank is None or os.getpid() != _recorded else _dump_for(rank)
        before(kind, value, traceback)
        if path is not None and isinstance(value, MeshcastError) and not _set_path():
            _show(f"rank {rank} wrote its last calls: `python -m meshcast explain {path.parent}`")

    sys.excepthook = hook

    def end() -> None:
        global _ended
        rank, _ = _place()
        if _raised is None and rank is not None and os.getpid() == _recorded:
            _ended = True
            if _set_path():
                _dump_for(rank)

    atexit.register(end)


def _listen() -> None:
    """From now on this process writes its record on request, and when an exception ends it. At the import
    where a launcher started it as a rank, else as it first connects with others.

    A thread answers `python -m meshcast dump`, and writes the record after SIGUSR1: a main thread that waits
    in a call does not matter. Its socket has no file: the name is abstract, /proc/net/unix lists it, and it
    ends with the process. So nothing stale is asked, and no process gets a signal that it might die of.
    """
    global _open
    if _open is not None:
        return
    _record_ends()
    try:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Containers that share the network may have processes of the same number.
        server.bind(f"\0{SOCKETS}{os.getpid()}.{os.urandom(4).hex()}")
        server.listen(16)
        counter = os.eventfd(0)
        thread = threading.Thread(target=_serve, args=(server, counter), name="mc-record", daemon=True)
        thread.start()
    except (OSError, RuntimeError) as error:  # there are no more descriptors, or threads
        log.warning("`python -m meshcast dump` cannot ask this process: %s", error)
        return
    _open = server, counter
    _C.count_signals_by(counter)
    with contextlib.suppress(OSError):  # before Python 3.14 the system does not learn the name
        Path(f"/proc/self/task/{thread.native_id}/comm").write_text(thread.name)


def _in_child() -> None:
    """The parent of a forked child listens where it did, and the child nowhere yet."""
    global _open
    if _open is not None:
        _C.count_signals_by(-1)
        _open[0].close()
        os.close(_open[1])
        _open = None


os.register_at_fork(after_in_child=_in_child)


def _serve(server: socket.socket, counter: int) -> None:
    ready = select.poll()
    ready.register(server, select.POLLIN)
    ready.register(counter, select.POLLIN)
    while True:
        for descriptor, _ in ready.poll():
            try:
                if descriptor == counter:
                    os.eventfd_read(counter)
                    _dump_for(_place()[0] or 0, asked=True)
                else:
                    _answer_one(server)
            except Exception:  # the client has left, or there are no descriptors for now
                time.sleep(_PAUSE)


def _answer_one(server: socket.socket) -> None:
    client, _ = server.accept()
    with client:
        client.settimeout(_PATIENCE)
        if _peer(client)[1] in (0, os.getuid()):
            client.sendall(json.dumps(_answer(_line(client))).encode() + b"\n")


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answers one of `python -m meshcast dump`: {} asks who this is, {"write": folder} for the record; ""
    leaves the folder to this rank."""
    rank, world = _place()
    if "write" not in request:
        return {"process": os.getpid(), "rank": rank, "world": world}
    try:
        return {"written": str(_write(rank or 0, request["write"]))}
    except OSError as error:
        return {"error": str(error)}


def ask(name: str, request: dict[str, Any], limit: float) -> tuple[int, int, dict[str, Any] | None]:
    """Returns process and user that listen there, and their answer; None where there is none within `limit`
    seconds. Raises OSError where no process listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(limit)
        client.connect(f"\0{name}")
        process, user = _peer(client)
        try:
            client.sendall(json.dumps(request).encode() + b"\n")
            return process, user, _line(client)
        except (OSError, ValueError):  # it is frozen, has just ended, or refuses this user
            return process, user, None


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the system knows them; process 0 where it is in another
    container."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(found)
    return process, user


def _line(connection: socket.socket) -> dict[str, Any]:
    text = b""
    while not text.endswith(b"\n"):
        if not (more := connection.recv(4096)) or len(text) > _MOST_BYTES:
            raise ValueError("not a line")
        text += more
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def _dump_for(rank: int, asked: bool = False) -> Path | None:
    """None where none is wanted, or none can be written."""
    if not asked and settings.FLIGHT_RECORD.text() == settings.NOWHERE:
        return None
    try:
        return _write(rank)
    except OSError as error:
        log.warning("rank %d: the flight record cannot be written: %s", rank, error)
        return None


def _write(rank: int, folder: str = "") -> Path:
    global _written
    _written = time.monotonic()
    start = Path(folder) / "job" if folder else Path(_set_path() or _own_folder() / "job").absolute()
    start.parent.mkdir(parents=True, exist_ok=True)
    path = start.with_name(f"{start.name}.rank{rank}")
    dump_flight_record(path)
    return path


def _own_folder() -> Path:
    """The folder of this host's ranks of this job, where no path is set: no other user can read it.

    Ranks of torchrun have one parent, and know that before they have met; others know the id of their job."""
    by_parent = "TORCHELASTIC_RUN_ID" in os.environ or not _jobs
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"{os.getppid()}-{_start_of(os.getppid())}-{restart}" if by_parent else _jobs[0]
    root = Path(tempfile.gettempdir()) / f"meshcast-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{root} is not a folder of this user")
    if not (root / name).exists():
        folders = sorted(root.iterdir(), key=lambda folder: folder.lstat().st_mtime)
        for old in folders[:-_KEPT_FOLDERS]:
            shutil.rmtree(old, ignore_errors=True)
    return root / name


def _start_of(process: int) -> str:
    """When a process started, which distinguishes it from a later one with the same number."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "0"


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
