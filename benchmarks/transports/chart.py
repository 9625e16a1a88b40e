"""The chart of docs/transports.md: latency, rate and CPU time by size, time to connect by ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from .cases import WAYS, Size
from .page import GIB

__all__ = ["draw"]

Found = dict[str, Any]
_MARKERS = dict(zip(WAYS, "osD^v", strict=True))


def draw(results: Found, path: Path) -> None:
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "meshcast"  # the same picture for the same figures
    figure, ((latency, rate), (cpu, connect)) = plt.subplots(2, 2, figsize=(12, 8))
    sizes = results["sizes"]
    nbytes = [row["bytes"] for row in sizes]
    rows = {
        latency: lambda row, way: row["latency"][way][0] * 1e6,
        rate: lambda row, way: row["bytes"] / row["stream"][way][0] / 1e9,
        cpu: lambda row, way: row["stream"][way][1] / row["bytes"] * GIB,
    }
    for axes, value in rows.items():
        for way in results["ways"]:
            axes.plot(nbytes, [value(row, way) for row in sizes], **_look(way))
        axes.set_xscale("log", base=2)
        axes.set_xticks(nbytes, [Size(each).name for each in nbytes], rotation=30, ha="right")
        axes.set_xlabel("message size")
    latency.set_yscale("log")
    latency.set(title="One message after the other", ylabel="time of a message, µs (log)")
    rate.set(title="Up to eight messages in flight", ylabel="rate, GB/s", ylim=(0, None))
    cpu.set_yscale("log")
    cpu.set(title="What that costs", ylabel="CPU time of both, s per GiB (log)")
    for way in results["ways"]:
        found = [(row["world"], row["first"][way]) for row in results["connects"]]
        found = [(world, seconds) for world, seconds in found if not isinstance(seconds, str)]
        connect.plot(*zip(*found, strict=True), **_look(way)) if found else None
    connect.set_xscale("log", base=2)
    connect.set_yscale("log")
    worlds = [row["world"] for row in results["connects"]]
    connect.set_xticks(worlds, [str(world) for world in worlds])
    connect.set(title="First exchange of all ranks with all", xlabel="ranks", ylabel="time, s (log)")
    for axes in (latency, rate, cpu, connect):
        axes.grid(alpha=0.3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    handles, labels = latency.get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(labels), loc="lower center", frameon=False)
    figure.suptitle(f"Messages between processes over loopback TCP, {results['header']['cores']} cores")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _look(way: str) -> dict[str, Any]:
    known = WAYS[way]
    return {"color": known.colour, "label": known.name, "marker": _MARKERS[way], "markersize": 5}
