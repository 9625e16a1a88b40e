"""Measures way by way in rounds, in an order that changes, and takes medians."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
from collections.abc import Callable, Iterable
from typing import Any

from meshcast.base.progress import track

from ..machine import ROOT
from .cases import CONNECTS, GROUPS, Size
from .pair import Pair, environment, open_mpi
from .worlds import EACH

__all__ = ["Found", "Started", "connects", "idle_groups", "messages", "quotients"]

Found = dict[str, Any]
_OFTEN = 16  # ranks; larger worlds take seconds to start, so each is measured once
_LIMIT = 90.0  # seconds for a world of MPI
_MOST = 30.0  # seconds; a way that needs more to connect is not tried with more ranks


def messages(pairs: list[Pair], sizes: Iterable[Size], repeats: int) -> list[Found]:
    """By size: {"bytes", "latency": {way: [seconds, CPU seconds]}, "stream": likewise}, of one message."""
    rows = []
    for size in track(list(sizes), "sizes of messages"):
        for pair in pairs:
            pair.check(size)
        taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for turn in range(repeats):
            for pair in random.Random(turn).sample(pairs, len(pairs)):
                taken.setdefault(("latency", pair.way), []).append(pair.latency(size))
                taken.setdefault(("stream", pair.way), []).append(pair.stream(size))
        row: Found = {"bytes": size.nbytes, "latency": {}, "stream": {}}
        for (what, way), found in taken.items():
            row[what][way] = [statistics.median(values) for values in zip(*found, strict=True)]
        rows.append(row)
    return rows


def quotients(rows: list[Found]) -> dict[str, float]:
    """By size, seconds of one message over UCX after another and CPU seconds of one of many, over torch's."""
    found = {}
    for row in rows:
        name = Size(row["bytes"]).name
        found[f"{name}, latency"] = row["latency"]["ucx"][0] / row["latency"]["torch"][0]
        found[f"{name}, CPU time"] = row["stream"]["ucx"][1] / row["stream"]["torch"][1]
    return found


class Started:
    """Servers of worlds, one for each interpreter, and mpirun."""

    def __init__(self, pythons: dict[str, str]) -> None:
        """pythons: the interpreter of each way."""
        self._pythons = pythons
        self._servers: dict[str, subprocess.Popen[str]] = {}

    def run(self, way: str, world: int, groups: int = 1, target: str = "columns") -> Found:
        """What a world found (worlds.py, mpi_messages.c), or {"failed": why}."""
        if way == "mpi":
            return _mpi(world)
        python = self._pythons[way]
        if python not in self._servers:
            # The variables of a way are set in its ranks: the server of one interpreter has several ways.
            self._servers[python] = subprocess.Popen(
                [python, "-m", "benchmarks.transports.worlds"], cwd=ROOT, env=environment(""), text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        server = self._servers[python]
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"{way} {world} {groups} {target}\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    def close(self) -> None:
        for server in self._servers.values():
            server.communicate()  # ends its input


def _mpi(world: int) -> Found:
    try:
        done = subprocess.run(
            open_mpi(world, "world", str(EACH)), env=environment("mpi"), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=_LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": f"not done within {_LIMIT:.0f} s"}
    return json.loads(done.stdout) if done.returncode == 0 else {"failed": done.stderr[-400:]}


def connects(
    run: Callable[..., Found], ways: list[str], repeats: int, worlds: Iterable[int] = CONNECTS
) -> list[Found]:
    """By number of ranks: {"world", "first": {way: seconds}, "threads", "memory"}. A failure is a text in
    place of the seconds. "ucx, chains" is the way "ucx" where the target is replicas."""
    kinds = {**{way: (way, "columns") for way in ways}, "ucx, chains": ("ucx", "replicas")}
    rows: list[Found] = []
    over: dict[str, str] = {}
    for world in track(list(worlds), "numbers of ranks"):
        taken: dict[str, list[Found]] = {}
        for turn in range(repeats if world <= _OFTEN else 1):
            for kind in random.Random(turn).sample(list(kinds), len(kinds)):
                if kind not in over:
                    way, target = kinds[kind]
                    found = run(way, world, target=target)
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
    cases = [(way, count) for count in counts for way in ("ucx", "gloo")]
    return [{"way": way, "groups": count} | run(way, 2, count) for way, count in track(cases, "idle groups")]
