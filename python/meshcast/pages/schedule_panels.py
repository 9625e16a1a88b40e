"""Panels of simulated schedules and of steps that were recorded."""

from __future__ import annotations

from collections.abc import Sequence

from ..pipelining.action import Action, ActionKind
from ..pipelining.simulate import SimulationReport
from ..pipelining.trace import Event
from .page import PageBar, PagePanel, critical_path

__all__ = ["panel_of_events", "panel_of_report"]

_NAMES = {
    "F": "forward of micro-batch {m}, stage {s}",
    "B": "backward of micro-batch {m}, stage {s}",
    "I": "input gradients of micro-batch {m}, stage {s}",
    "W": "weight gradients of micro-batch {m}, stage {s}",
    "SEND_F": "activation of micro-batch {m}, stage {s} to stage {p}",
    "SEND_B": "gradient of micro-batch {m}, stage {s} to stage {p}",
    "RECV_F": "waits for the activation of micro-batch {m} from stage {p}",
    "RECV_B": "waits for the gradient of micro-batch {m} from stage {p}",
}
_Span = tuple[int, Action, float, float]


def panel_of_report(title: str, report: SimulationReport, unit: str = "") -> PagePanel:
    """Returns the panel of a simulated schedule."""
    spans = [(span.rank, span.action, span.start, span.end) for span in (*report.timeline, *report.transfers)]
    facts = [
        ("makespan", f"{report.makespan:.6g}{f' {unit}' if unit else ''}"),
        ("bubble", f"{report.bubble_fraction:.1%}"),
        ("exposed transfers", f"{report.exposed_fraction:.1%}"),
        ("most micro-batches held by a rank", str(max(report.peak_of_ranks, default=0))),
    ]
    return _panel(title, unit, spans, report.makespan, facts)


def panel_of_events(title: str, events: Sequence[Event]) -> PagePanel:
    """Returns the panel of a step that was recorded, in ms from its first event."""
    first = min((event.begin for event in events), default=0.0)
    spans = [
        (
            each.rank,
            Action.parse(each.name.removeprefix("wait ")),
            (each.begin - first) * 1e3,
            (each.end - first) * 1e3,
        )
        for each in events
    ]
    end = max((span[3] for span in spans), default=0.0)
    return _panel(title, "ms", spans, end, [("took", f"{end:.4g} ms")])


def _panel(
    title: str, unit: str, spans: Sequence[_Span], makespan: float, facts: Sequence[tuple[str, str]]
) -> PagePanel:
    ranks = sorted({rank for rank, *_ in spans})
    stages: dict[int, set[int]] = {rank: set() for rank in ranks}
    for rank, action, _, _ in spans:
        stages[rank].add(action.stage)
    bars = []
    for rank, action, start, end in spans:
        kind = "wait" if action.kind.is_recv else action.kind.value
        label = str(action.microbatch) if action.kind.is_compute else ""
        words = _NAMES[action.kind.value].format(m=action.microbatch, s=action.stage, p=action.peer)
        tone = sorted(stages[rank]).index(action.stage) if action.kind.is_compute else 0
        bars.append(PageBar(ranks.index(rank), kind, start, end, label, f"{action}: {words}", tone))
    critical = critical_path([bar.start for bar in bars], [bar.end for bar in bars], _needs(spans))
    return PagePanel(title, unit, [f"rank {rank}" for rank in ranks], bars, makespan, facts, critical)


def _needs(spans: Sequence[_Span]) -> list[list[int]]:
    """For each span, those that it may have waited for: the one before on its rank or link, what computed or
    brought its input, and the computation on the other side."""
    before: dict[object, int] = {}
    made: dict[tuple[int, int, bool], list[int]] = {}  # stage, micro-batch, backward: computations
    brought: dict[tuple[int, int, bool], list[int]] = {}  # likewise: transfers to that stage
    for index, (_, action, _, _) in enumerate(spans):
        key = action.stage, action.microbatch, action.kind.is_backward
        if action.kind.is_compute and action.kind is not ActionKind.W:
            made.setdefault(key, []).append(index)
        elif action.kind.is_send:
            brought.setdefault((action.peer, *key[1:]), []).append(index)
    needs: list[list[int]] = [[] for _ in spans]
    for index in sorted(range(len(spans)), key=lambda index: spans[index][2]):
        rank, action, _, _ = spans[index]
        key = action.stage, action.microbatch, action.kind.is_backward
        lane: object = (rank, action.peer) if action.kind.is_send else rank
        if lane in before:
            needs[index].append(before[lane])
        before[lane] = index
        if action.kind.is_send:
            needs[index] += made.get(key, [])
        else:
            needs[index] += brought.get(key, [])
            for other in brought.get(key, []):
                _, sent, _, _ = spans[other]
                needs[index] += made.get((sent.stage, *key[1:]), [])
    return needs
