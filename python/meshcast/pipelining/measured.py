"""Analysis of the traces of all ranks: whose value a rank waited for, and if it was on its way."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from meshcast.base import checks
from meshcast.errors import LayoutError
from meshcast.pipelining.action import Action
from meshcast.pipelining.errors import ScheduleError

__all__ = ["Event", "exposed_seconds", "jobs_of_trace", "read_trace"]


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a rank, in seconds of its host's clock. name: an action, or "wait " and a RECV."""

    rank: int
    name: str
    begin: float
    end: float


def read_trace(path: Path) -> list[Event]:
    """The events of a file that `Trace.write` wrote. Raises LayoutError for other files."""
    events = []
    try:
        content = json.loads(path.read_text())
        start = float(content.get("otherData", {}).get("begin", 0.0))
        for each in content["traceEvents"]:
            if each.get("ph") == "X":
                begin = start + float(each["ts"]) / 1e6
                end = begin + float(each["dur"]) / 1e6
                events.append(Event(int(each["pid"]), _checked(str(each["name"])), begin, end))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LayoutError(
            f"not a trace of a pipeline step ({type(error).__name__}: {checks.shown(str(error))})"
        ) from None
    return events


def jobs_of_trace(path: Path) -> list[str]:
    """Ids of the job that a trace is of, see `meshcast.base.observe.job_ids`; none in older ones. Of a file
    that read_trace has read."""
    found = json.loads(path.read_text()).get("otherData", {}).get("jobs", [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise LayoutError(f"otherData.jobs is {checks.shown(found)}: not what a trace holds there")
    return found


def _checked(name: str) -> str:
    """The name in the text form of its action."""
    waits = "wait " if name.startswith("wait ") else ""
    try:
        action = Action.parse(name.removeprefix("wait "))
    except ScheduleError:
        raise LayoutError(f"event {checks.shown(name)} is no action of a pipeline") from None
    if action.kind.is_recv != bool(waits):
        raise LayoutError(f"event {checks.shown(name)} is not one that a trace holds")
    return f"{waits}{action}"


def exposed_seconds(events: Iterable[Event]) -> dict[int, float]:
    """For each rank, how long it did nothing but wait for values that were on their way: its waits, each from
    the moment that the value was sent. What it waits before that is the bubble of the schedule.

    Counts only waits whose sender's trace is among the events; clocks of several hosts must agree.
    """
    events = list(events)
    sent: dict[str, float] = {}
    for event in events:
        if "SEND" in event.name:
            # Of a value cut over several ranks the last part counts.
            sent[event.name] = max(sent.get(event.name, event.begin), event.begin)
    exposed: dict[int, float] = {}
    for event in events:
        if event.name.startswith("wait "):
            name = str(Action.parse(event.name.removeprefix("wait ")).matching())
            if name in sent:
                waited = max(0.0, event.end - max(event.begin, sent[name]))
                exposed[event.rank] = exposed.get(event.rank, 0.0) + waited
    return exposed
