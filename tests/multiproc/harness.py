"""Runs a module of cases in N processes and collects, for each case and rank, how it ended.

Starting torch costs seconds, so one set of processes runs many cases. A case module has a list CASES of
functions that take a Context; all ranks run all of them in this order. A test file makes a module-scoped
fixture of run_world() and one test for each case, so that a failure names its case. Nothing here waits
without a limit: a rank that is still running when the time is up prints the stacks of its threads and is
killed, by its process id.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from multiproc.fork_server import Forked, environment

ROOT = Path(__file__).resolve().parents[2]
_WORKER = Path(__file__).with_name("worker.py")
_OUTPUT_KEPT = 6000  # characters of a rank's output that a failure shows


@dataclass
class RankResult:
    """One process: how it ended (exit status; negative: the signal), what it printed, and its cases."""

    status: int | None
    output: str
    cases: dict[str, dict] = field(default_factory=dict)


@dataclass
class WorldResult:
    ranks: list[RankResult]
    seconds: float
    timed_out: bool

    def check(self, case: str, ranks: Sequence[int] | None = None) -> None:
        """Fails unless the case passed on every rank (or on `ranks`). Shows each rank that did not pass."""
        problems = []
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            result = self.ranks[rank]
            outcome = result.cases.get(case)
            if outcome is None:
                problems.append(
                    f"rank {rank} did not finish case {case} (exit status "
                    f"{result.status}):\n{result.output[-_OUTPUT_KEPT:]}"
                )
            elif not outcome["passed"]:
                problems.append(f"rank {rank} failed case {case}:\n{outcome['error']}")
        assert not problems, "\n".join(problems)

    def value(self, case: str, rank: int) -> dict:
        """What the case returned on that rank."""
        return self.ranks[rank].cases[case]["value"]

    def check_ends(self, expected: Mapping[int, int] | None = None) -> None:
        """Fails unless every process ended in time with status 0, or with expected[rank]."""
        assert not self.timed_out, (
            f"the time limit was reached after {self.seconds:.1f} s:\n" + self.transcript()
        )
        for rank, result in enumerate(self.ranks):
            wanted = (expected or {}).get(rank, 0)
            assert result.status == wanted, (
                f"rank {rank} ended with status {result.status}, expected "
                f"{wanted}:\n{result.output[-_OUTPUT_KEPT:]}"
            )

    def transcript(self) -> str:
        return "\n".join(f"--- rank {rank}\n{r.output[-_OUTPUT_KEPT:]}" for rank, r in enumerate(self.ranks))


def run_world(
    cases: Path | str,
    world: int,
    *,
    limit: float = 240.0,
    backend: str = "gloo",
    env: Mapping[str, str] | None = None,
    bare: bool = False,
) -> WorldResult:
    """Runs the case module in `world` processes and waits until all have ended, at most `limit` seconds, or
    MESHCAST_WORLD_LIMIT of the environment if that is less. bare: of torch they have imported no more than a
    rank needs to start.

    The rendezvous store lives in this process, so that no rank's death takes it along.
    """
    begin = time.monotonic()
    limit = min(limit, float(os.environ.get("MESHCAST_WORLD_LIMIT", limit)))
    with started(cases, world, backend=backend, env=env, bare=bare) as running:
        timed_out = not _wait(running.start, begin + limit)
        running.end()
        seconds = time.monotonic() - begin
        return WorldResult(running.results(), seconds, timed_out)


@dataclass
class Running:
    """A set of ranks that has been started. store: the one that their rendezvous is in."""

    world: int
    folder: Path
    store: dist.TCPStore
    start: subprocess.Popen[Any]  # of worker.py

    def runs(self) -> bool:
        """Whether none of the ranks has ended."""
        ended = any(process.status is not None for process in _processes(self.folder).values())
        return not ended and self.start.poll() is None

    def end(self) -> None:
        """Ranks that still run print their stacks and are killed."""
        _end(self.start, self.folder)

    def results(self) -> list[RankResult]:
        """Of all ranks, once they have ended."""
        ended = _processes(self.folder)
        if len(ended) < self.world:  # it ended before it had started them all
            raise AssertionError(
                "not all ranks were started:\n"
                + (self.folder / "start.out").read_text(errors="replace")[-_OUTPUT_KEPT:]
            )
        return [
            RankResult(
                ended[rank].status,
                (self.folder / f"rank{rank}.out").read_text(errors="replace"),
                _cases(self.folder / f"rank{rank}.json"),
            )
            for rank in range(self.world)
        ]


@contextlib.contextmanager
def started(
    cases: Path | str,
    world: int,
    *,
    backend: str = "gloo",
    env: Mapping[str, str] | None = None,
    bare: bool = False,
) -> Iterator[Running]:
    """Starts the ranks; they are gone when the block is left. Arguments as those of `run_world`."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="meshcast-world-") as name:
        folder = Path(name)
        with (folder / "start.out").open("wb") as output:
            start = (subprocess.Popen if bare else Forked)(
                [sys.executable, str(_WORKER), str(cases), str(world), str(store.port), backend, name],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(env),
            )
        try:
            yield Running(world, folder, store, start)
        finally:
            _end(start, folder)


def _wait(start: subprocess.Popen[Any], deadline: float) -> bool:
    """The process that started the ranks ends when all of them have."""
    try:
        start.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


@dataclass
class _Process:
    pid: int
    status: int | None = None  # None: it runs


def _processes(folder: Path) -> dict[int, _Process]:
    """By rank, as worker.py wrote them down. A line being written is left out."""
    found: dict[int, _Process] = {}
    path = folder / "processes"
    for line in path.read_text().split("\n")[:-1] if path.exists() else []:
        rank, pid, *status = map(int, line.split())
        found[rank] = _Process(pid, *status)
    return found


def _end(start: subprocess.Popen[Any], folder: Path) -> None:
    """Ranks that still run print their stacks (worker.py registers the signal), then go. Their numbers are
    theirs until the process that started them, which waits for each, has written down that one ended."""
    for number in (signal.SIGCONT, signal.SIGUSR1, signal.SIGKILL):  # a frozen rank prints once it runs again
        late = [process for process in _processes(folder).values() if process.status is None]
        for process in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
        if late and number == signal.SIGUSR1:
            time.sleep(1.0)
    try:
        start.wait(timeout=10.0)
    except subprocess.TimeoutExpired:  # it had not started them all
        start.kill()
        start.wait()


def _cases(path: Path) -> dict[str, dict]:
    """One JSON object a line: {"case", "passed", "error", "value"}. The last line of a killed rank may be
    cut."""
    cases = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            outcome = json.loads(line)
        except json.JSONDecodeError:
            continue
        cases[outcome["case"]] = outcome
    return cases
