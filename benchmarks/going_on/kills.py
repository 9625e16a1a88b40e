"""Kills workers of a job at random moments, such that what they hold lives on another rank as well."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from ..machine import ROOT
from .lines import Lines, Whole

_PAUSE = 0.05  # seconds between two looks
_STEPS = 2  # that all ranks have done before the next first kill
_JOIN = 10  # limits of a step, for the start of a worker: a busy machine takes long to import torch
_SECOND = 1 / 3  # of first kills


class Hang(Exception):  # noqa: N818 - a finding, not a failure of this program
    """Nothing went on within the limit, or the job ended."""


@dataclass
class Killed:
    """second: while the job recovered from another one. Seconds from the kill; None where it was not seen.
    step: to the end of the next step of ranks that all live; joined: of the first with all ranks again."""

    process: int
    time: float
    second: bool
    step: float | None = None
    joined: float | None = None


def children(parent: int) -> list[int]:
    """Processes that it started and that live."""
    try:
        found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        states = {pid: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] for pid in found}
    except OSError:  # one has just ended
        return []
    return [int(pid) for pid, state in states.items() if state != "Z"]


def may_die(newest: Whole, living: list[int]) -> list[int]:
    """Of the living, those without which each part of the state of the newest step still lives. Who is in no
    group yet holds nothing."""
    parts = set(newest.parts.values())
    left = {process: newest.parts[process] for process in living if process in newest.parts}
    return [each for each in living if {part for other, part in left.items() if other != each} == parts]


class Run:
    """A job whose workers are killed, until its block ends."""

    def __init__(
        self, program: list[str], ranks: int, kills: int, lines: Lines, seed: int, limit: float
    ) -> None:
        self.ranks, self.asked, self.lines, self.limit = ranks, kills, lines, limit
        self.kills: list[Killed] = []
        self._drawn = random.Random(seed)
        self._command = [
            *(sys.executable, "-m", "meshcast.elastic.run", "--nproc-per-node", f"1:{ranks}"),
            *("--max-restarts", str(kills), *program),
        ]

    def __enter__(self) -> Self:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
        self._job = subprocess.Popen(self._command, env=environment, stdout=subprocess.DEVNULL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._job.terminate()
        try:
            self._job.wait(timeout=60.0)
        except subprocess.TimeoutExpired:
            self._job.kill()  # its workers end themselves
            self._job.wait()
        self.lines.read()

    def kill(self) -> None:
        """One more, and waits until the job has gone on."""
        first = self.kills[-1] if self.kills else None
        # Two ranks fewer than five still have each stage twice or on a rank that all have in common.
        if first is not None and not first.second and self.ranks >= 5 and self._drawn.random() < _SECOND:
            most = self._drawn.choice(
                [1.5, 7.0]
            )  # while it goes on with fewer; until the new rank has joined
            time.sleep(max(0.0, first.time + self._drawn.random() * most - time.time()))
            if self._strike(second=True):
                return
        self.whole_again()
        done = len(self.lines.whole)
        self._wait(lambda: len(self.lines.whole) >= done + _STEPS, f"{_STEPS} steps")
        time.sleep(self._drawn.random() * 0.5)
        self._strike(second=False)

    def whole_again(self) -> None:
        """Waits until all ranks have done a step, of those that live now."""

        def joined() -> bool:
            return self._next(self.kills[-1].time if self.kills else 0.0, self.ranks) is not None

        self._wait(joined, f"a step of {self.ranks} ranks")

    def _strike(self, second: bool) -> bool:
        self.lines.read()
        choice = may_die(self.lines.whole[-1], children(self._job.pid))
        if not choice:
            return False
        victim = self._drawn.choice(choice)
        killed = Killed(victim, time.time(), second)
        os.kill(victim, signal.SIGKILL)
        self.kills.append(killed)
        return True

    def _next(self, since: float, least: int) -> Whole | None:
        """The first step after that time by so many ranks, none of which was killed."""
        dead, found = {each.process for each in self.kills}, None
        for whole in reversed(self.lines.whole):
            if whole.time <= since:
                break
            if whole.ranks >= least and not dead & whole.parts.keys():
                found = whole
        return found

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        """Also sees to it that each kill is followed by a step in time, and each step by another one."""
        begin, after = time.time(), f"after {len(self.kills)} kills"
        while True:
            self.lines.read()
            self._note()
            if done():
                return
            status = self._job.poll()
            if status is not None:
                raise Hang(f"the job ended with exit status {status}, {after}")
            if self.lines.whole and time.time() > max(begin, self.lines.whole[-1].time) + self.limit:
                raise Hang(f"no step in {self.limit:g} s, {after}")
            if time.time() > begin + _JOIN * self.limit:
                raise Hang(f"{what}: did not come in {_JOIN * self.limit:g} s, {after}")
            time.sleep(_PAUSE)

    def _note(self) -> None:
        for number, each in enumerate(self.kills, 1):
            for name, least in (("step", 1), ("joined", self.ranks)):
                if getattr(each, name) is None and (found := self._next(each.time, least)) is not None:
                    setattr(each, name, found.time - each.time)
            if each.step is None and time.time() > each.time + self.limit:
                said = f"no step in the {self.limit:g} s after it"
                raise Hang(f"kill {number}, of process {each.process}: {said}")
