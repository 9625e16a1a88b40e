"""python -m benchmarks.publish: draws docs/images/benchmarks.svg and writes the tables of docs/benchmarks.md
from the raw results."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from meshcast.bench.report import calibration_text, ratio, table

_ROOT = Path(__file__).resolve().parent.parent
_RESULTS = {"paper_cases": "The paper's cases", "random_layouts": "Random layouts"}
_PAGE = _ROOT / "docs" / "benchmarks.md"
_PICTURE = _ROOT / "docs" / "images" / "benchmarks.svg"
_MARK = "<!-- {} of the tables, written by python -m benchmarks.publish -->"
_DRAWN = {
    "auto": ("meshcast (auto)", "#1f5fa8"),
    "gloo stripes": ("stripes + all_gather, gloo", "#59a14f"),
    "Open MPI pipeline": ("Open MPI, pipelined broadcast", "#b07aa1"),
    "gloo unicasts": ("one message per receiver, gloo", "#f28e2b"),
    "Open MPI bcast": ("Open MPI broadcast", "#9c755f"),
}


def draw(results: dict[str, Any], path: Path) -> None:
    """Time over the lower bound, per case, ours and the peers'."""
    mpl.rcParams["svg.hashsalt"] = "meshcast"  # the same picture for the same figures
    cases = [case for case in results["cases"] if case["name"] != "n-to-m 8"]  # the same as case 7
    figure, axes = plt.subplots(figsize=(11, 4.2))
    drawn = {method: look for method, look in _DRAWN.items() if any(ratio(c, method) for c in cases)}
    width = 0.8 / max(len(drawn), 1)
    for index, (method, (label, colour)) in enumerate(drawn.items()):
        places = [number - 0.4 + width * (index + 0.5) for number in range(len(cases))]
        axes.bar(places, [ratio(case, method) or 0 for case in cases], width, color=colour, label=label)
    axes.axhline(1, color="black", linewidth=1, linestyle="--")
    axes.text(len(cases) - 0.5, 1.03, "lower bound", ha="right", va="bottom", fontsize=8)
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.set_ylim(0.9, 10.5)
    axes.set_xlim(-0.6, len(cases) - 0.4)
    names = [case["name"].replace("n-to-m ", "case ") for case in cases]
    axes.set_xticks(range(len(cases)), names, rotation=40, ha="right")
    axes.set_ylabel("time / lower bound")
    head = results["header"]
    axes.set_title(
        f"Moving a sharded tensor between meshes, {head['ranks_per_host']} ranks per host, "
        f"{head['link_mbit'][0]:g} Mbit/s links (emulated)", fontsize=10,
    )  # fmt: skip
    axes.legend(ncols=3, fontsize=8, frameon=False, loc="upper left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def tables() -> str:
    """Every results file that is there, as Markdown, with its header and a summary."""
    parts = []
    for name, title in _RESULTS.items():
        path = Path(__file__).with_name("results") / f"{name}.json"
        if not path.exists():
            parts.append(f"## {title}\n\nNot measured yet.")
            continue
        results = json.loads(path.read_text())
        methods = [m for m in results["cases"][0]["seconds"] if m in _methods(results)]
        ratios = [ratio(case, "auto") or 0 for case in results["cases"]]
        head = ", ".join(f"{k} {v}" for k, v in results["header"].items() if k != "command")
        parts.append(
            f"## {title}\n\n`{results['header']['command']}`\n\n{head}; {calibration_text(results)}.\n\n"
            f"{table(results['cases'], methods)}\n\n"
            f"auto: median {statistics.median(ratios):.3f}, worst {max(ratios):.3f} of the lower bound."
        )
    return "\n\n".join(parts)


def _methods(results: dict[str, Any]) -> set[str]:
    return {method for case in results["cases"] for method, seconds in case["seconds"].items() if seconds}


def main() -> int:
    text = _PAGE.read_text()
    begin, end = _MARK.format("Begin"), _MARK.format("End")
    before, after = text.split(begin)[0], text.split(end)[1]
    _PAGE.write_text(f"{before}{begin}\n\n{tables()}\n\n{end}{after}")
    draw(json.loads((Path(__file__).with_name("results") / "paper_cases.json").read_text()), _PICTURE)
    print(f"wrote {_PAGE.relative_to(_ROOT)} and {_PICTURE.relative_to(_ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
