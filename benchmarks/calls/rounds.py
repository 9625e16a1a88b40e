"""Measures way by way in rounds, in an order that changes, and takes medians. Every carrier has a pair of
ranks of its own, which sleep until they are given an order, so that all ways take turns."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from meshcast.base.progress import track

from ..harness import ROOT, Found
from ..peers.programs import OPEN_MPI, ucp_program
from .cases import CARRIERS, CONNECTS, GROUPS, Size, carrier_of, known, way_of
from .worlds import EACH

_START = 60.0  # seconds for both ranks to come
_STEP = 60.0  # seconds for one order
_END = 15.0  # seconds to end in


def environment(carrier: str, tree: Path = ROOT) -> dict[str, str]:
    """Of the ranks of a carrier, or without what is the carrier's own. tree: whose meshcast they have."""
    return {
        **os.environ,
        "PYTHONPATH": f"{tree / 'python'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RES_OPTIONS": "attempts:0",  # torch asks for names; without a name server that takes 5 s each time
        **(dict(CARRIERS[carrier].env) if carrier else {}),
    }


def open_mpi(ranks: int, carrier: str, *arguments: str) -> list[str]:
    """The command that starts mpi_messages on this machine, over its loopback or in its memory."""
    return [
        OPEN_MPI.launcher, "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), "--bind-to", "none",
        "--mca", "pml", "ob1", "--mca", "btl", CARRIERS[carrier].btl, "--mca", "btl_tcp_if_include", "lo",
        "--mca", "mpi_yield_when_idle", "1", str(OPEN_MPI.build("mpi_messages.c")), *arguments,
    ]  # fmt: skip


def _commands(carrier: str, python: str, path: Path) -> list[list[str]]:
    if CARRIERS[carrier].btl:
        return [open_mpi(2, carrier, "pair", str(path))]
    if carrier == "ucp":
        return [[str(ucp_program()), str(path)]]
    return [[python, "-m", "benchmarks.calls.rank", carrier, str(rank), str(path)] for rank in (0, 1)]


class Pair:
    """Two ranks of one carrier. Raises RuntimeError with what they printed where one ends, or does not
    answer."""

    def __init__(self, carrier: str, python: str, tree: Path = ROOT) -> None:
        self._name = carrier
        carrier = known(carrier)
        self._folder = tempfile.TemporaryDirectory(prefix="pair-")
        path = Path(self._folder.name, "orders")
        self._output = Path(self._folder.name, "output.txt")
        with self._output.open("wb") as output, socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen(2)
            listening.settimeout(0.2)
            env, one_host = environment(carrier, tree), CARRIERS[carrier].one_host
            self._processes = [
                subprocess.Popen(
                    command, cwd=ROOT, env={**env, "MESHCAST_HOST_ID": f"host {0 if one_host else number}"},
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                )
                for number, command in enumerate(_commands(carrier, python, path))
            ]  # fmt: skip
            self._ranks: dict[int, tuple[socket.socket, Any]] = {}
            end = time.monotonic() + _START
            while len(self._ranks) < 2:
                try:
                    connection, _ = listening.accept()
                except TimeoutError:
                    if time.monotonic() < end and all(process.poll() is None for process in self._processes):
                        continue
                    error = self._failed("did not start")  # reads what close() removes
                    self.close()
                    raise error from None
                connection.settimeout(_STEP)
                lines = connection.makefile("r")
                self._ranks[int(lines.readline())] = (connection, lines)

    def check(self, kind: str, size: Size) -> None:
        """Buffers of a size, connections, and whether what arrives by a kind of way is what was sent."""
        answers = self._order("check", kind, size, 0)
        if answers != [["right"]] * 2:
            raise self._failed(f"{kind}, {size.name}: {answers}")

    def latency(self, kind: str, size: Size, count: int) -> tuple[float, float]:
        """Seconds, and CPU seconds of both ranks, of one message that is sent when the last has come. count:
        of times that one goes there and one back."""
        return self._measured("latency", kind, size, count, 2)

    def stream(self, kind: str, size: Size, count: int) -> tuple[float, float]:
        """The same of one message of many in one direction. count: of windows; the next one begins when all
        of the last have arrived."""
        return self._measured("stream", kind, size, count, size.window)

    def _measured(self, what: str, kind: str, size: Size, count: int, messages: int) -> tuple[float, float]:
        found = [[float(word) for word in words] for words in self._order(what, kind, size, count)]
        return found[0][0] / count / messages, sum(cpu for _, cpu in found) / count / messages

    def _order(self, what: str, kind: str, size: Size, count: int) -> list[list[str]]:
        order = f"{what} {size.nbytes} {size.window} {count} {kind}\n".encode()
        try:
            for connection, _ in self._ranks.values():
                connection.sendall(order)
            answers = [self._ranks[rank][1].readline() for rank in (0, 1)]
        except OSError as error:
            raise self._failed(f"{what} of {kind}, {size.name}: {error}") from None
        if not all(answers):
            raise self._failed(f"{what} of {kind}, {size.name}: a rank ended")
        return [answer.split() for answer in answers]

    def _failed(self, what: str) -> RuntimeError:
        printed = self._output.read_text(errors="replace")[-800:] if self._output.exists() else ""
        return RuntimeError(f"{self._name}: {what}\n{printed}")

    def close(self) -> None:
        """The ranks end as their orders do; what does not is killed."""
        for connection, lines in self._ranks.values():
            lines.close()
            connection.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END if self._ranks else 0)
            if process.poll() is None:
                process.kill()
                process.wait()
        self._folder.cleanup()


_SECONDS = 0.05  # of one figure in one round, about
_OFTEN = 16  # ranks; larger worlds take seconds to start, so each is measured once
QUOTIENT = ("ucx/Resharder", "torch/gloo")
"""The ways that quotients() divides."""
_MPI_LIMIT = 90.0  # seconds for a world of MPI
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
                [python, "-m", "benchmarks.calls.worlds"], cwd=ROOT, env=environment(""), text=True,
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
            capture_output=True, text=True, timeout=_MPI_LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": f"not done within {_MPI_LIMIT:.0f} s"}
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
