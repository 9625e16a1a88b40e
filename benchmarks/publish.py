"""python -m benchmarks.publish: draws the chart of the README and writes the tables of
benchmarks/results/README.md from the raw results beside it. Results that must not be reported are named with
the reason, and not shown."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshcast.bench.methods import METHODS, OUR_METHODS
from meshcast.bench.report import calibration_text, problems, ratio, remarks, spread, table

from . import chart, planner
from .page import replace
from .peers import PEERS

_ROOT = Path(__file__).resolve().parent.parent
_FOLDER = Path(__file__).with_name("results")
_RESULTS = {
    "paper_cases": "The paper's cases",
    "random_layouts": "Random layouts",
    "other_cases": "Other cases",
    "scaling": "Scaling",
}
_OWN = [method.name for method in OUR_METHODS]
_PAGE = _FOLDER / "README.md"
_README = _ROOT / "README.md"
_PICTURE = _ROOT / "docs" / "images" / "benchmarks.svg"
_MARK = "<!-- {} of what python -m benchmarks.publish writes -->"

Results = dict[str, Any]


def main() -> int:
    found = {name: load(_FOLDER / f"{name}.json") for name in _RESULTS}
    refused = {name: problems(results) for name, results in found.items() if results}
    for name, why in refused.items():
        for reason in why:
            print(f"{name}: not published: {reason}", file=sys.stderr)
    good = {name: results for name, results in found.items() if results and not refused[name]}
    parts = [_methods(good.values())]
    parts += [_section(title, good[name]) for name, title in _RESULTS.items() if name in good]
    parts += [f"## {_RESULTS[name]}\n\nNot reported: {why[0]}." for name, why in refused.items() if why]
    if (simulated := load(_FOLDER / "planner.json")) is not None:
        parts.append(_planner(simulated))
    replace(_PAGE, _MARK, "\n\n".join(parts))
    print(f"wrote {_PAGE.relative_to(_ROOT)}")
    if "paper_cases" in good:
        chart.draw(good["paper_cases"], _PICTURE)
        replace(_README, _MARK, _summary(good["paper_cases"]))
        print(f"wrote {_PICTURE.relative_to(_ROOT)} and {_README.relative_to(_ROOT)}")
    return 1 if any(refused.values()) or "paper_cases" not in good else 0


def load(path: Path) -> Results | None:
    return json.loads(path.read_text()) if path.exists() else None


def _methods(results: Iterable[Results]) -> str:
    """What each method is. Those that nothing was measured with say so."""
    ran = {m for one in results for case in one["cases"] for m, seconds in case["seconds"].items() if seconds}
    lines = ["## Methods", "", "| method | what it is |", "|---|---|"]
    for name, what, why in [
        *((method.name, method.what, "") for method in METHODS.values()),
        *((peer.name, peer.what, peer.missing()) for peer in PEERS),
    ]:
        note = "" if name in ran else f" ({why or 'not measured here'})"
        lines.append(f"| {name} | {what}{note} |")
    return "\n".join(lines)


def _section(title: str, results: Results) -> str:
    """A results file as Markdown, with its header and a summary."""
    cases = results["cases"]
    methods = [
        name for name in dict.fromkeys(m for case in cases for m in case["seconds"]) if _ran(cases, name)
    ]
    head = ", ".join(f"{k} {v}" for k, v in results["header"].items() if k != "command")
    calibrations = "".join(f"- {calibration_text(found)}\n" for found in results["calibrations"])
    text = f"## {title}\n\n`{results['header']['command']}`: {head}.\n\n{calibrations}\n"
    own = [name for name in methods if name in _OWN]
    others = [name for name in methods if name not in _OWN]
    text += f"{table(cases, own)}\n\n"
    if others:
        text += f"{table(cases, ['auto', *others] if 'auto' in own else others)}\n\n"
    ratios = [value for case in cases if (value := ratio(case, "auto")) is not None]
    if ratios:
        text += f"auto: median {statistics.median(ratios):.3f}, worst {max(ratios):.3f} of the lower bound. "
    apart = [value for case in cases if (value := spread(case, "auto")) is not None]
    if apart:
        text += (
            f"Repeats differ by {statistics.median(apart):.1%} in the median case, {max(apart):.1%} at most."
        )
    unable = {
        (name, why)
        for case in cases
        for name, why in case["not_run"].items()
        if why.startswith("not installed")
    }
    notes = [f"{name}: {why}" for name, why in sorted(unable)]
    notes += [
        *remarks(results),
        *(f"{case}: not measured: {why}" for case, why in results["left_out"].items()),
    ]
    return text.rstrip() + "".join(f"\n- {note}" for note in notes)


def _planner(simulated: Results) -> str:
    head = ", ".join(f"{k} {v}" for k, v in simulated["header"].items() if k != "command")
    text = (
        "## Planner, and plans for more ranks than any test has\n\n"
        f"`python -m benchmarks.planner`: {head}. 1 GiB of bfloat16, hosts of 8 ranks behind 100 Gbit/s. "
        "Times to plan and MiB, the memory that it takes, are measured; times and ratios of the plans are "
        "**predictions of the cost model, nothing was sent**.\n\n"
        f"{planner.table(simulated['rows'])}"
    )
    for name, caption in planner.CAPTIONS.items():
        if name in simulated:  # results of before have none
            text += f"\n\n{caption}:\n\n{planner.table(simulated[name])}"
    return f"{text}\n\n{planner.PUBLISHED}"


def _summary(results: Results) -> str:
    """What the README says: the chart, and how others compare over all cases."""
    cases = results["cases"]
    own = [value for case in cases if (value := ratio(case, "auto")) is not None]
    rows = []
    for method, (label, _) in chart.DRAWN.items():
        times = [
            statistics.median(case["seconds"][method]) / statistics.median(case["seconds"]["auto"])
            for case in cases
            if case["seconds"].get(method) and case["seconds"].get("auto")
        ]
        if times and method != "auto":
            median = statistics.median(times)
            rows.append(f"| {label} | {median:.2f} | {min(times):.2f} to {max(times):.2f} | {len(times)} |")
    head = results["header"]
    text = (
        f"Resharding on an emulated cluster ({head['cores']} cores, links of {head['link_mbit']:g} Mbit/s, "
        f"{len(cases)} cases of arXiv 2211.05322, every byte checked): time over the lower bound, median "
        f"{statistics.median(own):.3f}, worst {max(own):.3f}. [docs/benchmarks.md](docs/benchmarks.md) has "
        "the method, [benchmarks/results](benchmarks/results/README.md) all figures.\n\n"
        "![Time over the lower bound, case by case](docs/images/benchmarks.svg)\n\n"
    )
    return text + "\n".join(
        [
            "| takes longer than meshcast by a factor of | median | range | cases |",
            "|---|---:|---:|---:|",
            *rows,
        ]
    )


def _ran(cases: list[dict[str, Any]], name: str) -> bool:
    return any(case["seconds"].get(name) for case in cases)


if __name__ == "__main__":
    sys.exit(main())
