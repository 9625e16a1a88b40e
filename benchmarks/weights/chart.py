"""The chart of docs/end_to_end.md: seconds until every server has a version, by way."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

__all__ = ["draw"]

Found = dict[str, Any]
_LOOK = {  # way: label and colour, from above
    "two buffers": ("WeightSync, two buffers", "#1f5fa8"),
    "one buffer": ("WeightSync, one buffer", "#5b9bd5"),
    "two buffers, digest": ("WeightSync, with digests", "#76b7b2"),
    "Megatron plan": ("Megatron's plan, same transport", "#f28e2b"),
    "NeMo-RL plan": ("NeMo-RL's plan, same transport", "#59a14f"),
    "broadcast": ("full_tensor() and broadcast", "#e15759"),
    "files": ("torch.distributed.checkpoint\n(files in shared memory, no network)", "#9c755f"),
}


def draw(results: Found, path: Path) -> None:
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "meshcast"  # the same picture for the same figures
    models = results["models"]
    figure, all_axes = plt.subplots(1, len(models), figsize=(6 * len(models), 4.2), squeeze=False)
    for axes, model in zip(all_axes[0], models, strict=True):
        ways = [way for way in _LOOK if way in model["ways"]]
        places = range(len(ways))
        later = [statistics.median(model["ways"][way]["seconds"]) for way in ways]
        axes.barh(places, later, color=[_LOOK[way][1] for way in ways])
        first = [model["ways"][way]["first"] for way in ways]
        axes.plot(first, places, "k|", markersize=14, label="first call")
        axes.axvline(model["bound"], color="black", linewidth=1, linestyle="--", label="lower bound")
        for place, seconds, other in zip(places, later, first, strict=True):
            axes.annotate(f"{seconds:.1f} s", (max(seconds, other, model["bound"]), place), (6, 0),
                          textcoords="offset points", va="center", fontsize=8)  # fmt: skip
        axes.set_yticks(places, [_LOOK[way][0] for way in ways])
        axes.invert_yaxis()
        axes.set(xlabel="time until all servers have it, s", xlim=(0, 1.2 * max(*later, *first)))
        axes.set_title(f"{model['name'].capitalize()}, {model['nbytes'] / 2**20:.0f} MiB", fontsize=10)
        axes.legend(frameon=False, fontsize=8, loc="lower right")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(
        "A version of the weights, 4 trainers to 4 servers on 4 hosts, "
        f"{results['header']['link_mbit']:g} Mbit/s links (emulated)", fontsize=11,
    )  # fmt: skip
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
