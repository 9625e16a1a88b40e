"""Explain a stuck or failed job from the flight records of its ranks: who waits for whom, the call that ranks
disagree on, and what came first."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..base.progress import Progress
from ..pages.page import PageBar, PagePanel, write_timeline_page
from ..planning.show import ranks_text
from ._records import Found, Made, Record, find, ranks_of, read_records
from ._values import named, output_file

_SHOWN = 32  # ranks that get lines of their own
_DRAWN = 100  # calls of each rank on the page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `explain`."""
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="with files named *.rankN, which ranks write where MESHCAST_FLIGHT_RECORD says, "
        "when a call fails, an exception ends the program, and on SIGUSR1",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with the last calls over time"
    )
    parser.add_argument("--json", action="store_true", help="print the cause and the waits as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints what the records tell."""
    output_file("--html", arguments.html)
    records = read_records(arguments.folder)
    found = find(records)
    text = "\n".join(_lines(records, found))
    if arguments.html is not None:
        with named("--html"):
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
    """The last calls of each rank, in seconds from the first of them. A call that did not end goes on until
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
    none = f"; none of rank{'s' if len(found.silent) > 1 else ''} {ranks_text(found.silent)}"
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
    if found.dissent is not None:
        lines += ["", f"the ranks disagree on {found.dissent.name}"]
        for side in found.dissent.sides:
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
    if record.exception is not None and (wait is None or wait.call.error != record.exception["error"]):
        lines.append(f"rank {record.rank}: ended with {shown_error(record.exception['error'])}")
        if record.exception.get("site"):
            lines.append(f"  raised at {record.exception['site']}")
    return lines


def _state(record: Record, call: Made) -> str:
    if call.state == "failed":
        return f"{call.name} failed after {call.seconds or 0.0:.1f} s"
    return f"in {call.name} for {max(0.0, record.written - call.begun):.1f} s"


def _whom(ranks: tuple[int, ...], here: bool) -> str:
    if ranks:
        return f", waits for rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"
    return "; all its ranks are in it" if here else ""


def shown_error(text: str) -> str:
    """The first line of an error, in one line of the output."""
    line = text.partition("\n")[0]
    return line if len(line) <= 400 else f"{line[:397]}..."
