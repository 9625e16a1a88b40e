"""The commands `dump` and `explain`: flight records of the ranks of a job, which ranks wait for which, where
they disagree, and what came first."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ..base import checks
from ..base.checks import Reader, read_json, runs_text
from ..base.observe import FORMAT, SOCKETS, ask
from ..base.progress import Progress, track
from ..errors import LayoutError, MeshcastError
from ..pages.page import PageBar, PagePanel, write_timeline_page
from .arguments import output, writes

__all__ = ["check_one_job", "dump_arguments", "explain_arguments", "run_dump", "run_explain"]


_NAMED = 4  # files of each job


def check_one_job(files: Sequence[tuple[str, Sequence[str]]], which: str) -> None:
    """files: with their ids; those without one may be of any job. which: what to give instead of these.

    A process has an id for each store that its groups came from. Where groups are made again, a process that
    continues has the old id and the new one: so files of one job are connected, though no id need be in all.
    """
    known = [(name, set(ids)) for name, ids in files if ids]
    if not known:
        return
    mine, left = set(known[0][1]), known
    while joining := [each for each in left if each[1] & mine]:
        mine.update(*(ids for _, ids in joining))
        left = [each for each in left if not each[1] & mine]
    if left:
        names = [name for name, _ in left]
        of_first = [name for name, ids in known if ids & mine]
        raise LayoutError(
            f"{_listed(of_first)} and {_listed(names)} are of different jobs, by the ids in them; {which}"
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" (and {more} more)" if more > 0 else "")


_CLOCKS = 5.0  # seconds by which clocks of hosts may differ
_STATES = ("ended", "failed", "unfinished", "not waited for")
_NUMBER = (int, float)
Place: TypeAlias = tuple[str, tuple[int, ...], int, int]  # process group, ranks, lane, position in it


@dataclass(frozen=True)
class RecordedCall:
    """A call in a record. place: which call it is, the same on all ranks; None for one that was never
    counted.
    ranks: whose call it is, if that is known."""

    rank: int
    op: str
    what: str
    state: str
    site: str
    begun: float
    seconds: float | None
    group: str
    ranks: tuple[int, ...]
    place: Place | None
    error: str
    peer: int | None

    @property
    def name(self) -> str:
        number = "" if self.place is None else f" call {self.place[3]} of {self.group}"
        return f"{self.op}{number}"


class Raised(NamedTuple):
    """An exception that ended a program. raised: when; site: the line, if that is known."""

    error: str
    raised: float
    site: str


@dataclass(frozen=True)
class Record:
    """The record of one rank. jobs: ids, see check_one_job; job: what launchers call it; at: the line that
    its main thread had come to; exception: what ended it; ended: its program came to its end without one."""

    rank: int
    world: int | None
    job: str
    jobs: list[str]
    path: Path
    started: float
    written: float
    at: str
    exception: Raised | None
    ended: bool
    calls: list[RecordedCall]


def read_records(folder: Path) -> list[Record]:
    """Reads the records in files named *.rankN, in order of rank. Raises LayoutError for what cannot be the
    records of one job."""
    if not folder.is_dir():
        raise LayoutError(f"{checks.shown(str(folder), 250)}: expected a folder with flight records")
    paths = [path for path in folder.iterdir() if re.fullmatch(r".*\.rank\d+", path.name)]
    if not paths:
        raise LayoutError(
            f"{folder}: no flight records, which are files named *.rankN; for those of a job that runs, call "
            "python -m meshcast dump on each of its hosts, which prints where they are"
        )
    read = [_read(path) for path in track(paths, "flight records")]
    records = sorted(read, key=lambda record: (record.rank, record.path))
    _check_one_job(records)
    return records


def _read(path: Path) -> Record:
    try:
        parsed = read_json(path, "flight record")
    except LayoutError as error:
        raise LayoutError(f"{error}; if the file was cut short, take it away or copy it again") from None
    where = f"flight record {path.name}"
    reader = Reader(parsed, where)
    if not reader.has("format"):
        raise LayoutError(f"{where}: it has no format, as those of older versions; this one reads {FORMAT}")
    reader.expect_format(FORMAT)
    rank = reader.integer("rank", 0, checks.MAX_INT64)
    fields = _Fields(parsed, where)
    exception = None
    if parsed.get("exception") is not None:
        raised = _Fields(parsed["exception"], f"{where}.exception")
        exception = Raised(raised.get("error", str), raised.get("raised", _NUMBER), _site(raised.at("site")))
    world = fields.at("world")
    jobs = fields.get("jobs", list, [])  # those of earlier versions have none
    for at, each in enumerate(jobs):
        _expect(each, str, f"{where}.jobs[{at}]")
    return Record(
        rank=rank,
        world=world if isinstance(world, int) else None,
        job=str(fields.at("job") or ""),
        jobs=jobs,
        path=path,
        started=fields.get("started", _NUMBER),
        written=fields.get("written", _NUMBER),
        at=_site(fields.at("at")),
        exception=exception,
        ended=fields.at("ended") is True,  # records of earlier versions do not have it
        calls=[
            _call_of(call, rank, f"{where}.calls[{at}]") for at, call in enumerate(fields.get("calls", list))
        ],
    )


def _call_of(call: Any, rank: int, where: str) -> RecordedCall:
    fields = _Fields(call, where)
    group, within = fields.get("group", str), fields.get("within", str)
    listed = fields.get("ranks", list)
    ranks = tuple(checks.integer(f"{where}.ranks", each, 0, checks.MAX_INT64) for each in listed)
    lane, position, seconds, peer = map(fields.at, ("lane", "position", "seconds", "peer"))
    counted = isinstance(lane, int) and isinstance(position, int)
    return RecordedCall(
        rank=rank,
        op=fields.get("op", str),
        what=fields.get("what", str),
        state=checks.choice(f"{where}.state", fields.at("state"), _STATES),
        site=_site(fields.at("site")) or "no line of the program, since autograd or a thread made it",
        begun=fields.get("begun", _NUMBER),
        seconds=seconds if isinstance(seconds, _NUMBER) else None,
        group=group,
        ranks=ranks,
        place=(within, ranks, lane, position) if counted else None,
        error=str(fields.at("error") or ""),
        peer=peer if isinstance(peer, int) else None,
    )


class _Fields:
    """A JSON object in a flight record; `where` is its place there, for messages."""

    def __init__(self, value: Any, where: str) -> None:
        _expect(value, dict, where)
        self.at = value.get
        self._where = where

    def get(self, name: str, kind: Any, default: Any = None) -> Any:
        value = self.at(name, default)
        _expect(value, kind, f"{self._where}.{name}")
        return value


def _site(text: Any) -> str:
    """A path below the working directory as seen from there."""
    return str(text or "").removeprefix(f"{os.getcwd()}{os.sep}")


def _expect(value: Any, kind: Any, where: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise LayoutError(f"{where} is {checks.shown(value)}: not what a flight record holds there")


def _check_one_job(records: list[Record]) -> None:
    check_one_job([(record.path.name, record.jobs) for record in records], "give a folder with those of one")
    first, *others = records
    for record in others:
        for name in ("world", "job"):
            mine, its = getattr(first, name), getattr(record, name)
            # Workers that were replaced, or came later, differ inside a job.
            by_id = first.jobs and record.jobs
            if mine != its and None not in (mine, its) and not by_id:
                raise _several_jobs(
                    f"{first.path.name} has {name} {checks.shown(mine, 120)}, {record.path.name} has "
                    f"{checks.shown(its, 120)}"
                )
    for one, other in zip(records, others, strict=False):
        if one.rank == other.rank:
            raise _several_jobs(f"{one.path.name} and {other.path.name} are both of rank {one.rank}")
    youngest = max(records, key=lambda record: record.started)
    oldest = min(records, key=lambda record: record.written)
    # All ranks of a job live at the moment that its process group is made, so before there are calls.
    if oldest.calls and oldest.written < youngest.started - _CLOCKS:
        raise _several_jobs(
            f"{oldest.path.name} was written at {_clock(oldest.written)}, before the process of "
            f"{youngest.path.name} started at {_clock(youngest.started)}"
        )


def _several_jobs(why: str) -> LayoutError:
    return LayoutError(f"{why}: records of different jobs; give a folder with those of one")


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


# Errors that a rank raises because of another one.
_FOLLOW = ("AbortedError", "PeerLostError", "DeadlineExceededError", "PlanMismatchError")
# In the errors of a rank that cannot connect with another. Interfaces are the reason only if that rank is
# alive.
_UNREACHABLE = ("no way to the peer", "it refuses connections")


@dataclass(frozen=True)
class Wait:
    """A rank in the first call that did not end there. ranks: which it waits for; here: all of the call are
    in it."""

    call: RecordedCall
    ranks: tuple[int, ...]
    here: bool


@dataclass(frozen=True)
class Disagreement:
    """Ranks that take one call for different ones: calls by what is called and moved, each of some ranks."""

    name: str
    sides: list[list[RecordedCall]]


@dataclass(frozen=True)
class Found:
    """The findings in the records. cause: one sentence, "" where nothing is wrong."""

    waits: dict[int, Wait]
    disagreement: Disagreement | None
    silent: tuple[int, ...]  # ranks without a record
    cause: str


def find(records: list[Record]) -> Found:
    """Compares the calls of all ranks."""
    by_rank = {record.rank: record for record in records}
    world = next((record.world for record in records if record.world is not None), None)
    mentioned = {rank for record in records for call in record.calls for rank in call.ranks}
    silent = tuple(sorted({*range(world or 0), *mentioned} - by_rank.keys()))
    made: dict[tuple[Place | None, int], RecordedCall] = {
        (call.place, call.rank): call for record in records for call in record.calls if call.place
    }
    still = {record.rank: _open_calls(record) for record in records}
    waits = {rank: _wait(calls[0], made) for rank, calls in still.items() if calls}
    every = [call for calls in still.values() for call in calls]
    disagreement = _disagreement(made, {call.place for call in every})
    return Found(waits, disagreement, silent, _cause(by_rank, waits, disagreement, silent, every))


def _open_calls(record: Record) -> list[RecordedCall]:
    """Returns the calls that have not ended or, where there are none, those that failed and were not followed
    by a call that ended: programs continue after a refused call, which then explains nothing."""
    ended = max((call.begun for call in record.calls if call.state == "ended"), default=float("-inf"))
    # A program that came to its end waits in no call, though it may never have asked whether one ended.
    unfinished = [call for call in record.calls if call.state == "unfinished" and not record.ended]
    return unfinished or [call for call in record.calls if call.state == "failed" and call.begun >= ended]


def _wait(call: RecordedCall, made: Mapping[tuple[Place | None, int], RecordedCall]) -> Wait:
    if call.state == "failed" and not call.error.startswith(("DeadlineExceeded", "PeerLost")):
        return Wait(call, (), False)
    missing = tuple(rank for rank in call.ranks if (call.place, rank) not in made)
    if call.place is None or not missing:
        return Wait(call, () if call.peer in (None, call.rank) else (call.peer or 0,), call.place is not None)
    return Wait(call, missing, False)


def _disagreement(
    made: Mapping[tuple[Place | None, int], RecordedCall], still: Collection[Place | None]
) -> Disagreement | None:
    places: dict[object, dict[tuple[str, str], list[RecordedCall]]] = {}
    for (place, _), call in made.items():
        places.setdefault(place, {}).setdefault((call.op, call.what), []).append(call)
    parted = [list(sides.values()) for place, sides in places.items() if len(sides) > 1 and place in still]
    if not parted:
        return None
    sides = min(parted, key=lambda sides: min(call.begun for side in sides for call in side))
    first = sides[0][0]
    assert first.place is not None
    return Disagreement(f"call {first.place[3]} of group {first.group}", sides)


def _cause(
    records: dict[int, Record],
    waits: dict[int, Wait],
    disagreement: Disagreement | None,
    silent: tuple[int, ...],
    still: Sequence[RecordedCall],
) -> str:
    ends = [(each.exception, rank) for rank, each in records.items() if each.exception is not None]
    own = [(end.raised, rank, end) for end, rank in ends if not end.error.startswith(_FOLLOW)]
    if own:
        _, rank, end = min(own, key=lambda each: each[:1])
        where = f", raised at {end.site}" if end.site else ""
        return f"rank {rank} ended with {_first_line(end.error)}{where}"
    failed = [call for call in still if call.state == "failed"]
    failed.sort(key=lambda call: call.begun + (call.seconds or 0.0))
    gone = {*silent, *(rank for rank, record in records.items() if record.ended or record.exception)}
    unreachable = [
        call
        for call in failed
        if any(text in call.error for text in _UNREACHABLE) and gone & ({*call.ranks} - {call.rank})
    ]
    refused = [
        call
        for call in failed
        if not call.error.startswith(_FOLLOW) and call not in unreachable and not records[call.rank].ended
    ]
    if refused:
        call = refused[0]
        return f"rank {call.rank} raised in {call.name}, at {call.site}: {_first_line(call.error)}"
    if disagreement is not None:
        return f"the ranks disagree on {disagreement.name}"
    circle = _circle(waits)
    if circle:
        text = ", ".join(
            f"rank {rank} waits for rank {other} in {waits[rank].call.name} at {waits[rank].call.site}"
            for rank, other in zip(circle, [*circle[1:], circle[0]], strict=True)
        )
        return f"ranks wait for each other in different calls: {text}"
    peers = [(call.peer, call) for call in failed if call.error.startswith("PeerLostError")]
    peers += [(min(gone & {*call.ranks} - {call.rank}), call) for call in unreachable]
    lost = [(peer, call) for peer, call in peers if peer is not None]
    # A rank whose program came to its end has completed its work: others come first.
    lost.sort(key=lambda each: each[0] in records and records[each[0]].ended)
    if lost:
        peer, first = lost[0]
        if peer in records and records[peer].ended:
            state = next((call.state for call in records[peer].calls if call.place == first.place), "")
            completed = " (it had completed that call)" if first.place and state == "ended" else ""
            callers = _callers([call for _, call in lost if call.place == first.place])
            return f"{_ended(records[peer])}, while {callers} called {first.name}{completed}"
        said = "it wrote no record" if peer in silent else "it wrote a record"
        return f"rank {peer} was lost: {said}, so it was killed or its connections broke; read its own output"
    return _missing(records, waits, silent) or (f"{failed[0].name}: {failed[0].error}" if failed else "")


def _missing(records: dict[int, Record], waits: dict[int, Wait], silent: tuple[int, ...]) -> str:
    """Returns which ranks others wait for that wait for no rank themselves."""
    texts = []
    awaited = sorted({rank for wait in waits.values() for rank in wait.ranks})
    for rank in awaited:
        if rank in waits and waits[rank].ranks:
            continue
        wait = next(wait for wait in waits.values() if rank in wait.ranks)
        if rank in silent:
            texts.append(
                f"rank {rank} takes no part in {wait.call.name} and wrote no record: it is frozen, was "
                "killed, or its record is elsewhere"
            )
            continue
        record = records[rank]
        if wait.here:  # all of its ranks have made it
            now = "its program came to its end" if record.ended else f"its main thread is at {record.at}"
            there = "where it has not ended either" if rank in waits else "which has ended there"
            texts.append(f"rank {wait.call.rank} waits for rank {rank} in {wait.call.name}, {there}; {now}")
            continue
        if record.ended:
            texts.append(f"{_ended(record)}, and has not made {wait.call.name}")
            continue
        where = f"its main thread is at {record.at}" if record.at else "where it is was not recorded"
        aged = wait.call.begun - record.written
        stale = f" (its record is {aged:.1f} s older than that call)" if aged > 0 else ""
        texts.append(f"rank {rank} has not made {wait.call.name}; {where}{stale}")
    return "; ".join(texts)


def _callers(calls: Sequence[RecordedCall]) -> str:
    return ranks_of(call for call in calls if call.place == calls[0].place)


def _ended(record: Record) -> str:
    last = f"after {record.calls[-1].name}" if record.calls else "without a call"
    if record.calls and record.calls[-1].state == "failed":
        last += f", which failed with {_first_line(record.calls[-1].error)}"
    return f"the program of rank {record.rank} came to its end {last}"


def _circle(waits: dict[int, Wait]) -> list[int]:
    """Ranks each of which waits for the next one, the last one for the first."""
    done: set[int] = set()
    for start in sorted(waits):
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank in waits and rank not in done:
            if rank in path:
                return path[path.index(rank) :]
            path.append(rank)
            rank = next(iter(sorted(waits[rank].ranks, key=lambda other: other not in waits)), None)
        done.update(path)
    return []


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def ranks_of(calls: Iterable[RecordedCall]) -> str:
    """ "rank 3" or "ranks 0-2,5"."""
    ranks = tuple(sorted(call.rank for call in calls))
    return f"rank{'s' if len(ranks) > 1 else ''} {runs_text(ranks)}"


_SHOWN = 32  # ranks that get lines of their own
_DRAWN = 100  # calls of each rank on the page


def explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="with files named *.rankN, which ranks write when a call fails, when an exception ends the "
        "program, and when python -m meshcast dump asks; it and the last line of the rank name the folder",
    )
    parser.add_argument(
        "--html", type=output(), metavar="FILE", help="write a page with the last calls over time"
    )
    parser.add_argument("--json", action="store_true", help="print the cause and the waits as JSON")


def run_explain(arguments: argparse.Namespace) -> int:
    """Explain a stuck or failed job from the flight records of its ranks: who waits for whom, the call that
    ranks disagree on, and what came first."""
    records = read_records(arguments.folder)
    found = find(records)
    text = "\n".join(_lines(records, found))
    if arguments.html is not None:
        with writes("--html", arguments.html):
            panel = _panel(records)
            with Progress("writing the page"):
                write_timeline_page(
                    [panel], f"Flight records in {arguments.folder.name}", arguments.html, text
                )
    if arguments.json:
        waits = {
            rank: {"call": wait.call.name, "at": wait.call.site, "for": list(wait.ranks)}
            for rank, wait in found.waits.items()
        }
        silent = list(found.silent)
        text = json.dumps({"cause": found.cause, "waits": waits, "without_record": silent}, indent=2)
    print(text)
    return 0


def _panel(records: list[Record]) -> PagePanel:
    """The last calls of each rank, in seconds from the first of them. A call that did not end lasts until
    its record was written; one that was not waited for has its begin alone."""
    drawn = [(row, record, call) for row, record in enumerate(records) for call in record.calls[-_DRAWN:]]
    first = min((call.begun for _, _, call in drawn), default=0.0)
    bars = []
    for row, record, call in drawn:
        kind = "late" if call.state == "not waited for" else call.state
        seconds = record.written - call.begun if kind == "unfinished" else call.seconds or 0.0
        begin = call.begun - first
        text = f"{call.name}: {call.state}, at {call.site}"
        number = "" if call.place is None else str(call.place[3])
        bars.append(PageBar(row, kind, begin, begin + max(0.0, seconds), number, text))
    end = max((bar.end for bar in bars), default=0.0)
    rows = [f"rank {record.rank}" for record in records]
    return PagePanel(f"The last {_DRAWN} calls of each rank", "s", rows, bars, end)


def _lines(records: list[Record], found: Found) -> list[str]:
    world = len(records) + len(found.silent)
    none = f"; none of rank{'s' if len(found.silent) > 1 else ''} {runs_text(found.silent)}"
    lines = [f"{len(records)} records of {world} ranks{none if found.silent else ''}"]
    shown_ranks = [record for record in records if record.rank in found.waits or record.exception]
    for record in shown_ranks[:_SHOWN]:
        lines += ["", *_rank(record, found)]
    if len(shown_ranks) > _SHOWN:
        lines += ["", f"... {len(shown_ranks)} ranks"]
    others = [record for record in records if record not in shown_ranks]
    for record in others[: _SHOWN if found.waits else 0]:
        last = record.calls[-1] if record.calls else None
        said = f"last call {last.name}, {last.state}" if last else "no calls"
        where = f"its main thread is at {record.at or 'no line of Python'}"
        lines += [
            "",
            f"rank {record.rank}: {said}; {'its program came to its end' if record.ended else where}",
        ]
    if found.disagreement is not None:
        lines += ["", f"the ranks disagree on {found.disagreement.name}"]
        for side in found.disagreement.sides:
            lines.append(f"  {ranks_of(side)}: {side[0].op}, {side[0].what}")
            lines += [f"    at {site}" for site in sorted({call.site for call in side})]
    lines += ["", f"first cause: {found.cause}" if found.cause else "no call failed or waits"]
    return lines


def _rank(record: Record, found: Found) -> list[str]:
    wait = found.waits.get(record.rank)
    lines = []
    if wait is not None:
        call = wait.call
        lines.append(f"rank {record.rank}: {_state(record, call)}{_whom(wait.ranks, wait.here)}")
        lines.append(f"  at {call.site}")
        if call.what:
            lines.append(f"  {call.what}")
        if call.error:
            lines.append(f"  {shown_error(call.error)}")
    if record.exception is not None and (wait is None or wait.call.error != record.exception.error):
        lines.append(f"rank {record.rank}: ended with {shown_error(record.exception.error)}")
        if record.exception.site:
            lines.append(f"  raised at {record.exception.site}")
    return lines


def _state(record: Record, call: RecordedCall) -> str:
    if call.state == "failed":
        return f"{call.name} failed after {call.seconds or 0.0:.1f} s"
    return f"in {call.name} for {max(0.0, record.written - call.begun):.1f} s"


def _whom(ranks: tuple[int, ...], here: bool) -> str:
    if ranks:
        return f", waits for rank{'s' if len(ranks) > 1 else ''} {runs_text(ranks)}"
    return "; all its ranks are in it" if here else ""


def shown_error(text: str) -> str:
    """The first line of an error, in one line of the output."""
    line = text.partition("\n")[0]
    return line if len(line) <= 400 else f"{line[:397]}..."


_PROC = Path("/proc")
_MOST_THREADS = 64


class _Process(NamedTuple):
    """A process that listens. number: 0 where it is in another container; rank: None where it does not
    know, or does not answer and has none from a launcher."""

    socket: str
    number: int
    rank: int | None
    answers: bool

    def __str__(self) -> str:
        number = f"process {self.number}" if self.number else "a process of another container"
        return number if self.rank is None else f"rank {self.rank}, {number}"


def dump_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "processes", nargs="*", metavar="PID", help="ask these only (default: all of this user on this host)"
    )
    parser.add_argument("--pid", nargs="+", default=[], metavar="PID", help="the same")
    parser.add_argument("--rank", nargs="+", default=[], metavar="RANK", help="ask these ranks only")
    parser.add_argument(
        "--to", default="", metavar="DIR", help="folder to write to (default: the one of each job)"
    )
    parser.add_argument(
        "--limit",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="wait so long for each (default: 10)",
    )
    parser.add_argument("--json", action="store_true", help="print the processes and their records as JSON")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def run_dump(arguments: argparse.Namespace) -> int:
    """Ask the ranks of the running jobs on this host for their flight records, and print where these are.

    No process gets a signal, and none is asked that does not listen: ranks do from `import meshcast` on where
    a launcher such as torchrun started them, others once they have connected.
    """
    numbers = _numbers([*arguments.processes, *arguments.pid], "the number of a process")
    ranks = _numbers(arguments.rank, "a rank, such as 0")
    folder = str(Path(arguments.to).absolute()) if arguments.to else ""
    names = _sockets()
    with ThreadPoolExecutor(min(_MOST_THREADS, len(names) or 1)) as threads:
        found = list(filter(None, threads.map(lambda name: _who(name, arguments.limit), names)))
        chosen = _chosen(found, numbers, ranks)
        if folder:
            _check_ranks_differ(chosen)
        written = list(
            threads.map(
                lambda each: _write(each, folder, arguments.limit) if each.answers else _SILENT, chosen
            )
        )
    folders = sorted({str(Path(path).parent) for path, _ in written if path})
    if arguments.json:
        rows = [
            {"process": each.number, "rank": each.rank, "record": path, "problem": problem}
            for each, (path, problem) in zip(chosen, written, strict=True)
        ]
        print(json.dumps(rows, indent=2))
    else:
        for process, (path, problem) in zip(chosen, written, strict=True):
            print(f"{process}: {path or problem}")
        for each in folders:
            print(f"what they say together: python -m meshcast explain {each}")
    if not folders:
        raise MeshcastError("no record was written")
    return 0


def _numbers(texts: Sequence[str], what: str) -> list[int]:
    for text in texts:
        if not (text.isascii() and text.isdecimal()):
            raise LayoutError(f"{checks.shown(text)}: expected {what}")
    return [int(text) for text in texts]


def _sockets() -> list[str]:
    """Names of those at which processes listen that share this one's network."""
    try:
        lines = (_PROC / "net" / "unix").read_text(errors="replace").splitlines()
    except OSError as error:
        raise MeshcastError(f"cannot look for processes that listen: {error}") from None
    names = {line.rpartition(" ")[2] for line in lines}
    return sorted(name[1:] for name in names if name.startswith(f"@{SOCKETS}"))


