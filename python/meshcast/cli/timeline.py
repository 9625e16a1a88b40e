"""Draw the traces that ranks wrote with schedule.trace(path): a row for each rank, on one scale of time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..base.progress import Progress, track
from ..errors import LayoutError
from ..pages.page import write_timeline_page
from ..pages.schedule_panels import panel_of_events
from ..pipelining.trace import Panel, bar_of, draw_panels, exposed_seconds, jobs_of_trace, read_trace
from ._records import check_one_job
from ._values import PICTURES, named, output_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `timeline`."""
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="traces of one step, any ranks")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="picture: .png, .svg or .pdf")
    parser.add_argument("--html", type=Path, metavar="FILE", help="page with the timeline")
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON, nothing need be written"
    )


def run(arguments: argparse.Namespace) -> int:
    """Draws, and prints what each rank did with its time."""
    if arguments.output is None and arguments.html is None and not arguments.json:
        raise LayoutError("nothing to write: give --output, --html or --json")
    output_file("--output", arguments.output, PICTURES)
    output_file("--html", arguments.html)
    events, jobs = [], []
    for path in track(arguments.traces, "traces"):
        with named(str(path)):
            events += read_trace(path)
            jobs.append((str(path), jobs_of_trace(path)))
    check_one_job(jobs, "give the traces of one")
    if not events:
        raise LayoutError("the traces hold no actions")
    first = min(event.begin for event in events)
    bars = [
        bar_of(each.rank, each.name, (each.begin - first) * 1e3, (each.end - first) * 1e3) for each in events
    ]
    title = f"measured, {len(arguments.traces)} traces"
    if arguments.output is not None:
        with named("--output"), Progress("drawing"):
            draw_panels([Panel(title, bars, "ms")], arguments.output)
    if arguments.html is not None:
        with named("--html"), Progress("writing the page"):
            write_timeline_page([panel_of_events(title, events)], "A step", arguments.html)
    end = max(bar.end for bar in bars)
    exposed = exposed_seconds(events)
    figures = []
    for rank in sorted({bar.rank for bar in bars}):
        mine = [bar for bar in bars if bar.rank == rank]
        waits = sum(bar.end - bar.start for bar in mine if bar.kind == "wait")
        work = sum(bar.end - bar.start for bar in mine if bar.kind in ("F", "B", "I", "W"))
        mine_exposed = exposed.get(rank, 0.0) * 1e3
        figures.append(
            {"rank": rank, "total_ms": end, "compute_ms": work, "wait_ms": waits, "exposed_ms": mine_exposed}
        )
        line = (
            f"rank {rank}: computes {work / end:.1%}, waits for values {waits / end:.1%}, for values on "
            f"their way {mine_exposed / end:.1%} of {end:.3g} ms"
        )
        if not arguments.json:
            print(line)
    if arguments.json:
        print(json.dumps(figures, indent=2))
    return 0
