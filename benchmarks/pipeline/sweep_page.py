"""The methods that are compared, and the pictures and the tables of docs/pipelining.md: schedules of
meshcast, each with the options of its simulation, and of torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshcast import pipelining as ours
from meshcast.pipelining import Action, simulate
from meshcast.pipelining.simulate import Span
from meshcast.pipelining.trace import Timeline, draw_timelines
from torch import nn
from torch.distributed import pipelining as theirs

from ..harness import Page, command, new_figure, save_chart

LATE = 0.03  # of a forward: a step in which timed compute ended later than this is measured again
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Method:
    """One column. make: (module, rank, stages, micro-batches, loss_fn) -> a schedule with torch's step().
    simulated: arguments of `simulate` beyond the times; None for what is not ours."""

    name: str
    make: Callable[..., Any]
    simulated: dict[str, Any] | None
    traced: bool = field(default=False)  # its steady-state period is read off the trace


def _meshcast(cls: type[Any], **options: Any) -> Callable[..., Any]:
    def make(module: nn.Module, rank: int, stages: int, microbatches: int, loss_fn: Any) -> Any:
        stage = ours.PipelineStage(module, rank, stages, _CPU)
        return cls(stage, microbatches, loss_fn=loss_fn, **options)

    return make


def _torch(cls: type[Any]) -> Callable[..., Any]:
    def make(module: nn.Module, rank: int, stages: int, microbatches: int, loss_fn: Any) -> Any:
        stage = theirs.PipelineStage(module, rank, stages, _CPU, group=dist.group.WORLD)
        return cls(stage, microbatches, loss_fn=loss_fn)

    return make


METHODS = (
    Method(
        "1F1B, no overlap",
        _meshcast(ours.Schedule1F1B, overlap=False),
        {"schedule": "1F1B", "send_model": "rendezvous", "buffers": 0},
    ),
    Method("1F1B", _meshcast(ours.Schedule1F1B), {"schedule": "1F1B"}),
    Method("Eager1F1B", _meshcast(ours.ScheduleEager1F1B), {"schedule": "Eager1F1B"}, traced=True),
    Method(
        "Eager1F1B, delayed",
        _meshcast(ours.ScheduleEager1F1B, delay_weight_grad=True),
        {"schedule": "Eager1F1B", "delay_weight_grad": True},
        traced=True,
    ),
    Method("torch 1F1B", _torch(theirs.Schedule1F1B), None),
    Method("torch GPipe", _torch(theirs.ScheduleGPipe), None),
)

_COLOURS = {
    "1F1B, no overlap": "#9c755f",
    "1F1B": "#e15759",
    "Eager1F1B": "#1f5fa8",
    "Eager1F1B, delayed": "#44aa99",
    "torch 1F1B": "#f28e2b",
    "torch GPipe": "#b07aa1",
}
_SIMULATED = {method.name: method.simulated for method in METHODS}
_DRAWN = ("Eager1F1B, delayed", 0.5)  # the step whose trace is drawn: method, transfer over forward


def measured(point: dict[str, Any], method: str) -> float:
    """The median step over the one with free transfers."""
    return statistics.median(point["methods"][method]["seconds"]) / point["free"]


def simulated(point: dict[str, Any], method: str) -> float | None:
    """The same of the simulation."""
    seconds = point["methods"][method]["simulated"]
    return None if seconds is None else seconds / point["free"]


def table_head(point: dict[str, Any]) -> str:
    """The first two lines of the table."""
    names = list(point["methods"])
    return "| transfer / forward | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1)


def row(point: dict[str, Any]) -> str:
    """One transfer time."""
    cells = []
    for method in point["methods"]:
        expected = simulated(point, method)
        cells.append(f"{measured(point, method):.3f}" + ("" if expected is None else f" ({expected:.3f})"))
    return f"| {point['transfer']:g} | " + " | ".join(cells) + " |"


def tables(results: dict[str, Any]) -> str:
    """The section of docs/pipelining.md."""
    head, points = results["header"], results["points"]
    forward, stages, microbatches = head["forward_seconds"], head["stages"], head["microbatches"]
    errors = [
        abs(measured(point, method) / expected - 1)
        for point in points
        for method in point["methods"]
        if (expected := simulated(point, method)) is not None
    ]
    eager = [
        abs(measured(point, method) / expected - 1)
        for point in points
        for method, found in point["methods"].items()
        if found["trace"] and (expected := simulated(point, method)) is not None
    ]
    periods = [
        statistics.median(each["periods"]) / (3 * forward) - 1
        for point in points
        for each in point["methods"].values()
        if each["periods"]
    ]
    spread = max(
        (max(each["seconds"]) - min(each["seconds"])) / statistics.median(each["seconds"])
        for point in points
        for each in point["methods"].values()
    )
    late, others = (
        max((found for point in points for each in point["methods"].values() for found in each.get(what, [])),
            default=None)
        for what in ("late", "others")
    )  # fmt: skip
    disturbed = (
        ""  # a file of before this was measured
        if late is None or others is None
        else f"Timed compute ended {late * 1e3:.1f} ms late at most, while\n"
        f"others had {others:.0%} of the cores at most (steps in which it ended more than "
        f"{LATE * forward * 1e3:g} ms\nlate are measured again: "
        f"{sum(point['again'] for point in points)} in all). "
    )
    overhead = results["overhead"]
    last = points[-1]
    peers = ", ".join(
        f"{measured(last, peer) / measured(last, 'Eager1F1B, delayed'):.2f}x faster than {peer}"
        for peer in ("torch 1F1B", "torch GPipe")
        if {peer, "Eager1F1B, delayed"} <= set(last["methods"])
    )
    alone, chain, wall = (overhead[name] * 1e6 for name in ("alone", "chain", "chain_wall"))
    fresh = overhead["new_shape"] * 1e3
    cores = head["cores"]
    return f"""\
