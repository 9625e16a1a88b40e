"""Measures way by way in rounds, in an order that changes, and takes medians."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from meshcast.base.progress import track

from ..machine import ROOT
from .cases import CONNECTS, GROUPS, Size, carrier_of, way_of
from .pair import Pair, environment, open_mpi
from .worlds import EACH

__all__ = ["Found", "QUOTIENT", "Started", "connects", "idle_groups", "messages", "quotients"]

Found = dict[str, Any]
_SECONDS = 0.05  # of one figure in one round, about
_OFTEN = 16  # ranks; larger worlds take seconds to start, so each is measured once
QUOTIENT = ("ucx/Resharder", "torch/gloo")
"""The ways that quotients() divides."""
_LIMIT = 90.0  # seconds for a world of MPI
_MOST = 30.0  # seconds; a way that needs more to connect is not tried with more ranks


def messages(
    pairs: Mapping[str, Pair], ways: Sequence[str], sizes: Iterable[Size], repeats: int
) -> list[Found]:
    """By size: {"bytes", "latency": {way: [seconds, CPU seconds]}, "stream": likewise}, of one message.

    Args:
        pairs: by carrier.
        ways: their keys.
    """
    rows = []
    for size in track(list(sizes), "sizes of messages"):
        figures = []
        for way in ways:
            pair, kind = pairs[carrier_of(way)], way_of(way).kind
            pair.check(kind, size)
            measures = {"latency": pair.latency}
            if not way_of(way).latency_only:
                measures["stream"] = pair.stream
            for what, measure in measures.items():
                take = partial(measure, kind, size)
                figures.append((what, way, take, _count(take, 2 if what == "latency" else size.window)))
        taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for turn in range(repeats):
            for what, way, take, count in random.Random(turn).sample(figures, len(figures)):
                taken.setdefault((what, way), []).append(take(count))
        row: Found = {"bytes": size.nbytes, "latency": {}, "stream": {}}
        for what, way, _, _ in figures:
            row[what][way] = [statistics.median(values) for values in zip(*taken[what, way], strict=True)]
        rows.append(row)
    return rows


def _count(take: Callable[[int], tuple[float, float]], messages: int) -> int:
    """How often a round repeats so many messages to take _SECONDS."""
    count = 1
    for part in (0.01, 0.1, 1):
        each = take(count)[0] * messages
        if each >= _SECONDS:
            return 1
        count = max(1, round(part * _SECONDS / each))
    return count


def quotients(rows: list[Found]) -> dict[str, float]:
    """By size, seconds of one message of a Resharder over UCX after another and CPU seconds of one of many,
    over torch's."""
    ours, theirs = QUOTIENT
    found = {}
    for row in rows:
        name = Size(row["bytes"]).name
        for what, measure, at in (("latency", "latency", 0), ("CPU time", "stream", 1)):
            found[f"{name}, {what}"] = row[measure][ours][at] / row[measure][theirs][at]
    return found


class Started:
    """Servers of worlds, one for each interpreter, and mpirun."""

    def __init__(self, pythons: dict[str, str]) -> None:
        """pythons: the interpreter of each carrier."""
        self._pythons = pythons
        self._servers: dict[str, subprocess.Popen[str]] = {}

    def run(self, carrier: str, world: int, groups: int = 1, target: str = "columns") -> Found:
        """What a world found (worlds.py, mpi_messages.c), or {"failed": why}."""
        if carrier == "mpi":
            return _mpi(world)
        python = self._pythons[carrier]
        if python not in self._servers:
            # The variables of a carrier are set in its ranks: the server of one interpreter has several.
            self._servers[python] = subprocess.Popen(
                [python, "-m", "benchmarks.transports.worlds"], cwd=ROOT, env=environment(""), text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        server = self._servers[python]
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"{carrier} {world} {groups} {target}\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    def close(self) -> None:
        for server in self._servers.values():
            server.communicate()  # ends its input


def _mpi(world: int) -> Found:
    try:
        done = subprocess.run(
            open_mpi(world, "mpi", "world", str(EACH)), env=environment("mpi"), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=_LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": f"not done within {_LIMIT:.0f} s"}
    return json.loads(done.stdout) if done.returncode == 0 else {"failed": done.stderr[-400:]}


def connects(
    run: Callable[..., Found], carriers: list[str], repeats: int, worlds: Iterable[int] = CONNECTS
) -> list[Found]:
    """By number of ranks: {"world", "first": {carrier: seconds}, "threads", "memory"}. A failure is a text in
    place of the seconds. "ucx, chains" is the carrier "ucx" where the target is replicas."""
    kinds = {**{carrier: (carrier, "columns") for carrier in carriers}, "ucx, chains": ("ucx", "replicas")}
    rows: list[Found] = []
    over: dict[str, str] = {}
    for world in track(list(worlds), "numbers of ranks"):
        taken: dict[str, list[Found]] = {}
        for turn in range(repeats if world <= _OFTEN else 1):
            for kind in random.Random(turn).sample(list(kinds), len(kinds)):
                if kind not in over:
                    carrier, target = kinds[kind]
                    found = run(carrier, world, target=target)
                    taken.setdefault(kind, []).append(found)
                    if "failed" in found:
                        over[kind] = found["failed"]
        row: Found = {"world": world, "first": {}, "threads": {}, "memory": {}}
        for kind in kinds:
            row["first"][kind] = over.get(kind)
            if kind not in over:
                for what in ("first", "threads", "memory"):
                    row[what][kind] = statistics.median(found[what] for found in taken[kind])
                if row["first"][kind] > _MOST:
                    over[kind] = f"took over {_MOST:.0f} s with fewer ranks"
        rows.append(row)
    return rows


def idle_groups(run: Callable[..., Found], counts: Iterable[int] = GROUPS) -> list[Found]:
    """Private groups of two ranks that idle, over each transport: {"way", "groups", "threads", "ours",
    "idle"}, or "failed"."""
    cases = [(carrier, count) for count in counts for carrier in ("ucx", "gloo")]
    return [
        {"way": carrier, "groups": count} | run(carrier, 2, count)
        for carrier, count in track(cases, "idle groups")
    ]
