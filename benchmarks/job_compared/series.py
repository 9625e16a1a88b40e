"""What is told and drawn of a job: its steps over time, and what happened in between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

Series = dict[str, list[Any]]
Event = dict[str, Any]


def series(lines: Iterable[dict[str, Any]]) -> Series:
    """Columns time, step, loss and ranks, a row for each step that a group of ranks did, as they ended. Times
    are seconds since the Epoch."""
    steps: dict[tuple[int, str], dict[str, Any]] = {}
    for line in lines:
        known = steps.setdefault((line["step"], line["group"]), line)
        if line["time"] > known["time"]:
            steps[line["step"], line["group"]] = line
    rows = sorted(steps.values(), key=lambda line: line["time"])
    return {name: [row[name] for row in rows] for name in ("time", "step", "loss", "ranks")}


def events(found: Series, kills: Sequence[Event]) -> list[Event]:
    """Kills, and what shows in the steps: that ranks join, that the job goes back to an earlier step."""
    said = [{"what": "kill", "time": kill["time"], "rank": kill["rank"]} for kill in kills]
    rows = list(zip(*found.values(), strict=True))
    for (_, step, _, ranks), (time, next_step, _, next_ranks) in pairwise(rows):
        if next_step <= step:
            said.append({"what": "restart", "time": time, "step": next_step, "ranks": next_ranks})
        elif next_ranks > ranks:
            said.append({"what": "join", "time": time, "ranks": next_ranks})
    return sorted(said, key=lambda event: event["time"])


def from_start(found: Series, happened: Sequence[Event]) -> tuple[Series, list[Event]]:
    """With seconds since the end of the first step, and rounded for a file."""
    start = found["time"][0]
    times = [round(time - start, 3) for time in found["time"]]
    losses = [round(loss, 6) for loss in found["loss"]]
    moved = [{**event, "time": round(event["time"] - start, 3)} for event in happened]
    return {**found, "time": times, "loss": losses}, moved


def recoveries(found: Series, happened: Sequence[Event]) -> list[float]:
    """Seconds from each kill to the end of the next step that no rank had begun before it."""
    rows = list(zip(found["time"], found["step"], strict=True))
    times = []
    for event in happened:
        if event["what"] == "kill":
            # One more had begun: survivors complete it, or do it again.
            done = max(step for time, step in rows if time <= event["time"])
            later = [time for time, step in rows if time > event["time"] and step > done + 1]
            times.append(min(later, default=float("inf")) - event["time"])
    return times


def repeated(found: Series) -> int:
    """Steps that were done again."""
    return len(found["step"]) - len(set(found["step"]))


def apart(found: Series, expected: Sequence[float]) -> float:
    """The largest difference of a loss from that of the step in one process."""
    pairs = zip(found["step"], found["loss"], strict=True)
    return max(abs(loss - expected[step]) for step, loss in pairs)
