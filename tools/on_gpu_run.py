"""Runs a step of on_gpu.py within its limit, and counts what passed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, TextIO

from on_gpu_steps import BUILD, ROOT, TREE, Command, Step, environment

__all__ = ["run_step"]

# In the environment of whatever a step starts, so that all of it can be found and ended.
MARK = "MESHCAST_ON_GPU_STEP"
SHOWN = 160  # characters of an error in the table


def run_step(step: Step, dry: bool, log: TextIO) -> dict[str, Any]:
    """Runs the commands one after another; what one of them leaves undone, the next still does."""
    result: dict[str, Any] = {"name": step.name, "what": step.what, "passed": 0, "failed": 0, "skipped": 0}
    result |= {"not_run": [], "first_error": None, "timed_out": False}
    begin = time.monotonic()
    (BUILD / "figures").mkdir(parents=True, exist_ok=True)
    for command in step.commands:
        words = " ".join(command.words)
        if dry and command.needs_gpu:
            result["not_run"].append("needs a GPU")
            continue
        left = step.limit_s - (time.monotonic() - begin)
        log.write(f"\n==== {step.name}: {words}\n")
        log.flush()
        _run(command, step, dry, left, log, result)
    result["not_run"] = sorted(set(result["not_run"]))
    result["seconds"] = round(time.monotonic() - begin, 1)
    return result


def _run(command: Command, step: Step, dry: bool, left: float, log: TextIO, result: dict[str, Any]) -> None:
    junit = BUILD / "junit.xml"
    junit.unlink(missing_ok=True)
    words = [word.replace("JUNIT", str(junit)) for word in command.words]
    output = BUILD / "output"
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    env = environment(dry, step) | {MARK: mark}
    place = TREE if TREE.exists() else ROOT
    with output.open("w") as sink:
        try:
            process = subprocess.Popen(
                words,
                cwd=place,
                env=env,
                stdout=sink,
                stderr=sink,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            result["not_run"].append(f"{words[0]}: {error.strerror}")
            return
        try:
            status: int | None = process.wait(max(left, 0.0))
        except subprocess.TimeoutExpired:
            status = None
        end_all(mark)
        process.wait()
    said = output.read_text(errors="replace")
    log.write(said)
    if command.refusal and command.refusal in said:
        result["not_run"].append(f"refused: {command.refusal}")
        return
    problem = _count(junit, result) if junit.exists() else None
    if not junit.exists() and status == 0:
        result["passed"] += 1
    if status is None:
        result["timed_out"] = True
        problem = f"over its limit of {step.limit_s:.0f} s"
    if status != 0 and (problem is None or not junit.exists()):
        result["failed"] += 1
        problem = problem or _last_line(said) or f"exit status {status}"
    if problem and result["first_error"] is None:
        result["first_error"] = re.sub(r"\s+", " ", problem)[:SHOWN]


def end_all(mark: str) -> None:
    """Ends every process that has the mark: a killed pytest leaves the ranks that it had started."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def _count(junit: Path, result: dict[str, Any]) -> str | None:
    """Adds pytest's results. The message of the first failure."""
    first = None
    for case in ElementTree.parse(junit).getroot().iter("testcase"):
        problems = [*case.iter("failure"), *case.iter("error")]
        if problems:
            result["failed"] += 1
            first = first or f"{case.get('name')}: {problems[0].get('message', '')}"
        elif (skipped := next(case.iter("skipped"), None)) is not None:
            result["skipped"] += 1
            result["not_run"].append(skipped.get("message", "skipped"))
        else:
            result["passed"] += 1
    return first


def _last_line(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else ""
