"""python -m benchmarks.e2e.curves FOLDER: the loss curves of tests/multiproc/test_training_curves.py, which
leaves them in the folder that MESHCAST_CURVES names, laid over each other, with a table of how far they are
from one process. Writes both into docs/end_to_end.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from ..machine import ROOT
from ..page import replace

_PAGE = ROOT / "docs" / "end_to_end.md"
_PICTURE = ROOT / "docs" / "images" / "training_curves.svg"
_MARK = "<!-- {} of what python -m benchmarks.e2e.curves writes -->"
_NAMES = {"gpt": "GPT", "unet": "U-Transformer"}
_COLOURS = ("#1f5fa8", "#f28e2b", "#44aa99", "#e15759", "#b07aa1", "#9c755f")
_LEAST = 1e-9  # what is less has no place on a logarithmic axis
_ALLOWED = 1e-4

Curves = dict[str, list[dict[str, Any]]]  # of each model


def load(folder: Path) -> Curves:
    """One process first. Raises SystemExit where one is missing."""
    curves: Curves = {name: [] for name in _NAMES}
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


def table(curves: Curves) -> str:
    lines = ["| model | layout | loss, first to last | largest relative difference |", "|---|---|---|---:|"]
    for name, (reference, *others) in curves.items():
        for curve in (reference, *others):
            first, last = curve["losses"][0], curve["losses"][-1]
            layout = "one process" if curve is reference else f"`--stages {curve['layout']}`"
            apart = "" if curve is reference else f"{max(differences(curve, reference)):.1e}"
            lines.append(f"| {_NAMES[name]} | {layout} | {first:.5f} to {last:.5f} | {apart} |")
    return "\n".join(lines)


def draw(curves: Curves, path: Path) -> None:
    """Above the losses of all layouts, below how far each is from one process."""
    mpl.rcParams["svg.hashsalt"] = "meshcast"  # the same picture for the same figures
    figure = Figure(figsize=(11, 6), layout="constrained")
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
        above.set_title(f"{_NAMES[name]}: stages, schedule, micro-batches", fontsize=10)
        above.set_ylabel("loss")
        above.legend(frameon=False, fontsize=8)
        below.axhline(_ALLOWED, color="black", linewidth=0.8, linestyle="--")
        below.set_yscale("log")
        below.set_ylim(_LEAST / 2, 3 * _ALLOWED)
        below.set_xlabel("step")
        below.set_ylabel("relative difference")
        for axes in (above, below):
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    curves = load(Path(sys.argv[1]))
    draw(curves, _PICTURE)
    replace(_PAGE, _MARK, f"{table(curves)}\n\n![Losses over each other](images/{_PICTURE.name})")
    print(f"wrote {_PICTURE.relative_to(ROOT)} and docs/end_to_end.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
