"""The tables of docs/transports.md."""

from __future__ import annotations

from typing import Any

from .cases import WAYS, Size

__all__ = ["GIB", "text"]

GIB = 1 << 30
Found = dict[str, Any]
_CHAINS = "ucx, chains"
_MANY = 16  # ranks, where memory is compared with that of two
_NONE = "-"


def text(results: Found) -> str:
    """All tables with their heads."""
    ways = results["ways"]
    parts = [
        _head(results),
        "One message after the other, microseconds each:",
        _by_size(results, ways, "latency", lambda _, seconds, __: f"{seconds * 1e6:.0f}"),
        "Messages in one direction, up to eight at once, GB/s:",
        _by_size(results, ways, "stream", lambda nbytes, seconds, _: f"{nbytes / seconds / 1e9:.2f}"),
        "CPU time of both ranks for them, seconds per GiB:",
        _by_size(results, ways, "stream", lambda nbytes, _, cpu: f"{cpu / nbytes * GIB:.2f}"),
        "The first exchange of all ranks with all, which connects them, seconds:",
        _connects(results["connects"], ways),
        "What two ranks have more of after that, and what each further peer adds:",
        _costs(results["connects"], ways),
        "Private groups of two ranks that idle:",
        _groups(results["groups"]),
    ]
    return "\n\n".join(parts)


def table(head: list[str], rows: list[list[str]], words: int = 1) -> str:
    """words: of the first columns, which hold no figures."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    lines = ["| " + " | ".join(row) + " |" for row in [head, *rows]]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])


def _head(results: Found) -> str:
    head = results["header"]
    said = (
        f"`{head['command']}`: commit {head['commit']}, {head['cores']} cores, kernel {head['kernel']}, "
        f"torch {head['torch']}, {head['peers']}; medians of {head['repeats']} rounds by turns."
    )
    for way, why in results["left_out"].items():
        said += f" {WAYS[way].name} was not measured: {why}."
    return said


def _by_size(results: Found, ways: list[str], what: str, cell: Any) -> str:
    rows = [
        [Size(row["bytes"]).name, *(cell(row["bytes"], *row[what][way]) for way in ways)]
        for row in results["sizes"]
    ]
    return table(["size", *(WAYS[way].name for way in ways)], rows, 0)


def _connects(rows: list[Found], ways: list[str]) -> str:
    reasons: dict[str, str] = {}

    def cell(row: Found, kind: str) -> str:
        found = row["first"][kind]
        if isinstance(found, str):
            return reasons.setdefault(found, "*" * (len(reasons) + 1)).replace("*", r"\*")
        return f"{found:.2f}" if found >= 0.01 else f"{found:.4f}"

    kinds = [*ways, _CHAINS]
    names = [*(WAYS[way].name for way in ways), f"{WAYS['ucx'].name}, to replicas"]
    lines = [[str(row["world"]), *(cell(row, kind) for kind in kinds)] for row in rows]
    notes = [f"{mark.replace('*', chr(92) + '*')} {why}" for why, mark in reasons.items()]
    return "\n\n".join([table(["ranks", *names], lines, 0), *notes])


def _costs(rows: list[Found], ways: list[str]) -> str:
    """Memory by peer is the difference between two worlds, so that libraries do not count."""
    by_world = {row["world"]: row for row in rows}
    few, many = by_world[2], by_world[_MANY]

    def at_first(what: str, way: str, unit: float) -> str:
        return f"{few[what][way] / unit:.1f}" if way in few[what] else _NONE

    def per_peer(what: str, way: str, unit: float) -> str:
        if way not in few[what] or way not in many[what]:
            return _NONE
        return f"{(many[what][way] - few[what][way]) / (_MANY - 2) / unit:.1f}"

    lines = [
        [
            WAYS[way].name,
            at_first("threads", way, 1),
            per_peer("threads", way, 1),
            at_first("memory", way, 1 << 20),
            per_peer("memory", way, 1 << 10),
        ]
        for way in ways
    ]
    return table(["", "threads", "threads a peer", "MiB", "KiB a peer"], lines)


def _groups(rows: list[Found]) -> str:
    lines = [
        [WAYS[row["way"]].name, str(row["groups"])]
        + (
            [row["failed"], _NONE, _NONE]
            if "failed" in row
            else [str(row["threads"]), str(row["ours"]), f"{row['idle']:.3%}"]
        )
        for row in rows
    ]
    return table(["", "groups", "more threads", "of them ours", "idle, of a core"], lines)
