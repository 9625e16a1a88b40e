"""Pages: a plan, or timelines, as one HTML file that needs nothing else.

Timelines are of simulated schedules, of steps that were recorded, and of the calls in flight records.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from ..base import checks
from ..base.checks import dtype_name, runs_text
from ..errors import LayoutError
from ..pipelining.action import Action, ActionKind
from ..pipelining.simulate import Span
from ..pipelining.trace import Timeline
from ..planning.plan import Plan
from ..planning.show import size_text

__all__ = [
    "PageBar",
    "PagePanel",
    "critical_path",
    "panel_of",
    "write_page",
    "write_plan_page",
    "write_timeline_page",
]


_SUFFIXES = (".html", ".htm")


def write_page(path: str | Path, title: str, script: str, data: dict[str, Any]) -> None:
    """Writes a page that shows `data` by the script of that name: "plan" or "timeline". Raises LayoutError
    for other suffixes than .html and .htm, and OSError where the file cannot be written."""
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise LayoutError(f"path {checks.shown(str(path))}: allowed suffixes are {', '.join(_SUFFIXES)}")
    # In a script of HTML, "</" and "<!--" would end or change it.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = _file("page.html")
    parts = {"STYLE": _file("page.css"), "SCRIPT": _file("common.js") + _file(f"{script}.js"), "DATA": text}
    for name, part in parts.items():
        before, after = page.split(f"<!-- {name} -->")
        page = f"{before}{part}{after}"
    path.write_text(page.replace("<!-- TITLE -->", html.escape(title)), encoding="utf-8")


def _file(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


_MOST_HOPS = 1_000_000  # a page of that many has 60 MB
_NAMED_TASKS = 1000


def write_plan_page(plan: Plan, path: str | Path) -> None:
    """Writes the page. Raises LayoutError for a plan of more than a million hops, and as `write_page`."""
    if len(plan) > _MOST_HOPS:
        raise LayoutError(
            f"{len(plan)} hops are too many to draw, the limit is {_MOST_HOPS}; plan with larger chunks "
            "(--chunk-bytes)"
        )
    write_page(path, f"Plan: {_moved(plan)}", "plan", _data(plan))


def _data(plan: Plan) -> dict[str, Any]:
    core = plan._core

    def column(name: str) -> list[int]:
        return memoryview(core.column(name)).tolist()

    chunk, begin, task_of = column("hop_chunk"), column("chunk_begin"), column("piece_task")
    size = max(plan.ranks, default=0) + 1
    host_of, nic_of = [0] * size, [0] * size
    hosts: list[dict[str, Any]] = []
    for host in plan.hosts:
        used = [rank for rank in host.ranks if rank in plan._rank_traffic]
        if not used:
            continue
        for position, rank in enumerate(host.ranks):
            if rank < size:
                host_of[rank], nic_of[rank] = len(hosts), position % len(host.nics)
        nics = [[nic.out_rate, nic.in_rate] for nic in host.nics]
        hosts.append({"ranks": used, "nics": nics, "local": host.local_rate})
    return {
        "what": _moved(plan),
        "about": _about(plan),
        "strategy": plan.strategy,
        "makespan": core.makespan_ns,
        "bound": core.lower_bound_ns,
        "hosts": hosts,
        "host_of": host_of,
        "nic_of": nic_of,
        "tasks": [
            f"{size_text(task.nbytes)}, {runs_text(task.holders)} \N{RIGHTWARDS ARROW} "
            f"{runs_text(task.receivers)}"
            for task, _ in zip(plan.tasks, range(_NAMED_TASKS), strict=False)
        ],
        "hops": {
            "src": column("hop_src"),
            "dst": column("hop_dst"),
            "start": column("start_ns"),
            "finish": column("finish_ns"),
            "chunk": chunk,
            "task": [task_of[begin[each]] for each in chunk],
        },
        "chunk_bytes": column("chunk_nbytes"),
    }


def _moved(plan: Plan) -> str:
    first = plan.problems[0]
    text = f"{'x'.join(map(str, first.shape)) or 'scalar'} {dtype_name(first.dtype)}"
    return text if len(plan.problems) == 1 else f"{len(plan.problems)} tensors, the first {text}"


_MOST_ABOUT = 4  # tensors whose layouts stand on the page


def _about(plan: Plan) -> list[tuple[str, str]]:
    """Rows on what moves: its shape and size, from where, to where, and over what."""
    rows = []
    for problem in plan.problems[:_MOST_ABOUT]:
        nbytes = size_text(checks.total_bytes(problem.shape, problem.dtype))
        what = f"{'x'.join(map(str, problem.shape)) or 'scalar'} {dtype_name(problem.dtype)}, {nbytes}"
        rows.append(("tensor", what))
        for name, layout in (("from", problem.src), ("to", problem.dst)):
            shapes = sorted(set(layout.local_shapes(problem.shape).values()), reverse=True)
            each = " or ".join("x".join(map(str, shape)) or "scalar" for shape in shapes[:_MOST_ABOUT])
            more = f" or {len(shapes) - _MOST_ABOUT} others" if len(shapes) > _MOST_ABOUT else ""
            ranks = runs_text(tuple(sorted(layout.ranks)))
            mesh = "" if layout.by_boxes else f"mesh {'x'.join(map(str, layout.mesh_shape))}: "
            rows.append(
                (name, f"{mesh}{', '.join(layout.placement_texts)} on ranks {ranks}, each {each}{more}")
            )
    if len(plan.problems) > _MOST_ABOUT:
        rows.append(("tensors", f"and {len(plan.problems) - _MOST_ABOUT} more"))
    return [*rows, ("topology", repr(plan.topology))]


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


_WORDS = {
    ActionKind.F: "forward of micro-batch {m}, stage {s}",
    ActionKind.B: "backward of micro-batch {m}, stage {s}",
    ActionKind.I: "input gradients of micro-batch {m}, stage {s}",
    ActionKind.W: "weight gradients of micro-batch {m}, stage {s}",
    ActionKind.SEND_F: "activation of micro-batch {m}, stage {s} to stage {p}",
    ActionKind.SEND_B: "gradient of micro-batch {m}, stage {s} to stage {p}",
    ActionKind.RECV_F: "waits for the activation of micro-batch {m} from stage {p}",
    ActionKind.RECV_B: "waits for the gradient of micro-batch {m} from stage {p}",
}


def panel_of(timeline: Timeline) -> PagePanel:
    """Returns the panel of a schedule, simulated or recorded."""
    spans = timeline.spans
    ranks = sorted({span.rank for span in spans})
    rows = {rank: row for row, rank in enumerate(ranks)}
    bars = []
    for span, tone in zip(spans, timeline.tones(), strict=True):
        action = span.action
        kind = "wait" if action.kind.is_recv else action.kind.value
        label = str(action.microbatch) if action.kind.is_compute else ""
        words = _WORDS[action.kind].format(m=action.microbatch, s=action.stage, p=action.peer)
        text = f"{action}: {words}"
        bars.append(PageBar(rows[span.rank], kind, span.start, span.end, label, text, tone))
    critical = critical_path([bar.start for bar in bars], [bar.end for bar in bars], _needs(spans))
    names = [f"rank {rank}" for rank in ranks]
    return PagePanel(timeline.title, timeline.unit, names, bars, timeline.end, timeline.facts, critical)


def _needs(spans: Sequence[Span]) -> list[list[int]]:
    """Returns for each span those that it may have waited for: the one before on its rank or link, what
    computed or brought its input, and the computation on the other side."""
    before: dict[object, int] = {}
    made: dict[tuple[int, int, bool], list[int]] = {}  # stage, micro-batch, backward: computations
    brought: dict[tuple[int, int, bool], list[int]] = {}  # the same: transfers to that stage
    for index, span in enumerate(spans):
        key = _value(span.action)
        if span.action.kind.is_compute and span.action.kind is not ActionKind.W:
            made.setdefault(key, []).append(index)
        elif span.action.kind.is_send:
            brought.setdefault((span.action.peer, *key[1:]), []).append(index)
    needs: list[list[int]] = [[] for _ in spans]
    for index in sorted(range(len(spans)), key=lambda index: spans[index].start):
        rank, action = spans[index].rank, spans[index].action
        lane: object = (rank, action.peer) if action.kind.is_send else rank
        if lane in before:
            needs[index].append(before[lane])
        before[lane] = index
        if action.kind.is_send:
            needs[index] += made.get(_value(action), [])
        else:
            for other in brought.get(_value(action), []):
                needs[index] += [other, *made.get(_value(spans[other].action), [])]
    return needs


def _value(action: Action) -> tuple[int, int, bool]:
    """Returns the value that an action makes, sends or waits for: its stage, its micro-batch, and whether it
    is a gradient."""
    return action.stage, action.microbatch, action.kind.is_backward


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
