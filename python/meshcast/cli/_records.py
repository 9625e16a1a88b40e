"""Reads the flight records of the ranks of one job, and refuses what is none or belongs to another job."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..base import checks
from ..base.checks import Reader, read_json
from ..base.observe import FORMAT
from ..base.progress import track
from ..errors import LayoutError
from ._one_job import check_one_job

__all__ = ["Made", "Place", "Record", "read_records"]

_CLOCKS = 5.0  # seconds by which clocks of hosts may differ
_STATES = ("ended", "failed", "unfinished", "not waited for")
_NUMBER = (int, float)
Place: TypeAlias = tuple[str, tuple[int, ...], int, int]  # process group, ranks, lane, position in it


@dataclass(frozen=True)
class Made:
    """A call in a record. place: alike on all ranks, which call it is; None for one that was never counted.
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
    exception: dict[str, Any] | None
    ended: bool
    calls: list[Made]


def read_records(folder: Path) -> list[Record]:
    """Reads the records in files named *.rankN, in order of rank. Raises LayoutError for what cannot be the
    records of one job."""
    if not folder.is_dir():
        raise LayoutError(f"{checks.shown(str(folder), 250)}: expected a folder with flight records")
    paths = [path for path in folder.iterdir() if re.fullmatch(r".*\.rank\d+", path.name)]
    if not paths:
        raise LayoutError(
            f"{folder}: no flight records, which are files named *.rankN; set MESHCAST_FLIGHT_RECORD to a "
            "path there, and send ranks that are stuck SIGUSR1"
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
    fields: dict[str, Any] = parsed
    for name in ("started", "written"):
        _expect(fields.get(name), _NUMBER, f"{where}.{name}")
    _expect(fields.get("calls"), list, f"{where}.calls")
    exception = fields.get("exception")
    if exception is not None:
        _expect(exception, dict, f"{where}.exception")
        _expect(exception.get("error"), str, f"{where}.exception.error")
        _expect(exception.get("raised"), _NUMBER, f"{where}.exception.raised")
    world = fields.get("world")
    jobs = fields.get("jobs", [])  # those of earlier versions have none
    _expect(jobs, list, f"{where}.jobs")
    for at, each in enumerate(jobs):
        _expect(each, str, f"{where}.jobs[{at}]")
    return Record(
        rank,
        world if isinstance(world, int) else None,
        str(fields.get("job") or ""),
        jobs,
        path,
        fields["started"],
        fields["written"],
        _site(fields.get("at")),
        None if exception is None else {**exception, "site": _site(exception.get("site"))},
        fields.get("ended") is True,  # records of earlier versions do not have it
        [_made(call, rank, f"{where}.calls[{at}]") for at, call in enumerate(fields["calls"])],
    )


def _made(call: Any, rank: int, where: str) -> Made:
    _expect(call, dict, where)
    for name in ("op", "what", "group", "within"):
        _expect(call.get(name), str, f"{where}.{name}")
    checks.choice(f"{where}.state", call.get("state"), _STATES)
    _expect(call.get("begun"), _NUMBER, f"{where}.begun")
    _expect(call.get("ranks"), list, f"{where}.ranks")
    ranks = tuple(checks.integer(f"{where}.ranks", each, 0, checks.MAX_INT64) for each in call["ranks"])
    lane, position, seconds = call.get("lane"), call.get("position"), call.get("seconds")
    counted = isinstance(lane, int) and isinstance(position, int)
    return Made(
        rank,
        call["op"],
        call["what"],
        call["state"],
        _site(call.get("site")) or "no line of the program, since autograd or a thread made it",
        call["begun"],
        seconds if isinstance(seconds, _NUMBER) else None,
        call["group"],
        ranks,
        (call["within"], ranks, lane, position) if counted else None,
        str(call.get("error") or ""),
        call["peer"] if isinstance(call.get("peer"), int) else None,
    )


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
            by_id = (
                first.jobs and record.jobs
            )  # workers that were replaced, or came later, differ inside a job
            if mine != its and None not in (mine, its) and not by_id:
                raise LayoutError(
                    f"{first.path.name} has {name} {checks.shown(mine, 120)}, {record.path.name} has "
                    f"{checks.shown(its, 120)}: records of different jobs; give a folder with those of one"
                )
    for one, other in zip(records, others, strict=False):
        if one.rank == other.rank:
            raise LayoutError(
                f"{one.path.name} and {other.path.name} are both of rank {one.rank}: records of different "
                "jobs; give a folder with those of one"
            )
    youngest = max(records, key=lambda record: record.started)
    oldest = min(records, key=lambda record: record.written)
    # All ranks of a job live at the moment that its process group is made, so before there are calls.
    if oldest.calls and oldest.written < youngest.started - _CLOCKS:
        raise LayoutError(
            f"{oldest.path.name} was written at {_clock(oldest.written)}, before the process of "
            f"{youngest.path.name} started at {_clock(youngest.started)}: records of different jobs; give a "
            "folder with those of one"
        )


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
