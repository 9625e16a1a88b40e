"""Draw the traces that ranks wrote with schedule.trace(path): a row for each rank, on one scale of time."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import LayoutError
from ..pipelining.draw import Panel, bar_of, draw_panels
from ..pipelining.measured import exposed_seconds, read_trace
from ._values import named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `timeline`."""
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="traces of one step, any ranks")
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="FILE", help="picture: .png, .svg or .pdf"
    )


def run(arguments: argparse.Namespace) -> int:
    """Draws, and prints what each rank did with its time."""
    events = []
    for path in arguments.traces:
        with named(str(path)):
            events += read_trace(path)
    if not events:
        raise LayoutError("the traces hold no actions")
    first = min(event.begin for event in events)
    bars = [
        bar_of(each.rank, each.name, (each.begin - first) * 1e3, (each.end - first) * 1e3) for each in events
    ]
    with named("--output"):
        draw_panels([Panel(f"measured, {len(arguments.traces)} traces", bars, "ms")], arguments.output)
    end = max(bar.end for bar in bars)
    exposed = exposed_seconds(events)
    for rank in sorted({bar.rank for bar in bars}):
        mine = [bar for bar in bars if bar.rank == rank]
        waits = sum(bar.end - bar.start for bar in mine if bar.kind == "wait")
        work = sum(bar.end - bar.start for bar in mine if bar.kind in ("F", "B", "I", "W"))
        print(
            f"rank {rank}: computes {work / end:.1%}, waits for values {waits / end:.1%}, for values on "
            f"their way {exposed.get(rank, 0.0) * 1e3 / end:.1%} of {end:.3g} ms"
        )
    return 0
