"""The chart and the tables of docs/end_to_end.md, the table of choices of docs/pipelining.md, and loss
curves."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..harness import Found, Page, command, new_figure, parser, save_chart, table
from .e2e_tasks import AUTO, BASELINE, FREE, FREE_DELAYED, OURS

NAMES = {"gpt": "GPT", "unet": "U-Transformer"}


def step(found: Found, row: str) -> float:
    """Seconds, median."""
    return statistics.median(found["rows"][row]["seconds"])


def speed_up(found: Found, row: str = OURS) -> float:
    return step(found, BASELINE) / step(found, row)


def title(found: Found) -> str:
    parts, replicas = found["mesh"]
    ranks = "one rank" if parts * replicas == 1 else f"{parts} x {replicas} ranks"
    return f"{NAMES[found['model']]}, compute is {found['compute']}, {ranks} for each stage"


def ratio(found: Found) -> float:
    """Transfer over forward and backward, by the measured rate and the measured compute."""
    times = found["times"]
    return found["transfer_once"] * 2 / (sum(times["forward"]) + sum(times["backward"]))


def reach(found: Found) -> float:
    """Ours over free transfers, whose step is longer by the first value's way there and the last gradient's
    way back: nothing hides those."""
    return step(found, OURS) / (step(found, FREE) + 2 * found["rows"][OURS]["transfer"])


def rows_table(found: Found) -> str:
    columns = ["", "step, s", "micro-batches/s", "speed-up", "exposed communication, s", "over the links, MB"]
    columns += ["held by each stage (simulated)", "simulated, s", "simulated / measured"]
    lines = []
    for name, row in found["rows"].items():
        seconds = step(found, name)
        exposed = "" if name in (FREE, FREE_DELAYED) else f"{seconds - step(found, FREE):.3f}"
        cells = [name, f"{seconds:.3f}", f"{found['microbatches'] / seconds:.2f}"]
        cells += [f"{speed_up(found, name):.2f}", exposed]
        cells.append(f"{row['sent'] / 1e6:.2f}")
        if row["simulated"] is None:
            cells += ["", "", ""]
        else:
            held = ", ".join(map(str, row["peak"]))
            expected = ", ".join(map(str, row["simulated_peak"]))
            cells.append(f"{held} ({expected})")
            cells += [f"{row['simulated']:.3f}", f"{row['simulated'] / seconds:.3f}"]
        lines.append(cells)
    return table(columns, lines)


def section(found: Found, microbatches: int) -> str:
    times = found["times"]
    seconds = ", ".join(
        f"{1e3 * f:.0f} + {1e3 * b:.0f}" for f, b in zip(times["forward"], times["backward"], strict=True)
    )
    spread = max(
        (max(row["seconds"]) - min(row["seconds"])) / statistics.median(row["seconds"])
        for row in found["rows"].values()
    )
    return f"""\
### {title(found)}

{microbatches} micro-batches; forward + backward of the stages: {seconds} ms; {found["nbytes"] / 1e6:.3f} MB
cross the cut in each direction, {1e3 * found["transfer_once"]:.1f} ms over a link of
{found["mbit"]:.0f} Mbit/s: {ratio(found):.3f} of the compute. Largest spread of the repeats {spread:.1%}.

{rows_table(found)}

Speed-up over {BASELINE}: **{speed_up(found):.2f}**. Over the step with free transfers, the way of the first
value and that of the last gradient added: {reach(found):.3f}."""


def derivation(results: Found) -> str:
    columns = ["", "samples in a micro-batch", "TFLOP", "peak of a V100, TFLOPS", "a stage computes, s"]
    columns += ["MB over the cut", "transfer at 10 Gbit/s, s", "transfer / compute"]
    lines = []
    for job in results["paper"]:
        cells = [job["name"], str(job["samples"]), f"{job['flops'] / 1e12:.1f}", f"{job['peak'] / 1e12:g}"]
        cells += [f"{job['compute']:.3f}", f"{job['nbytes'] / 1e6:.1f}", f"{job['transfer']:.4f}"]
        lines.append([*cells, f"**{job['ratio']:.3f}**"])
    return table(columns, lines)


def text(results: Found) -> str:
    head = results["header"]
    tables = results["tables"]
    summary = [
        [row, *(f"{speed_up(each, row):.2f}" if row in each["rows"] else "" for each in tables)]
        for row in dict.fromkeys(row for each in tables for row in each["rows"])
    ]
    parts = [
        f"""\
