"""Simulate a pipeline schedule, or all of them side by side, and print or draw the timeline."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..base import checks
from ..base.progress import Progress, track
from ..errors import LayoutError
from ..pages.page import panel_of, write_timeline_page
from ..pipelining.orders import SCHEDULES
from ..pipelining.simulate import SimulationReport, simulate
from ..pipelining.trace import Timeline, draw_timelines, format_timeline
from ._values import PICTURES, integer, named, output_file, times

_MOST = 4096  # stages and micro-batches
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `simulate`."""
    parser.add_argument("--schedule", default="Eager1F1B", help=f"{', '.join(SCHEDULES)} (default Eager1F1B)")
    parser.add_argument("--stages", required=True, metavar="N", help="number of stages")
    parser.add_argument("--microbatches", required=True, metavar="N", help="number of micro-batches")
    parser.add_argument("--ranks", metavar="N", help="of Interleaved1F1B (default half the stages)")
    parser.add_argument("--warmup", metavar="W", help="1f1b, eager, auto, an integer, or one for each stage")
    parser.add_argument("--memory-budget", metavar="N", help="most micro-batches alive on a stage")
    parser.add_argument("--delay-weight-grad", action="store_true", help="split backwards into I and W")
    group = parser.add_argument_group("times, in any unit, one or one for each stage")
    group.add_argument("--forward", default="1", metavar="T", help="of a micro-batch (default 1)")
    group.add_argument("--backward", default="2", metavar="T", help="whole (default 2)")
    group.add_argument("--weight", metavar="T", help="the part of it that W takes (default half of it)")
    group.add_argument("--transfer", default="0", metavar="T", help="between two stages (default 0)")
    group = parser.add_argument_group("network")
    group.add_argument("--send-model", default="buffered", help="buffered or rendezvous (default buffered)")
    group.add_argument("--shared-links", action="store_true", help="both directions share a link")
    group.add_argument("--buffers", metavar="N", help="values on their way per link (default no limit)")
    group = parser.add_argument_group("output")
    group.add_argument(
        "--compare",
        action="store_true",
        help="all schedules on as many ranks as there are stages; those with two stages on a rank get stages "
        "of half the size",
    )
    group.add_argument("--draw", type=Path, metavar="FILE", help="write the timeline as .png, .svg or .pdf")
    group.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with the timelines, two under each other"
    )
    group.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints figures, and a timeline where it fits."""
    output_file("--draw", arguments.draw, PICTURES)
    output_file("--html", arguments.html)
    stages = integer("--stages", arguments.stages, 1, _MOST)
    microbatches = integer("--microbatches", arguments.microbatches, 1, _MOST)
    costs: dict[str, Any] = {
        name: times(f"--{name}", getattr(arguments, name))
        for name in ("forward", "backward", "weight", "transfer")
        if getattr(arguments, name) is not None
    }
    if not isinstance(costs["transfer"], float):
        raise LayoutError("--transfer: expected one time")
    network = {"shared_links": arguments.shared_links}
    if arguments.buffers is not None:
        network["buffers"] = integer("--buffers", arguments.buffers, 0, _MOST)
    with named("--send-model"):
        network["send_model"] = checks.choice("value", arguments.send_model, ("buffered", "rendezvous"))
    if arguments.compare:
        reports = _compare(stages, microbatches, costs, network, arguments.json)
    else:
        options = _options(arguments, stages)
        with named(f"--schedule {arguments.schedule}"), Progress("simulating"):
            report = simulate(arguments.schedule, stages, microbatches, **costs, **network, **options)
        print(json.dumps(_figures(report), indent=2)) if arguments.json else _print(report, costs)
        reports = [(f"{arguments.schedule}, {stages} stages, {microbatches} micro-batches", report)]
    if arguments.draw is not None:
        with named("--draw"), Progress("drawing"):
            draw_timelines([Timeline.simulated(*each) for each in reports], arguments.draw)
    if arguments.html is not None:
        with named("--html"):
            panels = [panel_of(Timeline.simulated(*each)) for each in track(reports, "writing the page")]
            write_timeline_page(panels, f"{stages} stages, {microbatches} micro-batches", arguments.html)
    return 0


def _options(arguments: argparse.Namespace, stages: int) -> dict[str, Any]:
    options: dict[str, Any] = {"delay_weight_grad": arguments.delay_weight_grad}
    if arguments.ranks is not None:
        options["ranks"] = integer("--ranks", arguments.ranks, 1, stages)
    if arguments.memory_budget is not None:
        options["memory_budget"] = integer("--memory-budget", arguments.memory_budget, 1, _MOST)
    warmup = arguments.warmup
    if warmup in ("1f1b", "eager", "auto"):
        options["warmup"] = warmup
    elif warmup is not None:
        counts = [integer("--warmup", part, 1, _MOST) for part in warmup.split(",")]
        options["warmup"] = counts[0] if len(counts) == 1 else counts
    return options


def _figures(report: SimulationReport) -> dict[str, Any]:
    """The report without its spans."""
    names = ("makespan", "bubble_fraction", "exposed_fraction", "peak_activations", "peak_of_ranks", "idle")
    return {name: getattr(report, name) for name in names}


def _print(report: SimulationReport, costs: dict[str, Any]) -> None:
    print(f"makespan            {report.makespan:.6g}")
    print(f"bubble              {report.bubble_fraction:.1%}")
    print(f"exposed transfers   {report.exposed_fraction:.1%}")
    print(f"peak activations    {' '.join(map(str, report.peak_activations))} (micro-batches, of each stage)")
    print(f"idle                {' '.join(f'{idle:.4g}' for idle in report.idle)} (of each rank)")
    listed = [value for value in costs.values() for value in (value if isinstance(value, list) else [value])]
    if all(value == int(value) for value in (*listed, *(span.start for span in report.timeline))):
        picture = format_timeline(report)
        if max(map(len, picture.splitlines())) <= _WIDTH:
            print(picture)


def _compare(
    stages: int, microbatches: int, costs: dict[str, Any], network: dict[str, Any], as_json: bool
) -> list[tuple[str, SimulationReport]]:
    """A table of all schedules; what it shows, with titles."""
    free = simulate("1F1B", stages, microbatches, **{**costs, "transfer": 0.0}).makespan
    lines = [f"{'schedule':<26}{'makespan':>10}  x free 1F1B   bubble  exposed  peak activations"]
    reports, figures = [], []
    for label, name, options, chunks in track(_COMPARED, "schedules"):
        given = {key: value if key == "transfer" else _divided(value, chunks) for key, value in costs.items()}
        report = simulate(name, stages * chunks, microbatches, **given, **{**network, **options})
        peak = max(report.peak_of_ranks) / chunks
        ratio = report.makespan / free if free else 1.0
        lines.append(
            f"{label:<26}{report.makespan:>10.6g}  {ratio:>11.3f}  {report.bubble_fraction:>7.1%}"
            f"  {report.exposed_fraction:>7.1%}  {peak:>16g}"
        )
        figures.append({"schedule": label, "stages_per_rank": chunks, **_figures(report)})
        reports.append((f"{label}: {report.makespan:.6g}", report))
    lines.append(f"{stages} ranks; the last rows have two stages of half the size on each")
    print(json.dumps(figures, indent=2) if as_json else "\n".join(lines))
    return reports


def _divided(value: Any, chunks: int) -> Any:
    """Times of stages cut into `chunks` equal ones. Rows in which stage s + n follows stage s share its
    time."""
    if isinstance(value, list):
        if chunks > 1:
            raise LayoutError("--compare: stages of different times cannot be cut in two; give one for all")
        return value
    return value / chunks
