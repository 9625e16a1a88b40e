"""Pictures of pipeline timelines: a row for each rank, its work as bars, its sends as a thin strip below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshcast.errors import LayoutError, MeshcastError
from meshcast.pipelining.action import Action
from meshcast.pipelining.simulate import SimulationReport

__all__ = ["Bar", "Panel", "bar_of", "draw_panels", "panel_of"]

_SUFFIXES = (".png", ".svg", ".pdf")
# Hues that stay apart in print and under the common colour deficiencies. F, B, I and W by kind; of the second
# and further stages of a rank a lighter tone.
_COLOURS = {
    "F": "#4477aa",
    "B": "#ee8866",
    "I": "#ddaa33",
    "W": "#44aa99",
    "wait": "#dddddd",
    "SEND_F": "#88ccee",
    "SEND_B": "#ffbb99",
}
_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "wait": "waiting for a value",
    "SEND_F": "sends activation",
    "SEND_B": "sends gradient",
}
_LABELLED = 700  # bars of a panel that carry their micro-batch; more would not be legible


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: what a rank does or sends in a span of time. kind: a key of the colours; tone: 0, or more for
    further stages of a rank."""

    rank: int
    kind: str
    start: float
    end: float
    text: str = ""
    tone: int = 0


@dataclass(frozen=True, slots=True)
class Panel:
    """One timeline."""

    title: str
    bars: Sequence[Bar]
    unit: str = ""


def panel_of(title: str, report: SimulationReport) -> Panel:
    """The panel of a simulated schedule."""
    stages: dict[int, list[int]] = {}
    for span in report.timeline:
        row = stages.setdefault(span.rank, [])
        if span.action.stage not in row:
            row.append(span.action.stage)
    bars = [
        Bar(
            span.rank,
            span.action.kind.value,
            span.start,
            span.end,
            str(span.action.microbatch),
            sorted(stages[span.rank]).index(span.action.stage),
        )
        for span in report.timeline
    ]
    bars += [Bar(span.rank, span.action.kind.value, span.start, span.end) for span in report.transfers]
    return Panel(title, bars)


def bar_of(rank: int, name: str, start: float, end: float) -> Bar:
    """The bar of an event of a trace, see `measured.Event`."""
    if name.startswith("wait "):
        return Bar(rank, "wait", start, end)
    action = Action.parse(name)
    text = str(action.microbatch) if action.kind.is_compute else ""
    return Bar(rank, action.kind.value, start, end, text)


def draw_panels(panels: Sequence[Panel], path: str | Path) -> None:
    """Writes the panels above each other, on one scale of time; the suffix of `path` tells the format.

    Raises LayoutError for other suffixes than .png, .svg and .pdf, MeshcastError without matplotlib, OSError
    where the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise LayoutError(f"path {str(path)!r}: allowed suffixes are {', '.join(_SUFFIXES)}")
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise MeshcastError("drawing needs matplotlib: pip install matplotlib") from None
    rows = [max((bar.rank for bar in panel.bars), default=0) + 1 for panel in panels]
    height = sum(0.36 * count + 0.62 for count in rows) + 0.7
    figure = Figure(figsize=(13, height), layout="constrained")
    grid = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": [n + 1 for n in rows]}
    )
    used: dict[str, None] = {}
    end = max((bar.end for panel in panels for bar in panel.bars), default=1.0)
    for axes, panel, count in zip(grid[:, 0], panels, rows, strict=True):
        _draw_panel(axes, panel, count, end)
        used |= dict.fromkeys(bar.kind for bar in panel.bars)
    grid[-1, 0].set_xlabel(f"time{f' [{panels[-1].unit}]' if panels and panels[-1].unit else ''}")
    handles = [Patch(facecolor=_COLOURS[kind], label=_NAMES[kind]) for kind in _COLOURS if kind in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) or 1, frameon=False)
    figure.savefig(path, dpi=140)


def _draw_panel(axes: Any, panel: Panel, rows: int, end: float) -> None:
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.set_ylim(rows - 0.4, -0.55)
    axes.set_xlim(0, end * 1.005)
    axes.set_yticks(range(rows), [f"rank {rank}" for rank in range(rows)], fontsize=8)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for kind, tone, bars in _grouped(panel.bars):
        strip = kind.startswith("SEND")
        axes.bar(
            [bar.start for bar in bars],
            [0.16 if strip else 0.62] * len(bars),
            width=[bar.end - bar.start for bar in bars],
            bottom=[bar.rank + (0.33 if strip else -0.31) for bar in bars],
            align="edge",
            color=_lighter(_COLOURS[kind], tone),
            edgecolor="white",
            linewidth=0.4,
        )
    # Only text that fits its bar: about 1/160 of the width for each character.
    if len(panel.bars) <= _LABELLED:
        for bar in panel.bars:
            if bar.text and bar.end - bar.start > len(bar.text) * end / 160:
                axes.text(
                    (bar.start + bar.end) / 2, bar.rank, bar.text, ha="center", va="center", fontsize=6.5
                )


def _grouped(bars: Iterable[Bar]) -> list[tuple[str, int, list[Bar]]]:
    """One call for all bars of a colour: thousands of calls would take seconds."""
    groups: dict[tuple[str, int], list[Bar]] = {}
    for bar in bars:
        groups.setdefault((bar.kind, bar.tone), []).append(bar)
    return [(kind, tone, members) for (kind, tone), members in groups.items()]


def _lighter(colour: str, tone: int) -> tuple[float, float, float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    mix = min(0.35 * tone, 0.7)
    red, green, blue = (part + (1 - part) * mix for part in parts)
    return red, green, blue
