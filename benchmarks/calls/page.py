"""The tables and the chart of docs/transports.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..harness import Found, Page, new_figure, origin, save_chart, table
from .cases import CARRIERS, PEERS, TRANSPORTS, WAYS, WORLDS, Size, against, carrier_of, is_against, way_of

_CHAINS = "ucx, chains"
_MANY = 16  # ranks, where memory is compared with that of two
_NONE = "-"
_MEASURES = (
    ("latency", "One message after the other"),
    ("stream", "Messages in one direction, up to eight at once"),
)
_FIGURES = ("µs a message", "CPU time of both ranks, µs a message")
_OF_FIGURES = ("time", "CPU time of both ranks")


def text(results: Found) -> str:
    """All tables with their heads. A run of a part has fewer."""
    parts = [_head(results), _key(results["ways"])]
    for transport, title in TRANSPORTS.items():
        ways = [key for key in results["ways"] if transport in way_of(key).transports]
        if any(way_of(key).transports == (transport,) for key in ways):
            parts += [f"### {title}", *_messages(results["sizes"], ways)]
    if "connects" in results:
        carriers = results["carriers"]
        parts += [
            "### Connections and threads",
            "The first exchange of all ranks with all, which connects them, seconds:",
            _connects(results["connects"], carriers),
            "What two ranks have more of after that, and what each further peer adds:",
            _costs(results["connects"], carriers),
            "Private groups of two ranks that idle:",
            _groups(results["groups"]),
        ]
    return "\n\n".join(parts)


def _head(results: Found) -> str:
    head = results["header"]
    said = f"{origin(head)}, {head['peers']}; medians of {head['repeats']} rounds by turns."
    for carrier, why in results["left_out"].items():
        said += f" {CARRIERS[carrier].name} was not measured: {why}."
    return said


def _key(ways: list[str]) -> str:
    lines = {way_of(key).name: [way_of(key).name, way_of(key).what] for key in ways if not is_against(key)}
    return table(["way", "what a message is"], list(lines.values()), "l")


def _messages(rows: list[Found], ways: list[str]) -> list[str]:
    """The tables of one transport."""
    parts = []
    for what, title in _MEASURES:
        here = [key for key in ways if any(key in row[what] for row in rows)]
        for at, figure in enumerate(_FIGURES):
            lines = [[way_of(key).name, *(_shown(row[what].get(key), at) for row in rows)] for key in here]
            parts += [f"{title}, {figure}:", _by_size("", rows, lines)]
        for at, figure in enumerate(_OF_FIGURES):
            parts += _ratios(rows, here, what, at, f"{title}, {figure}")
    return parts


def _shown(found: list[float] | None, at: int) -> str:
    if found is None:
        return _NONE
    micros = found[at] * 1e6
    return f"{micros:.1f}" if micros < 100 else f"{micros:.0f}"


def _by_size(corner: str, rows: list[Found], lines: list[list[str]]) -> str:
    return table([corner, *(Size(row["bytes"]).name for row in rows)], lines)


def _ratios(rows: list[Found], ways: list[str], what: str, at: int, title: str) -> list[str]:
    """Each way of meshcast divided by each peer, the worst size in bold; nothing where no peer is there."""
    lines: list[list[str]] = []
    worst: list[str] = []
    for divided in _divided(ways):
        of_peer: list[tuple[float, str]] = []
        for key, by in divided:
            found = [_ratio(row[what], key, by, at) for row in rows]
            most = max((each for each in found if each is not None), default=None)
            if most is None:
                continue
            name, divisor = way_of(key).name, way_of(by).name
            size = Size(rows[found.index(most)]["bytes"]).name
            of_peer.append((most, f"{most:.2f} of {divisor} ({name}, {size})"))
            lines.append([f"{name} / {divisor}", *(_cell(each, most) for each in found)])
        worst += [max(of_peer)[1]] if of_peer else []
    if not lines:
        return []
    return [f"{title}, over that of a peer:", _by_size("", rows, lines), f"Worst: {', '.join(worst)}."]


def _divided(ways: list[str]) -> list[list[tuple[str, str]]]:
    """Which way by which, for each peer: those by which messages travel, except the second choice. Last this
    tree's by another's."""
    compared = [key for key in ways if way_of(key).carrier in TRANSPORTS and not way_of(key).local]
    found: list[list[tuple[str, str | None]]] = [
        [(key, _divisor(key, keys)) for key in compared] for keys in PEERS
    ]
    found.append([(key, against(key)) for key in ways])
    return [[(key, by) for key, by in each if by is not None and by in ways] for each in found]


def _divisor(key: str, keys: tuple[str, ...]) -> str | None:
    """Of a peer's ways over the same transport the one that also makes new tensors, or also does not; the
    only one in any case."""
    way = way_of(key)
    there = [each for each in keys if set(way.transports) <= set(way_of(each).transports)]
    same = [each for each in there if way_of(each).fresh == way.fresh]
    return next(iter(same if len(there) > 1 else there), None)


def _ratio(found: Found, key: str, divisor: str, at: int) -> float | None:
    if key not in found or divisor not in found:
        return None
    return float(found[key][at] / found[divisor][at])


def _cell(ratio: float | None, most: float) -> str:
    if ratio is None:
        return _NONE
    return f"**{ratio:.2f}**" if ratio == most else f"{ratio:.2f}"


def _connects(rows: list[Found], carriers: list[str]) -> str:
    reasons: dict[str, str] = {}

    def cell(row: Found, kind: str) -> str:
        found = row["first"][kind]
        if isinstance(found, str):
            return reasons.setdefault(found, "*" * (len(reasons) + 1)).replace("*", r"\*")
        return f"{found:.2f}" if found >= 0.01 else f"{found:.4f}"

    kinds = [*carriers, _CHAINS]
    names = [*(CARRIERS[carrier].name for carrier in carriers), f"{CARRIERS['ucx'].name}, to replicas"]
    lines = [[str(row["world"]), *(cell(row, kind) for kind in kinds)] for row in rows]
    notes = [f"{mark.replace('*', chr(92) + '*')} {why}" for why, mark in reasons.items()]
    return "\n\n".join([table(["ranks", *names], lines, "r"), *notes])


def _costs(rows: list[Found], carriers: list[str]) -> str:
    """Memory by peer is the difference between two worlds, so that libraries do not count."""
    by_world = {row["world"]: row for row in rows}
    few, many = by_world[2], by_world[_MANY]

    def at_first(what: str, carrier: str, unit: float) -> str:
        return f"{few[what][carrier] / unit:.1f}" if carrier in few[what] else _NONE

    def per_peer(what: str, carrier: str, unit: float) -> str:
        if carrier not in few[what] or carrier not in many[what]:
            return _NONE
        return f"{(many[what][carrier] - few[what][carrier]) / (_MANY - 2) / unit:.1f}"

    lines = [
        [
            CARRIERS[carrier].name,
            at_first("threads", carrier, 1),
            per_peer("threads", carrier, 1),
            at_first("memory", carrier, 1 << 20),
            per_peer("memory", carrier, 1 << 10),
        ]
        for carrier in carriers
    ]
    return table(["", "threads", "threads a peer", "MiB", "KiB a peer"], lines)


def _groups(rows: list[Found]) -> str:
    lines = [
        [CARRIERS[row["way"]].name, str(row["groups"])]
        + (
            [row["failed"], _NONE, _NONE]
            if "failed" in row
            else [str(row["threads"]), str(row["ours"]), f"{row['idle']:.3%}"]
        )
        for row in rows
    ]
    return table(["", "groups", "more threads", "of them ours", "idle, of a core"], lines)


_GIB = 1 << 30
_DRAWN = [key for key, way in WAYS.items() if way.colour]
_MARKERS = dict(zip(_DRAWN, "osD^v<>P", strict=True))


def draw(results: Found, path: Path) -> None:
    figure = new_figure(12, 8)
    (latency, rate), (cpu, connect) = figure.subplots(2, 2)
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
            axes.plot(nbytes, values, label=_legend(key), **_look(key))
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
    handles, labels = latency.get_legend_handles_labels()
    figure.legend(handles, labels, ncols=(len(labels) + 1) // 2, loc="lower center", frameon=False)
    figure.suptitle(f"Messages between processes of one machine, {results['header']['cores']} cores")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    save_chart(figure, path)


def _legend(key: str) -> str:
    """In a legend, which has no table's title: what carries the messages, and of meshcast's a Resharder."""
    return CARRIERS[carrier_of(key)].name


def _look(key: str) -> dict[str, Any]:
    return {"color": way_of(key).colour, "marker": _MARKERS[key], "markersize": 5}


PAGE = Page("calls", "calls.json", "docs/transports.md", text, {"docs/images/transports.svg": draw})
PAGES = [PAGE]
