"""Draw the traces that ranks wrote with schedule.trace(path): a lane for each rank, on one scale of time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .. import _checks
from ..errors import LayoutError
from ..pipelining.action import Action
from ..pipelining.draw import Bar, Panel, draw_panels
from ..pipelining.errors import ScheduleError
from ._values import named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `timeline`."""
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="traces of one step, any ranks")
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="FILE", help="picture: .png, .svg or .pdf"
    )


def run(arguments: argparse.Namespace) -> int:
    """Draws, and prints what each rank did with its time."""
    traces = []
    for path in arguments.traces:
        with named(str(path)):
            traces.append(_read(path))
    first = min(begin for begin, _ in traces)
    bars = [
        Bar(bar.rank, bar.kind, bar.start + begin - first, bar.end + begin - first, bar.text, bar.tone)
        for begin, found in traces
        for bar in found
    ]
    if not bars:
        raise LayoutError("the traces hold no actions")
    with named("--output"):
        draw_panels([Panel(f"measured, {len(traces)} traces", bars, "ms")], arguments.output)
    end = max(bar.end for bar in bars)
    for rank in sorted({bar.rank for bar in bars}):
        mine = [bar for bar in bars if bar.rank == rank]
        waits = sum(bar.end - bar.start for bar in mine if bar.kind == "wait")
        work = sum(bar.end - bar.start for bar in mine if bar.kind in ("F", "B", "I", "W"))
        print(f"rank {rank}: computes {work / end:.1%}, waits for values {waits / end:.1%} of {end:.3g} ms")
    return 0


def _read(path: Path) -> tuple[float, list[Bar]]:
    """When the step began (ms), and its bars (ms after that)."""
    try:
        content = json.loads(path.read_text())
        events: list[dict[str, Any]] = [event for event in content["traceEvents"] if event.get("ph") == "X"]
        bars = [
            _bar(int(event["pid"]), str(event["name"]), float(event["ts"]) / 1e3, float(event["dur"]) / 1e3)
            for event in events
        ]
        return float(content.get("otherData", {}).get("begin", 0.0)) * 1e3, bars
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LayoutError(
            f"not a trace of a pipeline step ({type(error).__name__}: {_checks.shown(str(error))})"
        ) from None


def _bar(rank: int, name: str, start: float, duration: float) -> Bar:
    if name.startswith("wait "):
        return Bar(rank, "wait", start, start + duration)
    try:
        action = Action.parse(name)
    except ScheduleError:
        raise LayoutError(f"event {_checks.shown(name)} is no action of a pipeline") from None
    if action.kind.is_recv:
        raise LayoutError(f"event {_checks.shown(name)} is not one that a trace holds")
    text = str(action.microbatch) if action.kind.is_compute else ""
    return Bar(rank, action.kind.value, start, start + duration, text)