## What is transferred for what is computed

{derivation(results)}

## Ablation

`{command(head)}`: torch {head["torch"]}, {head["cores"]} cores, commit {head["commit"]}, medians of
{head["repeats"]} rounds in which the rows take turns, {head["seconds"]} s for everything. Throughput over
that of {BASELINE}:

{table(["", *map(title, tables)], summary)}

![Step times, measured and simulated](images/e2e.svg)""",
        *(section(each, head["microbatches"]) for each in results["tables"]),
    ]
    return "\n\n".join(parts)


def draw(results: Found, path: Path) -> None:
    """A panel for each table: bars measured, a mark where the simulation puts them."""
    tables = results["tables"]
    figure = new_figure(11, 1.0 + 2.5 * -(-len(tables) // 2), layout="constrained")
    panels = figure.subplots(-(-len(tables) // 2), min(2, len(tables)), squeeze=False).flatten()
    for axes, found in zip(panels, tables, strict=False):
        free = step(found, FREE)
        names = list(found["rows"])
        places = list(range(len(names)))[::-1]
        colours = [
            "#1f5fa8" if name == OURS else "#b8b8b8" if name in (FREE, FREE_DELAYED) else "#7aa6d8"
            for name in names
        ]
        values = [step(found, name) / free for name in names]
        axes.barh(places, values, color=colours, height=0.7)
        for place, value, name in zip(places, values, names, strict=True):
            expected = found["rows"][name]["simulated"]
            axes.text(0.03, place, f"{value:.2f}", va="center", fontsize=8)
            if expected is not None:
                axes.plot([expected / free] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1.6)
        axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set_yticks(places, names, fontsize=8)
        axes.set_title(title(found).replace(", ", "\n", 1), fontsize=9)
    for axes in panels[len(tables) :]:
        axes.set_visible(False)
    figure.supxlabel("step / 1F1B with free transfers; black mark: simulated", fontsize=9)
    save_chart(figure, path)


def best(found: Found) -> str:
    """The fastest of the schedules that were given."""
    return min((name for name in found["rows"] if name != AUTO), key=lambda name: step(found, name))


def against(found: Found, name: str) -> str:
    """What auto takes over what another row takes: median of the rounds, which both were in."""
    if name not in found["rows"]:
        return ""
    ours, theirs = (found["rows"][each]["seconds"] for each in (AUTO, name))
    return f"{statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.3f}"


def choice_table(tables: Sequence[Found]) -> str:
    """Seconds of a step, a column for each job; below what was chosen, and how near it is to the best."""
    lines = [
        [name]
        + [
            f"**{step(each, name):.3f}**" if name == best(each) else f"{step(each, name):.3f}"
            for each in tables
        ]
        for name in tables[0]["rows"]
    ]
    chosen = [str(each["rows"][AUTO]["chosen"]) for each in tables]
    lines += [
        ["chosen by auto", *chosen],
        ["auto / best", *(against(each, best(each)) for each in tables)],
        ["auto / the row of what it chose", *map(against, tables, chosen)],
    ]
    return table(["", *map(title, tables)], lines)


def split_costs(times: Sequence[Found]) -> str:
    """Of the last stage, the only one whose backward has two parts: I and W over the whole backward."""
    costs = [
        f"{each['split_backward'][-1] / each['backward'][-1] - 1:.1%} in {NAMES[each['model']]}"
        for each in times
    ]
    return f"Splitting the backward of the last stage costs {' and '.join(costs)}, with free transfers."


def choices_text(results: Found) -> str:
    head = results["header"]
    return f"""\
`{command(head)}`: torch {head["torch"]}, {head["cores"]} cores, commit {head["commit"]}, medians of
{head["repeats"]} rounds in which the rows take turns. Seconds of a step of {head["microbatches"]}
micro-batches; the fastest that was given is bold.

{choice_table(results["tables"])}

