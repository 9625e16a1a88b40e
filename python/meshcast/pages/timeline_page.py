"""The page of schedules, recorded steps and flight records: rows of bars on one axis of time, two of them
under each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import LayoutError
from .page import write_page

__all__ = ["PageBar", "PagePanel", "critical_path", "write_timeline_page"]

_MOST_BARS = 400_000  # a page of that many has 20 MB


class PageBar(NamedTuple):
    """A bar: what a row does in a span of time. kind: F, B, I, W, SEND_F, SEND_B, wait, or the state of a
    call; label: in the bar, where there is room; text: all of it; tone: 0, or more for further stages of a
    rank."""

    row: int
    kind: str
    start: float
    end: float
    label: str
    text: str
    tone: int = 0


class PagePanel(NamedTuple):
    """One timeline. facts: rows of a table of figures; critical: positions of the bars that the end waited
    for."""

    title: str
    unit: str
    rows: Sequence[str]
    bars: Sequence[PageBar]
    makespan: float
    facts: Sequence[tuple[str, str]] = ()
    critical: Sequence[int] = ()


def write_timeline_page(panels: Sequence[PagePanel], title: str, path: str | Path, text: str = "") -> None:
    """Writes the page; two panels are seen at a time. text: stands above them. Raises LayoutError for more
    bars than can be drawn, and as `write_page`."""
    bars = sum(len(panel.bars) for panel in panels)
    if bars > _MOST_BARS:
        raise LayoutError(f"{bars} bars are too many to draw, the limit is {_MOST_BARS}")
    write_page(path, title, "timeline", {"text": text, "panels": [panel._asdict() for panel in panels]})


def critical_path(
    starts: Sequence[float], ends: Sequence[float], needs: Sequence[Sequence[int]]
) -> list[int]:
    """Positions of spans, from the last end back: of those that a span needs, the one that ended last.

    needs: for each span, positions of those that it may have waited for.
    """
    if not ends:
        return []
    at = max(range(len(ends)), key=lambda index: ends[index])
    path = [at]
    while before := [index for index in needs[at] if ends[index] <= starts[at] + 1e-9 * abs(starts[at])]:
        at = max(before, key=lambda index: ends[index])
        path.append(at)
    return path[::-1]
