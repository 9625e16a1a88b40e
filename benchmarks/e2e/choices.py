"""python -m benchmarks.e2e.choices: the table of docs/pipelining.md from the raw results of
`python -m benchmarks.e2e --choices`."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from ..machine import ROOT
from ..page import replace
from .publish import NAMES, Table, step, title
from .rows import AUTO

__all__ = ["RESULTS", "choice_table", "publish_choices"]

RESULTS = ROOT / "benchmarks" / "results" / "choices.json"
_PAGE = ROOT / "docs" / "pipelining.md"
_MARK = "<!-- {} of what python -m benchmarks.e2e --choices writes -->"


def best(found: Table) -> str:
    """The fastest of the schedules that were given."""
    return min((name for name in found["rows"] if name != AUTO), key=lambda name: step(found, name))


def against(found: Table, name: str) -> str:
    """What auto takes over what another row takes: median of the rounds, which both were in."""
    if name not in found["rows"]:
        return ""
    ours, theirs = (found["rows"][each]["seconds"] for each in (AUTO, name))
    return f"{statistics.median(a / b for a, b in zip(ours, theirs, strict=True)):.3f}"


def choice_table(tables: Sequence[Table]) -> str:
    """Seconds of a step, a column for each job; below what was chosen, and how near it is to the best."""
    lines = ["| | " + " | ".join(map(title, tables)) + " |", "|---|" + "---:|" * len(tables)]
    for name in tables[0]["rows"]:
        cells = [
            f"**{step(each, name):.3f}**" if name == best(each) else f"{step(each, name):.3f}"
            for each in tables
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    chosen = [str(each["rows"][AUTO]["chosen"]) for each in tables]
    same = [against(*pair) for pair in zip(tables, chosen, strict=True)]
    lines.append("| chosen by auto | " + " | ".join(chosen) + " |")
    lines.append("| auto / best | " + " | ".join(against(each, best(each)) for each in tables) + " |")
    lines.append("| auto / the row of what it chose | " + " | ".join(same) + " |")
    return "\n".join(lines)


def split_costs(times: Sequence[dict[str, Any]]) -> str:
    """Of the last stage, the only one whose backward has two parts: I and W over the whole backward."""
    costs = [
        f"{each['split_backward'][-1] / each['backward'][-1] - 1:.1%} in {NAMES[each['model']]}"
        for each in times
    ]
    return f"Splitting the backward of the last stage costs {' and '.join(costs)}, with free transfers."


def text(results: dict[str, Any]) -> str:
    head = results["header"]
    return f"""\
`{head["command"]}`: torch {head["torch"]}, {head["cores"]} cores, commit {head["commit"]}, medians of
{head["repeats"]} rounds in which the rows take turns. Seconds of a step of {head["microbatches"]}
micro-batches; the fastest that was given is bold.

{choice_table(results["tables"])}

{split_costs(results["times"])}"""


def publish_choices(results: dict[str, Any]) -> None:
    """Writes the table between its marks."""
    replace(_PAGE, _MARK, text(results))
    print(f"wrote {_PAGE.relative_to(ROOT)}")


def main() -> int:
    publish_choices(json.loads(RESULTS.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
