"""Pairs of ranks that stay while other pairs are measured: each sleeps until it is given an order. So every
way has processes of its own, and all of them still take turns, round by round."""

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
from .cases import WAYS, Size

__all__ = ["PROGRAM", "Pair", "environment", "free_port", "open_mpi"]

PROGRAM = Path(__file__).with_name("mpi_messages.c")
_START = 60.0  # seconds for both ranks to come
_STEP = 60.0  # seconds for one order
_END = 15.0  # seconds to end in


def environment(way: str) -> dict[str, str]:
    """Of the ranks of a way, or without what is the way's own."""
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'python'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **(dict(WAYS[way].env) if way else {}),
    }


def open_mpi(ranks: int, *arguments: str) -> list[str]:
    """The command that starts mpi_messages over TCP on this machine's loopback."""
    return [
        OPEN_MPI.launcher, "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), "--bind-to", "none",
        "--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo",
        "--mca", "mpi_yield_when_idle", "1", str(OPEN_MPI.build(PROGRAM)), *arguments,
    ]  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Pair:
    """Two ranks of one way. Raises RuntimeError with what they printed where one ends, or does not answer."""

    def __init__(self, way: str, python: str) -> None:
        self.way = way
        self._folder = tempfile.TemporaryDirectory(prefix="pair-")
        path = Path(self._folder.name, "orders")
        self._output = Path(self._folder.name, "output.txt")
        with self._output.open("wb") as output, socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen(2)
            listening.settimeout(0.2)
            port = str(free_port())
            commands = [open_mpi(2, "pair", str(path))] if way == "mpi" else [
                [python, "-m", "benchmarks.transports.rank", way, str(rank), str(path), port]
                for rank in (0, 1)
            ]  # fmt: skip
            self._processes = [
                subprocess.Popen(
                    command, cwd=ROOT, env={**environment(way), "MESHCAST_HOST_ID": f"host {number}"},
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                )
                for number, command in enumerate(commands)
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

    def check(self, size: Size) -> None:
        """Buffers of a size, connections, and whether what arrives is what was sent."""
        answers = self._order("check", size, 0)
        if answers != [["right"]] * 2:
            raise self._failed(f"{size.name}: {answers}")

    def latency(self, size: Size) -> tuple[float, float]:
        """Seconds, and CPU seconds of both ranks, of one message that is sent when the last has come."""
        return self._measured("latency", size, size.trips, 2 * size.trips)

    def stream(self, size: Size) -> tuple[float, float]:
        """The same of one message of many in one direction."""
        return self._measured("stream", size, size.batches, size.batches * size.window)

    def _measured(self, what: str, size: Size, count: int, messages: int) -> tuple[float, float]:
        found = [[float(word) for word in words] for words in self._order(what, size, count)]
        return found[0][0] / messages, sum(cpu for _, cpu in found) / messages

    def _order(self, what: str, size: Size, count: int) -> list[list[str]]:
        order = f"{what} {size.nbytes} {size.window} {count}\n".encode()
        try:
            for connection, _ in self._ranks.values():
                connection.sendall(order)
            answers = [self._ranks[rank][1].readline() for rank in (0, 1)]
        except OSError as error:
            raise self._failed(f"{what}, {size.name}: {error}") from None
        if not all(answers):
            raise self._failed(f"{what}, {size.name}: a rank ended")
        return [answer.split() for answer in answers]

    def _failed(self, what: str) -> RuntimeError:
        printed = self._output.read_text(errors="replace")[-800:] if self._output.exists() else ""
        return RuntimeError(f"{WAYS[self.way].name}: {what}\n{printed}")

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
