"""Finds in flight records of a job which ranks wait for which, where they part ways, and what came first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..planning.text import ranks_text
from ._records import Made, Place, Record

__all__ = ["Dissent", "Found", "Wait", "find"]

# What a rank raises because of another one.
_FOLLOW = ("AbortedError", "PeerLostError", "DeadlineExceededError", "PlanMismatchError")


@dataclass(frozen=True)
class Wait:
    """A rank in the first call that did not end there. ranks: which it waits for; here: all of the call are
    in it."""

    call: Made
    ranks: tuple[int, ...]
    here: bool


@dataclass(frozen=True)
class Dissent:
    """Ranks that take one call for different ones: calls by what is called and moved, each of some ranks."""

    name: str
    sides: list[list[Made]]


@dataclass(frozen=True)
class Found:
    """The findings in the records. cause: one sentence, "" where nothing is wrong."""

    waits: dict[int, Wait]
    dissent: Dissent | None
    silent: tuple[int, ...]  # ranks without a record
    cause: str


def find(records: list[Record]) -> Found:
    """Compares the calls of all ranks."""
    by_rank = {record.rank: record for record in records}
    world = next((record.world for record in records if record.world is not None), None)
    mentioned = {rank for record in records for call in record.calls for rank in call.ranks}
    silent = tuple(sorted({*range(world or 0), *mentioned} - by_rank.keys()))
    made: dict[tuple[Place | None, int], Made] = {
        (call.place, call.rank): call for record in records for call in record.calls if call.place
    }
    waits: dict[int, Wait] = {}
    still = {record.rank: _open_calls(record) for record in records}
    for rank, calls in still.items():
        if calls:
            waits[rank] = _wait(calls[0], made)
    every = [call for calls in still.values() for call in calls]
    dissent = _dissent(made, {call.place for call in every})
    return Found(waits, dissent, silent, _cause(by_rank, waits, dissent, silent, every))


def _open_calls(record: Record) -> list[Made]:
    """Returns the calls that have not ended or, where there are none, those that failed and were not followed
    by a call that ended: programs go on after a refused call, which then explains nothing."""
    ended = max((call.begun for call in record.calls if call.state == "ended"), default=float("-inf"))
    unfinished = [call for call in record.calls if call.state == "unfinished"]
    return unfinished or [call for call in record.calls if call.state == "failed" and call.begun >= ended]


def _wait(call: Made, made: Mapping[tuple[Place | None, int], Made]) -> Wait:
    if call.state == "failed" and not call.error.startswith(("DeadlineExceeded", "PeerLost")):
        return Wait(call, (), False)
    missing = tuple(rank for rank in call.ranks if (call.place, rank) not in made)
    if call.place is None or not missing:
        return Wait(call, () if call.peer in (None, call.rank) else (call.peer or 0,), call.place is not None)
    return Wait(call, missing, False)


def _dissent(
    made: Mapping[tuple[Place | None, int], Made], still: Collection[Place | None]
) -> Dissent | None:
    places: dict[object, dict[tuple[str, str], list[Made]]] = {}
    for (place, _), call in made.items():
        places.setdefault(place, {}).setdefault((call.op, call.what), []).append(call)
    parted = [list(sides.values()) for place, sides in places.items() if len(sides) > 1 and place in still]
    if not parted:
        return None
    sides = min(parted, key=lambda sides: min(call.begun for side in sides for call in side))
    first = sides[0][0]
    assert first.place is not None
    return Dissent(f"call {first.place[3]} of group {first.group}", sides)


def _cause(
    records: dict[int, Record],
    waits: dict[int, Wait],
    dissent: Dissent | None,
    silent: tuple[int, ...],
    still: Sequence[Made],
) -> str:
    own = [record for record in records.values() if record.exception and not _follows(_error(record))]
    if own:
        first = min(own, key=lambda record: record.exception["raised"])  # type: ignore[index]
        where = first.exception.get("site") if first.exception else None
        return f"rank {first.rank} ended with {_error(first)}{f', raised at {where}' if where else ''}"
    failed = [call for call in still if call.state == "failed"]
    failed.sort(key=lambda call: call.begun + (call.seconds or 0.0))
    refused = [call for call in failed if not _follows(call.error)]
    if refused:
        call = refused[0]
        return f"rank {call.rank} raised in {call.name}, at {call.site}: {_first_line(call.error)}"
    if dissent is not None:
        return f"the ranks disagree on {dissent.name}"
    circle = _circle(waits)
    if circle:
        text = ", ".join(
            f"rank {rank} waits for rank {other} in {waits[rank].call.name} at {waits[rank].call.site}"
            for rank, other in zip(circle, [*circle[1:], circle[0]], strict=True)
        )
        return f"ranks wait for each other in different calls: {text}"
    lost = [call for call in failed if call.error.startswith("PeerLostError") and call.peer is not None]
    if lost:
        peer = lost[0].peer
        if peer in records and records[peer].ended:
            return f"{_ended(records[peer])}, while {_callers(lost)} called {lost[0].name}"
        said = "it wrote no record" if peer in silent else "it wrote a record"
        return f"rank {peer} was lost: {said}, so it was killed or its connections broke; read its own output"
    return _missing(records, waits, silent) or (f"{failed[0].name}: {failed[0].error}" if failed else "")


def _missing(records: dict[int, Record], waits: dict[int, Wait], silent: tuple[int, ...]) -> str:
    """The ranks that others wait for, and that wait for nobody."""
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
        if record.ended:
            texts.append(f"{_ended(record)}, and has not made {wait.call.name}")
            continue
        where = f"its main thread is at {record.at}" if record.at else "where it is was not recorded"
        aged = wait.call.begun - record.written
        stale = f" (its record is {aged:.1f} s older than that call)" if aged > 0 else ""
        texts.append(f"rank {rank} has not made {wait.call.name}; {where}{stale}")
    return "; ".join(texts)


def _callers(calls: Sequence[Made]) -> str:
    return ranks_of(call for call in calls if call.place == calls[0].place)


def _ended(record: Record) -> str:
    last = f"after {record.calls[-1].name}" if record.calls else "without a call"
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


def _error(record: Record) -> str:
    return _first_line(record.exception["error"]) if record.exception else ""


def _follows(error: str) -> bool:
    return error.startswith(_FOLLOW)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def ranks_of(calls: Iterable[Made]) -> str:
    """ "rank 3" or "ranks 0-2,5"."""
    ranks = tuple(sorted(call.rank for call in calls))
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"
