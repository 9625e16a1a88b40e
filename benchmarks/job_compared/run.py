"""Starts a job, kills a rank of it at the same steps as in other ways, and waits until it is through."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from ..going_on.kills import children
from ..going_on.lines import Lines
from .ways import Way, environment

LIMIT = 600.0  # seconds for the whole job
_PAUSE = 0.02  # seconds between two looks


class JobError(RuntimeError):
    """The job did not get through."""


def run(way: Way, options: argparse.Namespace) -> tuple[Lines, list[dict[str, Any]]]:
    """What the processes have told, and the kills: time, process, rank and the step that it had told last.
    Raises JobError."""
    with tempfile.TemporaryDirectory() as folder:
        lines, kills = Lines(Path(folder, "metrics")), []
        kept = Path(folder) if options.out is None else options.out
        kept.mkdir(parents=True, exist_ok=True)
        with (kept / f"{way.name}.log").open("w+b") as log:
            command = way.command(options, lines.folder, Path(folder, "checkpoint"))
            job = subprocess.Popen(command, env=environment(), stdout=log, stderr=subprocess.STDOUT)
            try:
                until = time.monotonic() + LIMIT
                for step, rank in zip(options.kill_at, options.victims, strict=True):
                    while (victim := _who(lines, step, rank, children(job.pid))) is None:
                        if job.poll() == 0:
                            raise JobError(f"it was through before rank {rank} was seen at step {step}")
                        _wait(job, until, f"step {step} of rank {rank}")
                        lines.read()
                    kills.append({"time": time.time(), "process": victim, "rank": rank})
                    os.kill(victim, signal.SIGKILL)
                while job.poll() is None:
                    _wait(job, until, "the end")
                if job.returncode:
                    raise JobError(f"it ended with exit status {job.returncode}")
            except JobError as error:
                log.seek(0)
                raise JobError(
                    f"{way.label}: {error}; {log.read()[-4000:].decode(errors='replace')}"
                ) from None
            finally:
                job.terminate()
                job.wait()
        lines.read()
    return lines, kills


def _who(lines: Lines, step: int, rank: int, living: list[int]) -> int | None:
    """The process that is at that step under that rank; None where it is not so far."""
    for process, told in lines.of.items():
        if process in living and told[-1]["rank"] == rank and told[-1]["step"] >= step:
            return process
    return None


def _wait(job: subprocess.Popen[bytes], until: float, what: str) -> None:
    if job.poll():
        raise JobError(f"it ended with exit status {job.returncode} before {what}")
    if time.monotonic() > until:
        raise JobError(f"{what} did not come in {LIMIT:.0f} s")
    time.sleep(_PAUSE)