def _who(name: str, limit: float) -> _Process | None:
    """None for another user's process, unless this is root, and for one that has just ended."""
    try:
        number, user, answer = ask(name, {}, limit)
    except OSError:
        return None
    if user != os.getuid() and os.getuid() != 0:
        return None
    rank = _launched_as(number) if answer is None else answer.get("rank")
    return _Process(name, number, rank if isinstance(rank, int) else None, answer is not None)


def _launched_as(number: int) -> int | None:
    """The rank that a launcher gave to a process, which may be frozen."""
    try:
        texts = (_PROC / str(number) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(text[5:]) for text in texts if text.startswith(b"RANK=") and text[5:].isdigit()), None)


def _chosen(found: list[_Process], numbers: list[int], ranks: list[int]) -> list[_Process]:
    """In order of rank."""
    for number in numbers:
        if number not in [each.number for each in found]:
            raise LayoutError(
                f"process {number} does not listen: it has ended, is another user's, or is a rank that no "
                "launcher started and that has not connected with others yet"
            )
    for rank in ranks:
        if rank not in [each.rank for each in found]:
            raise LayoutError(f"no process of rank {rank} listens on this host")
    if not found:
        raise MeshcastError(
            "no process of this user listens on this host: ranks do from `import meshcast` on where a "
            "launcher such as torchrun started them, others once they have connected"
        )
    return [
        each
        for each in sorted(found, key=lambda each: (each.rank is None, each.rank, each.number))
        if (not numbers or each.number in numbers) and (not ranks or each.rank in ranks)
    ]


def _check_ranks_differ(chosen: list[_Process]) -> None:
    """In one folder, one record would take the place of another."""
    for one, other in pairwise(chosen):
        if one.rank == other.rank:
            raise LayoutError(
                f"processes {one.number} and {other.number} are both of rank {one.rank}, so of different "
                "jobs: choose those of one job by --pid"
            )


_Result = tuple[str, str]  # the path, or the problem
_SILENT: _Result = ("", "no record: it does not answer, so it is stopped or a call of it keeps Python's lock")


def _write(process: _Process, folder: str, limit: float) -> _Result:
    try:
        answer: dict[str, Any] | None = ask(process.socket, {"write": folder}, limit)[2]
    except OSError:
        return "", "no record: it has just ended"
    if answer is None:
        return _SILENT
    error = answer.get("error")
    return str(answer.get("written", "")), "" if error is None else f"no record: {error}"
