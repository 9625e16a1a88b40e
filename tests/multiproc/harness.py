"""Runs a module of cases in N processes and collects, for each case and rank, how it ended.

Starting torch costs seconds, so one set of processes runs many cases. A case module has a list CASES of
functions that take a Context; all ranks run all of them in this order. A test file makes a module-scoped
fixture of run_world() and one test for each case, so that a failure names its case. Nothing here waits
without a limit: a rank that is still running when the time is up prints the stacks of its threads and is
killed, by its process id.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
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
) -> WorldResult:
    """Runs the case module in `world` processes and waits until all have ended, at most `limit` seconds.

    The rendezvous store lives in this process, so that no rank's death takes it along.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="meshcast-world-") as folder:
        outputs = [Path(folder) / f"rank{rank}.out" for rank in range(world)]
        begin = time.monotonic()
        processes = []
        try:
            for rank in range(world):
                arguments = [str(cases), str(rank), str(world), str(store.port), backend, folder]
                with outputs[rank].open("wb") as output:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, str(WORKER), *arguments],
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            stdin=subprocess.DEVNULL,
                            env=_environment(env),
                        )
                    )
            timed_out = not _wait(processes, begin + limit)
        finally:
            _end(processes)
        seconds = time.monotonic() - begin
        ranks = [
            RankResult(
                process.returncode,
                outputs[rank].read_text(errors="replace"),
                _cases(Path(folder) / f"rank{rank}.json"),
            )
            for rank, process in enumerate(processes)
        ]
    return WorldResult(ranks, seconds, timed_out)


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    env = {**os.environ, "PYTHONFAULTHANDLER": "1", **(extra or {})}
    env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "python"), str(ROOT / "tests"), env.get("PYTHONPATH", "")]
    )
    return env


def _wait(processes: list[subprocess.Popen], deadline: float) -> bool:
    while time.monotonic() < deadline:
        if all(process.poll() is not None for process in processes):
            return True
        time.sleep(0.02)
    return all(process.poll() is not None for process in processes)


def _end(processes: list[subprocess.Popen]) -> None:
    """Ranks that still run print their stacks (worker.py registers the signal), then go."""
    late = [process for process in processes if process.poll() is None]
    for process in late:
        # A frozen rank prints once it runs again.
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGUSR1)
    if late:
        time.sleep(1.0)
    for process in late:
        process.kill()
    for process in processes:
        process.wait()


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