{split_costs(results["times"])}"""


PAGE = Page("e2e", "e2e.json", "docs/end_to_end.md", text, {"docs/images/e2e.svg": draw})
CHOICES_PAGE = Page("e2e --choices", "choices.json", "docs/pipelining.md", choices_text)
PAGES = [PAGE, CHOICES_PAGE]


_COLOURS = ("#1f5fa8", "#f28e2b", "#44aa99", "#e15759", "#b07aa1", "#9c755f")
_LEAST = 1e-9  # what is less has no place on a logarithmic axis
_ALLOWED = 1e-4

Curves = dict[str, list[dict[str, Any]]]  # of each model


def load_curves(folder: Path) -> Curves:
    """One process first. Raises SystemExit where one is missing."""
    curves: Curves = {name: [] for name in NAMES}
    for path in sorted(folder.glob("*.json")):
        curve = json.loads(path.read_text())
        curves[curve["model"]].append(curve)
    for name, found in curves.items():
        found.sort(key=lambda curve: not _alone(curve))
        if len(found) < 2 or not _alone(found[0]):
            raise SystemExit(
                f"{folder}: holds no curves of {name}; see tests/multiproc/test_training_curves.py"
            )
    return curves


def _alone(curve: dict[str, Any]) -> bool:
    return curve["layout"].split()[0] == "1"


def differences(curve: dict[str, Any], reference: dict[str, Any]) -> list[float]:
    """Of the loss in each step, relative."""
    return [abs(a / b - 1) for a, b in zip(curve["losses"], reference["losses"], strict=True)]


def curves_text(curves: Curves) -> str:
    lines = []
    for name, (reference, *others) in curves.items():
        for curve in (reference, *others):
            first, last = curve["losses"][0], curve["losses"][-1]
            layout = "one process" if curve is reference else f"`--stages {curve['layout']}`"
            apart = "" if curve is reference else f"{max(differences(curve, reference)):.1e}"
            lines.append([NAMES[name], layout, f"{first:.5f} to {last:.5f}", apart])
    head = ["model", "layout", "loss, first to last", "largest relative difference"]
    return f"{table(head, lines, 'lllr')}\n\n![Losses over each other](images/training_curves.svg)"


def draw_curves(curves: Curves, path: Path) -> None:
    """Above the losses of all layouts, below how far each is from one process."""
    figure = new_figure(11, 6, layout="constrained")
    panels = figure.subplots(2, len(curves), sharex=True, height_ratios=[3, 2])
    for column, (name, (reference, *others)) in enumerate(curves.items()):
        above, below = panels[0][column], panels[1][column]
        steps = range(1, len(reference["losses"]) + 1)
        above.plot(steps, reference["losses"], color="black", linewidth=4, alpha=0.25, label="one process")
        for colour, curve in zip(_COLOURS, others, strict=False):
            label = " ".join(part for part in curve["layout"].split() if not part.startswith("--"))
            above.plot(steps, curve["losses"], color=colour, linewidth=0.9, label=label)
            apart = [max(each, _LEAST) for each in differences(curve, reference)]
            below.plot(steps, apart, color=colour, linewidth=0.9)
        above.set_title(f"{NAMES[name]}: stages, schedule, micro-batches", fontsize=10)
        above.set_ylabel("loss")
        above.legend(frameon=False, fontsize=8)
        below.axhline(_ALLOWED, color="black", linewidth=0.8, linestyle="--")
        below.set_yscale("log")
        below.set_ylim(_LEAST / 2, 3 * _ALLOWED)
        below.set_xlabel("step")
        below.set_ylabel("relative difference")
    save_chart(figure, path)


def curves() -> int:
    """The loss curves of tests/multiproc/test_training_curves.py, which leaves them in the folder that
    MESHCAST_CURVES names, laid over each other, with a table of how far they are from one process. Writes
    both into docs/end_to_end.md."""
    options = parser("curves", curves.__doc__)
    options.add_argument("folder", type=Path)
    Page(
        "curves", "", "docs/end_to_end.md", curves_text, {"docs/images/training_curves.svg": draw_curves}
    ).draw(load_curves(options.parse_args().folder))
    return 0
