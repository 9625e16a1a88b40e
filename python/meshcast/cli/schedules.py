"""The commands `simulate` and `timeline`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base import checks
from ..base.progress import Progress, track
from ..errors import LayoutError
from ..pages.page import panel_of, write_timeline_page
from ..pipelining.orders import SCHEDULES
from ..pipelining.simulate import SimulationReport, simulate
from ..pipelining.trace import (
    Timeline,
    draw_timelines,
    exposed_seconds,
    format_timeline,
    jobs_of_trace,
    read_trace,
)
from .arguments import PICTURES, choice, integer, named, output, times, writes
from .records import check_one_job

_MOST = 4096  # stages and micro-batches
_COUNT = integer(1, _MOST)
_TIMES = ("forward", "backward", "weight", "transfer")
_UNIT = "units"  # of simulated times: those of --forward and the others
_ABOUT = (
    "Times are in the unit in which those of a forward, a backward and a transfer were given. "
    "Numbers in bars are micro-batches."
)
# Options of a single schedule, with their defaults.
_OF_ONE = {
    "schedule": "Eager1F1B",
    "ranks": None,
    "memory_budget": None,
    "warmup": None,
    "delay_weight_grad": False,
}
_COLUMNS = """\
makespan          in the unit of the given times
x free 1F1B       makespan over that of 1F1B with transfers that take no time
bubble, exposed   part of the time in which ranks are idle, and in which they only wait for values in flight
peak activations  micro-batches that a rank holds at most"""
_WIDTH = 150  # characters of a timeline that is printed

# Rows of --compare: label, schedule, options, stages on each rank.
_COMPARED: tuple[tuple[str, str, dict[str, Any], int], ...] = (
    ("GPipe", "GPipe", {}, 1),
    ("1F1B, no overlap", "1F1B", {"buffers": 0, "send_model": "rendezvous"}, 1),
    ("1F1B", "1F1B", {}, 1),
    ("Eager1F1B", "Eager1F1B", {}, 1),
    ("Eager1F1B, delayed", "Eager1F1B", {"delay_weight_grad": True}, 1),
    ("ZBH1", "ZBH1", {}, 1),
    ("ZBH2", "ZBH2", {}, 1),
    ("Interleaved1F1B", "Interleaved1F1B", {}, 2),
    ("Interleaved1F1B, delayed", "Interleaved1F1B", {"delay_weight_grad": True}, 2),
    ("ZBV", "ZBV", {}, 2),
)


def simulate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedule", default="Eager1F1B", help=f"{', '.join(SCHEDULES)} (default Eager1F1B)")
    parser.add_argument("--stages", required=True, type=_COUNT, metavar="N", help="number of stages")
    parser.add_argument(
        "--microbatches", required=True, type=_COUNT, metavar="N", help="number of micro-batches"
    )
    parser.add_argument(
        "--ranks", type=_COUNT, metavar="N", help="of Interleaved1F1B (default half the stages)"
    )
    parser.add_argument(
        "--warmup", type=_warmup, metavar="W", help="1f1b, eager, auto, an integer, or one for each stage"
    )
    parser.add_argument(
        "--memory-budget", type=_COUNT, metavar="N", help="most micro-batches alive on a stage"
    )
    parser.add_argument("--delay-weight-grad", action="store_true", help="split backwards into I and W")
    group = parser.add_argument_group("times, in any unit, one or one for each stage")
    group.add_argument("--forward", type=times, default=1.0, metavar="T", help="of a micro-batch (default 1)")
    group.add_argument("--backward", type=times, default=2.0, metavar="T", help="whole (default 2)")
    group.add_argument(
        "--weight", type=times, metavar="T", help="the part of it that W takes (default half of it)"
    )
    group.add_argument(
        "--transfer", type=times, default=0.0, metavar="T", help="between two stages (default 0)"
    )
    group = parser.add_argument_group("network")
    group.add_argument(
        "--send-model",
        default="buffered",
        type=choice(("buffered", "rendezvous")),
        help="buffered or rendezvous (default buffered)",
    )
    group.add_argument("--shared-links", action="store_true", help="both directions share a link")
    group.add_argument(
        "--buffers",
        type=integer(0, _MOST),
        metavar="N",
        help="values in flight per link (default no limit)",
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--compare",
        action="store_true",
        help="all schedules on as many ranks as there are stages; those with two stages on a rank get stages "
        "of half the size",
    )
    group.add_argument(
        "--draw", type=output(PICTURES), metavar="FILE", help="write the timeline as .png, .svg or .pdf"
    )
    group.add_argument(
        "--html", type=output(), metavar="FILE", help="write a page with the timelines, two under each other"
    )
    group.add_argument("--json", action="store_true", help="print the figures as JSON")


def run_simulate(arguments: argparse.Namespace) -> int:
    """Simulate a pipeline schedule, or all of them side by side, and print or draw the timeline."""
    given = vars(arguments)
    stages, microbatches = arguments.stages, arguments.microbatches
    costs = {name: given[name] for name in _TIMES if given[name] is not None}
    if not isinstance(costs["transfer"], float):
        raise LayoutError("--transfer: expected one time")
    network = {name: given[name] for name in ("shared_links", "buffers", "send_model")}
    figures: Any
    if arguments.compare:
        for name in (name for name, default in _OF_ONE.items() if given[name] != default):
            raise LayoutError(
                f"--{name.replace('_', '-')}: not allowed with --compare, whose rows are schedules with "
                "options of their own"
            )
        figures, text, reports = _compare(stages, microbatches, costs, network)
    else:
        options = {name: given[name] for name in ("ranks", "memory_budget", "warmup", "delay_weight_grad")}
        with named(f"--schedule {arguments.schedule}"), Progress("simulating"):
            report = simulate(arguments.schedule, stages, microbatches, **costs, **network, **options)
        figures, text = _figures(report), _text(report, costs)
        reports = [(f"{arguments.schedule}, {stages} stages, {microbatches} micro-batches", report)]
    if arguments.draw is not None:
        with writes("--draw", arguments.draw), Progress("drawing"):
            draw_timelines([Timeline.simulated(*each, _UNIT) for each in reports], arguments.draw)
    if arguments.html is not None:
        with writes("--html", arguments.html):
            panels = [
                panel_of(Timeline.simulated(*each, _UNIT)) for each in track(reports, "writing the page")
            ]
            title = f"{stages} stages, {microbatches} micro-batches"
            write_timeline_page(panels, title, arguments.html, _ABOUT)
    print(json.dumps(figures, indent=2) if arguments.json else text)
    return 0


def _warmup(text: str) -> str | int | list[int]:
    if text in ("1f1b", "eager", "auto"):
        return text
    counts = [_COUNT(part) for part in text.split(",")]
    return counts[0] if len(counts) == 1 else counts


def _figures(report: SimulationReport) -> dict[str, Any]:
    """The report without its spans."""
    names = ("makespan", "bubble_fraction", "exposed_fraction", "peak_activations", "peak_of_ranks", "idle")
    return {name: getattr(report, name) for name in names}


def _text(report: SimulationReport, costs: dict[str, Any]) -> str:
    lines = [
        f"makespan            {report.makespan:.6g} (in the unit of the given times)",
        f"bubble              {report.bubble_fraction:.1%}",
        f"exposed transfers   {report.exposed_fraction:.1%}",
        f"peak activations    {' '.join(map(str, report.peak_activations))} (micro-batches, of each stage)",
        f"idle                {' '.join(f'{idle:.4g}' for idle in report.idle)} (of each rank)",
    ]
    listed = [value for value in costs.values() for value in (value if isinstance(value, list) else [value])]
    if all(value == int(value) for value in (*listed, *(span.start for span in report.timeline))):
        picture = format_timeline(report)
        if max(map(len, picture.splitlines())) <= _WIDTH:
            lines.append(picture)
    return "\n".join(lines)


def _compare(
    stages: int, microbatches: int, costs: dict[str, Any], network: dict[str, Any]
) -> tuple[list[dict[str, Any]], str, list[tuple[str, SimulationReport]]]:
    """The figures of all schedules, a table of them, and their reports with titles."""
    free = simulate("1F1B", stages, microbatches, **{**costs, "transfer": 0.0}).makespan
    rows = [[f"{'schedule':<26}", "makespan", "x free 1F1B", " bubble", "exposed", "peak activations"]]
    reports, figures = [], []
    for label, name, options, chunks in track(_COMPARED, "schedules"):
        given = {key: value if key == "transfer" else _divided(value, chunks) for key, value in costs.items()}
        report = simulate(name, stages * chunks, microbatches, **given, **{**network, **options})
        parts = report.bubble_fraction, report.exposed_fraction
        ratio = report.makespan / free if free else 1.0
        peak = max(report.peak_of_ranks) / chunks
        makespan = f"{report.makespan:.6g}"
        rows.append([label, makespan, f"{ratio:.3f}", *(f"{part:.1%}" for part in parts), f"{peak:g}"])
        figures.append({"schedule": label, "stages_per_rank": chunks, **_figures(report)})
        reports.append((f"{label}: {makespan}", report))
    below = f"{stages} ranks; the last rows have two stages of half the size on each\n{_COLUMNS}"
    return figures, f"{checks.table(rows, right=range(1, 6))}\n{below}", reports


def _divided(value: Any, chunks: int) -> Any:
    """Times of stages cut into `chunks` equal ones. Rows in which stage s + n follows stage s share its
    time."""
    if isinstance(value, list):
        if chunks > 1:
            raise LayoutError("--compare: stages of different times cannot be cut in two; give one for all")
        return value
    return value / chunks


def timeline_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="traces of one step, any ranks")
    parser.add_argument(
        "-o", "--output", type=output(PICTURES), metavar="FILE", help="picture: .png, .svg or .pdf"
    )
    parser.add_argument("--html", type=output(), metavar="FILE", help="page with the timeline")
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON, nothing need be written"
    )


def run_timeline(arguments: argparse.Namespace) -> int:
    """Draw the traces that ranks wrote with schedule.trace(path): a row for each rank, on one scale of
    time."""
    if arguments.output is None and arguments.html is None and not arguments.json:
        raise LayoutError("nothing to write: give --output, --html or --json")
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
        with writes("--output", arguments.output), Progress("drawing"):
            draw_timelines([timeline], arguments.output)
    if arguments.html is not None:
        with writes("--html", arguments.html), Progress("writing the page"):
            write_timeline_page([panel_of(timeline)], "A step", arguments.html)
    figures = _spent(timeline, exposed_seconds(spans))
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return 0
    for each in figures:
        end = each["total_ms"]
        print(
            f"rank {each['rank']}: computes {each['compute_ms'] / end:.1%}, waits for values "
            f"{each['wait_ms'] / end:.1%}, for values in flight {each['exposed_ms'] / end:.1%} of "
            f"{f'{end:.3g}' if end < 1000 else round(end)} ms"
        )
    return 0


def _spent(timeline: Timeline, exposed: Mapping[int, float]) -> list[dict[str, Any]]:
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
