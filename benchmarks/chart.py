"""The chart of the README: time over the lower bound, per case, ours and others'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from meshcast.bench.report import ratio

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


def draw(results: dict[str, Any], path: Path) -> None:
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "meshcast"  # the same picture for the same figures
    cases = [case for case in results["cases"] if case["name"] != "n-to-m 8"]  # the same as case 7
    figure, axes = plt.subplots(figsize=(12, 5.2))
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
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
