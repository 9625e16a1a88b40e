"""Steps per second and loss over time, with what happened marked on both."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .ways import WAYS

_BIN = 1.0  # seconds
_GAP = 2.0  # seconds without a step, over which no line is drawn
_MARKS = {
    "kill": ("X", "a rank is killed"),
    "join": ("^", "a rank joins"),
    "restart": ("s", "all ranks start anew, from the checkpoint"),
}


def rates(times: list[float]) -> tuple[list[float], list[float]]:
    """Middles of bins, and steps per second in each, up to the last step. times: ascending."""
    bins = range(int(times[-1] / _BIN))
    edges = [bisect_right(times, _BIN * number) for number in range(len(bins) + 1)]
    counts = [(after - before) / _BIN for before, after in pairwise(edges)]
    return [_BIN * (number + 0.5) for number in bins], counts


def broken(times: list[float], losses: list[float]) -> tuple[list[float], list[float]]:
    """With a point that is not drawn in each gap."""
    points = [(times[0], losses[0])]
    for (before, _), (time, loss) in pairwise(zip(times, losses, strict=True)):
        if time - before > _GAP:
            points.append((time, float("nan")))
        points.append((time, loss))
    return [time for time, _ in points], [loss for _, loss in points]


def draw(results: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    drawn = [way for way in WAYS if way.name in results["ways"]]
    for way in drawn:
        found = results["ways"][way.name]
        times, losses = found["steps"]["time"], found["steps"]["loss"]
        middles, counts = rates(times)
        look = {"color": way.colour, "linewidth": 1.2}
        above.plot(middles, counts, drawstyle="steps-mid", label=way.label, **look)
        below.plot(*broken(times, losses), **look)
        for event in found["events"]:
            mark, _ = _MARKS[event["what"]]
            last = max(bisect_right(times, event["time"]) - 1, 0)
            near = min(int(event["time"] / _BIN), len(counts) - 1)
            look = {"color": way.colour, "marker": mark, "markersize": 8, "markeredgecolor": "black"}
            below.plot([event["time"]], [losses[last]], zorder=5, **look)
            if counts:
                above.plot([event["time"]], [counts[near]], zorder=5, **look)
    seen = {event["what"] for way in drawn for event in results["ways"][way.name]["events"]}
    marks = [
        Line2D([], [], color="white", marker=mark, markersize=8, markeredgecolor="black", label=label)
        for what, (mark, label) in _MARKS.items()
        if what in seen
    ]
    head = results["header"]
    above.set_title(
        f"A GPT on {head['ranks']} ranks, {head['steps']} steps; a rank is killed in the steps after "
        f"{' and '.join(map(str, head['kill_at']))}",
        fontsize=10,
    )
    above.set_ylabel("steps per second")
    above.set_ylim(0, 1.35 * above.get_ylim()[1])  # room for the legend
    above.legend(handles=[*above.get_legend_handles_labels()[0], *marks], frameon=False, fontsize=8, ncols=2)
    below.set_ylabel("loss")
    below.set_xlabel("seconds since the first step")
    for axes in (above, below):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
