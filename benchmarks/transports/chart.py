"""The chart of docs/transports.md: latency, rate and CPU time by size, time to connect by ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from .cases import CARRIERS, WAYS, WORLDS, Size, carrier_of, way_of

__all__ = ["draw"]

Found = dict[str, Any]
_GIB = 1 << 30
_DRAWN = [key for key, way in WAYS.items() if way.colour]
_MARKERS = dict(zip(_DRAWN, "osD^v<>P", strict=True))


def draw(results: Found, path: Path) -> None:
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "meshcast"  # the same picture for the same figures
    figure, ((latency, rate), (cpu, connect)) = plt.subplots(2, 2, figsize=(12, 8))
    sizes = results["sizes"]
    rows = {
        latency: ("latency", lambda _, seconds, __: seconds * 1e6),
        rate: ("stream", lambda nbytes, seconds, _: nbytes / seconds / 1e9),
        cpu: ("stream", lambda nbytes, _, cpu: cpu / nbytes * _GIB),
    }
    nbytes = [row["bytes"] for row in sizes]
    drawn = [key for key in _DRAWN if key in results["ways"]]
    for axes, (what, value) in rows.items():
        for key in drawn:
            values = [value(row["bytes"], *row[what][key]) for row in sizes]
            axes.plot(nbytes, values, label=_name(key), **_look(key))
        axes.set_xscale("log", base=2)
        axes.set_xticks(nbytes, [Size(each).name for each in nbytes], rotation=30, ha="right")
        axes.set_xlabel("message size")
    latency.set_yscale("log")
    latency.set(title="One message after the other", ylabel="time of a message, µs (log)")
    rate.set(title="Up to eight messages in flight", ylabel="rate, GB/s", ylim=(0, None))
    cpu.set_yscale("log")
    cpu.set(title="What that costs", ylabel="CPU time of both, s per GiB (log)")
    for key in drawn:
        carrier = carrier_of(key)
        if carrier not in WORLDS:
            continue
        found = [(row["world"], row["first"][carrier]) for row in results["connects"]]
        found = [(world, seconds) for world, seconds in found if not isinstance(seconds, str)]
        connect.plot(*zip(*found, strict=True), **_look(key)) if found else None
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
    figure.legend(handles, labels, ncols=(len(labels) + 1) // 2, loc="lower center", frameon=False)
    figure.suptitle(f"Messages between processes of one machine, {results['header']['cores']} cores")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _name(key: str) -> str:
    """In a legend, which has no table's title: what carries the messages, and of meshcast's a Resharder."""
    return CARRIERS[carrier_of(key)].name


def _look(key: str) -> dict[str, Any]:
    return {"color": way_of(key).colour, "marker": _MARKERS[key], "markersize": 5}
