"""The chart of the README and the tables of benchmarks/results/README.md, from the raw results. Results
that must not be reported are named with the reason, and not shown."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meshcast.bench.methods import METHODS, OUR_METHODS
from meshcast.bench.report import calibration_text, problems, ratio, remarks, spread, table

from .. import planner
from ..harness import RESULTS, ROOT, Found, command, load, new_figure, pack, replace, save_chart
from ..peers.programs import PEERS

_TITLES = {
    "paper_cases": "The paper's cases",
    "random_layouts": "Random layouts",
    "other_cases": "Other cases",
    "scaling": "Scaling",
}
_OWN = [method.name for method in OUR_METHODS]
_PAGE = RESULTS / "README.md"
_README = ROOT / "README.md"
_PICTURE = ROOT / "docs" / "images" / "benchmarks.svg"
DRAWN = {
    "auto": ("meshcast (auto)", "#1f5fa8"),
    "Open MPI pipeline": ("Open MPI, pipelined broadcast forced", "#b07aa1"),
    "M2N plan": ("NCCL M2N's plan, same transport", "#76b7b2"),
    "NeMo-RL plan": ("NeMo-RL's plan, same transport", "#59a14f"),
    "DTensor parent mesh": ("DTensor over a parent mesh, gloo", "#edc948"),
    "gloo gather+broadcast": ("gather and broadcast, gloo", "#e15759"),
    "gloo unicasts": ("one message per receiver, gloo", "#f28e2b"),
    "Open MPI bcast": ("Open MPI broadcast", "#9c755f"),
}
"""Method: label and colour, in the order of the bars."""


def publish(folder: Path = RESULTS) -> int:
    """Compresses what is large in the folder of results, and makes the pages of all of them."""
    for path in sorted(folder.glob("*.json")):
        pack(path)
    found = {name: load(folder / f"{name}.json") for name in _TITLES}
    refused = {name: problems(results) for name, results in found.items() if results}
    for name, why in refused.items():
        for reason in why:
            print(f"{name}: not published: {reason}", file=sys.stderr)
    good = {name: results for name, results in found.items() if results and not refused[name]}
    parts = [_methods(good.values())]
    parts += [_section(title, good[name]) for name, title in _TITLES.items() if name in good]
    parts += [f"## {_TITLES[name]}\n\nNot reported: {why[0]}." for name, why in refused.items() if why]
    if (simulated := load(folder / "planner.json")) is not None:
        parts.append(_planner(simulated))
    replace(_PAGE, "reshard", "\n\n".join(parts))
    if "paper_cases" in good:
        draw(good["paper_cases"], _PICTURE)
        replace(_README, "reshard", _summary(good["paper_cases"]))
    print(f"wrote {_PAGE}, {_PICTURE} and {_README}")
    return 1 if any(refused.values()) or "paper_cases" not in good else 0


def _methods(results: Iterable[Found]) -> str:
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


def _section(title: str, results: Found) -> str:
    """A results file as Markdown, with its header and a summary."""
    cases = results["cases"]
    methods = [
        name for name in dict.fromkeys(m for case in cases for m in case["seconds"]) if _ran(cases, name)
    ]
    head = ", ".join(f"{k} {v}" for k, v in results["header"].items() if k != "command")
    calibrations = "".join(f"- {calibration_text(found)}\n" for found in results["calibrations"])
    text = f"## {title}\n\n`{command(results['header'])}`: {head}.\n\n{calibrations}\n"
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


def _planner(simulated: Found) -> str:
    head = ", ".join(f"{k} {v}" for k, v in simulated["header"].items() if k != "command")
    text = (
        "## Planner, and plans for more ranks than any test has\n\n"
        f"`python -m benchmarks planner`: {head}. 1 GiB of bfloat16, hosts of 8 ranks behind 100 Gbit/s. "
        "Times to plan and MiB, the memory that it takes, are measured; times and ratios of the plans are "
        "**predictions of the cost model, nothing was sent**.\n\n"
        f"{planner.tables(simulated['rows'])}"
    )
    for name, caption in planner.CAPTIONS.items():
        if name in simulated:  # results of before have none
            text += f"\n\n{caption}:\n\n{planner.tables(simulated[name])}"
    return f"{text}\n\n{planner.PUBLISHED}"


def _summary(results: Found) -> str:
    """What the README says: the chart, and how others compare over all cases."""
    cases = results["cases"]
    own = [value for case in cases if (value := ratio(case, "auto")) is not None]
    rows = []
    for method, (label, _) in DRAWN.items():
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


def draw(results: Found, path: Path) -> None:
    cases = [case for case in results["cases"] if case["name"] != "n-to-m 8"]  # the same as case 7
    figure = new_figure(12, 5.2)
    axes = figure.subplots()
    drawn = {method: look for method, look in DRAWN.items() if any(ratio(c, method) for c in cases)}
    width = 0.84 / max(len(drawn), 1)
    for index, (method, (label, colour)) in enumerate(drawn.items()):
        places = [number - 0.42 + width * (index + 0.5) for number in range(len(cases))]
        axes.bar(places, [ratio(case, method) or 0 for case in cases], width, color=colour, label=label)
    axes.axhline(1, color="black", linewidth=1, linestyle="--")
    axes.text(len(cases) - 0.4, 1, "lower bound", ha="left", va="center", fontsize=8)
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axes.set_ylim(0.9, 24)
    axes.set_xlim(-0.6, len(cases) - 0.4)
    names = [case["name"].replace("n-to-m ", "case ") for case in cases]
    axes.set_xticks(range(len(cases)), names, rotation=40, ha="right")
    axes.set_ylabel("time / lower bound")
    axes.set_title(
        f"Moving a sharded tensor between meshes, 4 ranks per host, {results['header']['link_mbit']:g} "
        "Mbit/s links (emulated); no bar: cannot do it", fontsize=10,
    )  # fmt: skip
    axes.legend(ncols=4, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    figure.tight_layout()
    save_chart(figure, path)
