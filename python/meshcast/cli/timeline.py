"""Draw the traces that ranks wrote with schedule.trace(path): a row for each rank, on one scale of time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.progress import Progress, track
from ..errors import LayoutError
from ..pages.page import panel_of, write_timeline_page
from ..pipelining.trace import Timeline, draw_timelines, exposed_seconds, jobs_of_trace, read_trace
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
    spans, jobs = [], []
    for path in track(arguments.traces, "traces"):
        with named(str(path)):
            spans += read_trace(path)
            jobs.append((str(path), jobs_of_trace(path)))
    check_one_job(jobs, "give the traces of one")
    if not spans:
        raise LayoutError("the traces hold no actions")
    timeline = Timeline.measured(f"measured, {len(arguments.traces)} traces", spans)
    if arguments.output is not None:
        with named("--output"), Progress("drawing"):
            draw_timelines([timeline], arguments.output)
    if arguments.html is not None:
        with named("--html"), Progress("writing the page"):
            write_timeline_page([panel_of(timeline)], "A step", arguments.html)
    figures = _figures(timeline, exposed_seconds(spans))
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return 0
    for each in figures:
        end = each["total_ms"]
        print(
            f"rank {each['rank']}: computes {each['compute_ms'] / end:.1%}, waits for values "
            f"{each['wait_ms'] / end:.1%}, for values on their way {each['exposed_ms'] / end:.1%} of "
            f"{end:.3g} ms"
        )
    return 0


def _figures(timeline: Timeline, exposed: Mapping[int, float]) -> list[dict[str, Any]]:
    """Returns what each rank did with its time."""
    found = []
    for rank in sorted({span.rank for span in timeline.spans}):
        mine = [span for span in timeline.spans if span.rank == rank]
        found.append(
            {
                "rank": rank,
                "total_ms": timeline.end,
                "compute_ms": sum(span.end - span.start for span in mine if span.action.kind.is_compute),
                "wait_ms": sum(span.end - span.start for span in mine if span.action.kind.is_recv),
                "exposed_ms": exposed.get(rank, 0.0) * 1e3,
            }
        )
    return found
