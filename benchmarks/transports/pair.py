"""Pairs of ranks that stay while other pairs are measured: each sleeps until it is given an order. So every
carrier has processes of its own, and all ways still take turns, round by round."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from ..machine import ROOT
from ..peers.mpi import OPEN_MPI
from . import ucp
from .cases import CARRIERS, Size, known

__all__ = ["PROGRAM", "Pair", "environment", "open_mpi"]

PROGRAM = Path(__file__).with_name("mpi_messages.c")
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
        "--mca", "mpi_yield_when_idle", "1", str(OPEN_MPI.build(PROGRAM)), *arguments,
    ]  # fmt: skip


def _commands(carrier: str, python: str, path: Path) -> list[list[str]]:
    if CARRIERS[carrier].btl:
        return [open_mpi(2, carrier, "pair", str(path))]
    if carrier == "ucp":
        return [[str(ucp.program()), str(path)]]
    return [[python, "-m", "benchmarks.transports.rank", carrier, str(rank), str(path)] for rank in (0, 1)]


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
