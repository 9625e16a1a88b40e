"""python -m benchmarks.partition.publish: the table of docs/pipelining.md from the raw results."""

from __future__ import annotations

import json
import statistics
import sys
from itertools import accumulate
from typing import Any

from ..machine import ROOT
from ..page import replace

__all__ = ["RESULTS", "publish", "rows", "text"]

RESULTS = ROOT / "benchmarks" / "results" / "partition.json"
_PAGE = ROOT / "docs" / "pipelining.md"
_MARK = "<!-- {} of the measured cuts, written by python -m benchmarks.partition -->"
_HEAD = """\
| model | choice | layers of each stage, on ranks | schedule | step, s | over the proposal |
|---|---|---|---|---:|---:|"""


def rows(model: str, found: list[dict[str, Any]]) -> list[str]:
    """One for each choice; the proposal is the first. Simulated figures are in brackets."""
    lines = []
    first = found[0]
    for choice in found:
        step, base = (statistics.median(each["seconds"]) for each in (choice, first))
        delayed = ", delayed" if choice["options"].get("delay_weight_grad") else ""
        ratio, expected = step / base, choice["simulated"] / first["simulated"]
        lines.append(
            f"| {model if choice is first else 'the same'} | {choice['name']} | {_stages(choice)} | "
            f"{choice['schedule']}{delayed} | {step:.2f} ({choice['simulated']:.2f}) | "
            f"{ratio:.2f} ({expected:.2f}) |"
        )
    return lines


def _stages(choice: dict[str, Any]) -> str:
    ends = accumulate(choice["ranks"])
    spans = [
        f"{layers} on {end - count}" + (f" to {end - 1}" if count > 1 else "")
        for layers, count, end in zip(choice["layers"], choice["ranks"], ends, strict=True)
    ]
    return "; ".join(spans)


def text(results: dict[str, Any]) -> str:
    head, models = results["header"], results["models"]
    every = [choice for found in models.values() for choice in found]
    spread = max((max(e["seconds"]) - min(e["seconds"])) / statistics.median(e["seconds"]) for e in every)
    errors = [abs(statistics.median(e["seconds"]) / e["simulated"] - 1) for e in every]
    late = max(max(each["late"]) for each in every)
    others = max(max(each["others"]) for each in every)
    table = "\n".join(line for model, found in models.items() for line in rows(model, found))
    return f"""\
`{head["command"]}`: {head["hosts"]} hosts (network namespaces) of {head["host_ranks"]} ranks, a link of
{head["link_mbit"]:g} Mbit/s each way for each host, {head["microbatches"]} micro-batches.
**Compute is timed**: a forward of all layers sleeps {head["forward_seconds"]:g} s on one rank. Bytes of
values and parameters are shrunk, so that compute and transfers are to each other as with
{head["emulated_gbit"]:g} Gbit/s. Values, gradients and their sums are real, and the gradients of every step
are checked. In brackets what `partition` simulates.
Medians of {head["repeats"]} rounds, in each of which every choice stepped once; largest spread {spread:.1%}.
Timed compute ended {late * 1e3:.0f} ms late at most, while others had {others:.0%} of the cores at most.
{head["cores"]} cores, torch {head["torch"]}, commit {head["commit"]}.

{_HEAD}
{table}

Simulated and measured steps differ by {max(errors):.1%} at most."""


def publish(results: dict[str, Any]) -> None:
    replace(_PAGE, _MARK, text(results))


if __name__ == "__main__":
    sys.exit(publish(json.loads(RESULTS.read_text())))
