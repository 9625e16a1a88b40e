"""python -m benchmarks.e2e.publish: the chart and the tables of docs/end_to_end.md from the raw results."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from ..machine import ROOT
from ..page import replace
from .rows import BASELINE, FREE, FREE_DELAYED, OURS

__all__ = ["NAMES", "RESULTS", "publish", "step", "table", "title"]

RESULTS = ROOT / "benchmarks" / "results" / "e2e.json"
_PAGE = ROOT / "docs" / "end_to_end.md"
_PICTURE = ROOT / "docs" / "images" / "e2e.svg"
_MARK = "<!-- {} of what python -m benchmarks.e2e writes -->"
NAMES = {"gpt": "GPT", "unet": "U-Transformer"}

Table = dict[str, Any]


def step(found: Table, row: str) -> float:
    """Seconds, median."""
    return statistics.median(found["rows"][row]["seconds"])


def speed_up(found: Table, row: str = OURS) -> float:
    return step(found, BASELINE) / step(found, row)


def title(found: Table) -> str:
    parts, replicas = found["mesh"]
    ranks = "one rank" if parts * replicas == 1 else f"{parts} x {replicas} ranks"
    return f"{NAMES[found['model']]}, compute is {found['compute']}, {ranks} for each stage"


def ratio(found: Table) -> float:
    """Transfer over forward and backward, by the measured rate and the measured compute."""
    times = found["times"]
    return found["transfer_once"] * 2 / (sum(times["forward"]) + sum(times["backward"]))


def reach(found: Table) -> float:
    """Ours over free transfers, whose step is longer by the first value's way there and the last gradient's
    way back: nothing hides those."""
    return step(found, OURS) / (step(found, FREE) + 2 * found["rows"][OURS]["transfer"])


def table(found: Table) -> str:
    columns = ["step, s", "micro-batches/s", "speed-up", "exposed communication, s", "over the links, MB"]
    columns += ["held by each stage (simulated)", "simulated, s", "simulated / measured"]
    lines = _head(columns)
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
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def section(found: Table, microbatches: int) -> str:
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

{table(found)}

Speed-up over {BASELINE}: **{speed_up(found):.2f}**. Over the step with free transfers, the way of the first
value and that of the last gradient added: {reach(found):.3f}."""


def derivation(results: dict[str, Any]) -> str:
    columns = ["samples in a micro-batch", "TFLOP", "peak of a V100, TFLOPS", "a stage computes, s"]
    columns += ["MB over the cut", "transfer at 10 Gbit/s, s", "transfer / compute"]
    lines = _head(columns)
    for job in results["paper"]:
        cells = [job["name"], str(job["samples"]), f"{job['flops'] / 1e12:.1f}", f"{job['peak'] / 1e12:g}"]
        cells += [f"{job['compute']:.3f}", f"{job['nbytes'] / 1e6:.1f}", f"{job['transfer']:.4f}"]
        lines.append("| " + " | ".join([*cells, f"**{job['ratio']:.3f}**"]) + " |")
    return "\n".join(lines)


def _head(columns: list[str]) -> list[str]:
    return ["| | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]


def text(results: dict[str, Any]) -> str:
    head = results["header"]
    summary = ["| | " + " | ".join(title(each) for each in results["tables"]) + " |"]
    summary.append("|---|" + "---:|" * len(results["tables"]))
    rows: dict[str, None] = {}
    for each in results["tables"]:
        rows |= dict.fromkeys(each["rows"])
    for row in rows:
        cells = [f"{speed_up(each, row):.2f}" if row in each["rows"] else "" for each in results["tables"]]
        summary.append(f"| {row} | " + " | ".join(cells) + " |")
    parts = [
        f"""\
## What is transferred for what is computed

{derivation(results)}

## Ablation

`{head["command"]}`: torch {head["torch"]}, {head["cores"]} cores, commit {head["commit"]}, medians of
{head["repeats"]} rounds in which the rows take turns, {head["seconds"]} s for everything. Throughput over
that of {BASELINE}:

{chr(10).join(summary)}

![Step times, measured and simulated](images/e2e.svg)""",
        *(section(each, head["microbatches"]) for each in results["tables"]),
    ]
    return "\n\n".join(parts)


def draw(results: dict[str, Any], path: Path) -> None:
    """A panel for each table: bars measured, a mark where the simulation puts them."""
    mpl.rcParams["svg.hashsalt"] = "meshcast"  # the same picture for the same figures
    tables = results["tables"]
    figure = Figure(figsize=(11, 1.0 + 2.5 * -(-len(tables) // 2)), layout="constrained")
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
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    for axes in panels[len(tables) :]:
        axes.set_visible(False)
    figure.supxlabel("step / 1F1B with free transfers; black mark: simulated", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def publish(results: dict[str, Any]) -> None:
    """Writes the tables between their marks, and the chart."""
    replace(_PAGE, _MARK, text(results))
    draw(results, _PICTURE)
    print(f"wrote {_PAGE.relative_to(ROOT)} and {_PICTURE.relative_to(ROOT)}")


def main() -> int:
    publish(json.loads(RESULTS.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