`{command(head)}`: {stages} stages on {stages} hosts (network namespaces), a link of
{head["link_mbit"]:g} Mbit/s each way between neighbours ({results["links"]["mbit"]:.1f} measured),
{microbatches} micro-batches. A transfer's size is that which takes the time given on an idle link.
**Compute is timed**: a forward sleeps {forward * 1e3:g} ms, a backward twice that, instead of an accelerator;
transfers are real, the gradients of every step are checked. Times over that of 1F1B with free transfers,
(m + n - 1)(F + B); in brackets what
`simulate` says. `torch` is torch.distributed.pipelining {head["torch"]} with the same stages and links.
Medians of {head["repeats"]} (torch: one step), largest spread {spread:.1%}. {disturbed}{cores} cores,
commit {head["commit"]}.

{table_head(points[0])}
{chr(10).join(row(point) for point in points)}

- Simulated and measured differ by {max(errors):.1%} at most, by {max(eager):.1%} under the eager schedules.
- In the steady state a backward follows the other, under the eager schedules, after F + B within
  {max(map(abs, periods)):.1%}.
- At {last["transfer"]:g}, delayed Eager1F1B is {peers}.
- Of the CPU time of the thread that computes, the runtime takes {alone:.0f} us for each action where nothing
  travels (one stage), and {chain:.0f} us in a chain of {stages} stages with values of 64 bytes, sends and
  receives being actions too; an action takes {wall:.0f} us of wall time there, with all that {cores} cores do
  for {stages} ranks.
- A shape of micro-batches that is new adds {fresh:.0f} ms to a step there.

![measured and simulated step times](images/pipeline_sweep.svg)

A step of {_DRAWN[0]} at {_DRAWN[1]:g}, simulated and measured:

![a step, simulated and measured](images/pipeline_step.png)"""


def draw_sweep(results: dict[str, Any], path: Path) -> None:
    """Measured points on simulated lines; what is not ours has points and a dotted line through them."""
    points, head = results["points"], results["header"]
    forward = head["forward_seconds"]
    figure = new_figure(8, 4.6, layout="constrained")
    axes = figure.subplots()
    shares = [point["transfer"] for point in points]
    fine = [share / 50 for share in range(round(max(shares) * 50) + 1)]
    for method in points[0]["methods"]:
        colour, options = _COLOURS[method], _SIMULATED[method]
        values = [measured(point, method) for point in points]
        if options is not None:
            curve = [
                simulate(
                    stages=head["stages"], microbatches=head["microbatches"], forward=forward,
                    backward=2 * forward, transfer=share * forward, **options,
                ).makespan / points[0]["free"]
                for share in fine
            ]  # fmt: skip
            axes.plot(fine, curve, color=colour, linewidth=1.2)
        else:
            axes.plot(shares, values, color=colour, linewidth=1, linestyle=":")
        axes.plot(shares, values, "o", color=colour, markersize=5, label=method)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel("transfer time of a micro-batch / forward time")
    axes.set_ylabel("step / 1F1B with free transfers")
    axes.set_title(
        f"{head['stages']} stages, {head['microbatches']} micro-batches, timed compute: points measured, "
        "lines simulated", fontsize=10,
    )  # fmt: skip
    axes.legend(frameon=False, fontsize=9)
    save_chart(figure, path)


def draw_step(results: dict[str, Any], path: Path) -> None:
    """The trace of one step below its simulation, in ms."""
    name, share = _DRAWN
    head = results["header"]
    point = min(results["points"], key=lambda point: abs(point["transfer"] - share))
    found = point["methods"].get(name)
    if found is None:
        return
    forward = head["forward_seconds"] * 1e3
    report = simulate(
        stages=head["stages"], microbatches=head["microbatches"], forward=forward, backward=2 * forward,
        transfer=point["transfer"] * forward, **_SIMULATED[name] or {},
    )  # fmt: skip
    spans = [
        Span(int(rank), Action.parse(event.removeprefix("wait ")), start / 1e3, end / 1e3)
        for rank, events in found["trace"].items()
        for event, start, end in events
    ]
    timelines = [Timeline.simulated(f"{name}, simulated", report), Timeline.measured("measured", spans)]
    draw_timelines(timelines, path)


PAGE = Page(
    "pipeline", "pipeline_sweep.json", "docs/pipelining.md", tables,
    {"docs/images/pipeline_sweep.svg": draw_sweep, "docs/images/pipeline_step.png": draw_step},
)  # fmt: skip
PAGES = [PAGE]
