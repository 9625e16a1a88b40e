"""From the kill of a rank to the end of the next step, in the job of
examples/elastic, and whether each step is right.

Kills a random worker with SIGKILL at a random moment once all ranks are there. After a third of these kills
it kills another one, while the job recovers or is about to be whole again. Each must be followed by a step
within --limit seconds. Then each step is compared with one process: who did it, how often, and its loss. A
pipeline has stages of 2 and 3 of five ranks. The exit status is 0 where everything was right.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from meshcast.base.progress import Progress, track
from typing_extensions import Self

from ..harness import ROOT, machine, parser

Line = dict[str, Any]


class Whole(NamedTuple):
    """A step that all ranks of a group have told. time: of the last of them."""

    step: int
    group: str
    ranks: int
    time: float
    parts: dict[int, int]  # of the state, by process


class Lines:
    """folder: that `examples/elastic/train.py --metrics` writes to. of: lines by process, in their order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.of: dict[int, list[Line]] = {}
        self.whole: list[Whole] = []
        self._read: dict[Path, int] = {}  # bytes
        self._open: dict[tuple[int, str], list[tuple[int, Line]]] = defaultdict(list)

    def read(self) -> None:
        """What is new. A line that has no end yet, or never will have, is left alone."""
        for path in sorted(self.folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for text in whole.splitlines():
                self._take(int(path.stem), json.loads(text))

    def _take(self, process: int, line: Line) -> None:
        self.of.setdefault(process, []).append(line)
        key = line["step"], line["group"]
        self._open[key].append((process, line))
        said = self._open[key]
        if len(said) == line["ranks"]:
            parts = {each: told["part"] for each, told in said}
            self.whole.append(Whole(*key, line["ranks"], max(told["time"] for _, told in said), parts))
            del self._open[key]

    def all(self) -> Iterable[Line]:
        for lines in self.of.values():
            yield from lines


ALLOWED = 1e-5  # of the loss
_SHOWN = 20


@dataclass
class Verdict:
    """wrong: by step, what is. again: steps that a killed rank alone had told, and that were done again.
    worst: difference of a loss from the expected one. kills, hangs: of the run, as far as it got."""

    steps: int = 0
    wrong: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    again: int = 0
    worst: float = 0.0
    asked: int = 0
    kills: int = 0
    hangs: int = 0

    @property
    def good(self) -> bool:
        return not (self.wrong or self.hangs) and self.kills == self.asked and self.steps > 0

    def text(self) -> str:
        said = [
            f"step {step}: {each}" for step, all_of_it in sorted(self.wrong.items()) for each in all_of_it
        ]
        more = [f"and {len(said) - _SHOWN} more"] if len(said) > _SHOWN else []
        kills = f"{self.kills} of {self.asked} kills, {self.hangs} hangs, {len(self.wrong)} wrong steps"
        again = f"{self.again} done again that only a killed rank had told"
        worst = f"worst difference of a loss {self.worst:.1e} (allowed {ALLOWED:g})"
        word = "good" if self.good else "BAD"
        return "\n".join([*said[:_SHOWN], *more, f"{word}: {kills} of {self.steps}, {again}, {worst}"])


def check(of: Mapping[int, Sequence[Line]], killed: Collection[int], expected: Sequence[float]) -> Verdict:
    """of: lines by process, until the job was ended; the last step may be cut. killed: processes, also such
    that told nothing. expected: losses, of all steps or more."""
    found = Verdict()
    last = {process: lines[-1]["step"] for process, lines in of.items() if lines}
    found.steps = max(last.values(), default=-1) + 1
    for process, lines in of.items():
        for one, next_one in pairwise(lines):
            if next_one["step"] != one["step"] + 1:
                found.wrong[next_one["step"]].append(f"process {process} told it after step {one['step']}")
        if process not in killed and last[process] < found.steps - 2:
            said = f"process {process} told no later one, and nobody killed it"
            found.wrong[last[process]].append(said)
    by_step: dict[int, dict[str, dict[int, Line]]] = defaultdict(lambda: defaultdict(dict))
    for process, lines in of.items():
        for line in lines:
            by_step[line["step"]][line["group"]][process] = line
    silent = sum(process not in last for process in killed)  # each explains one that is missing, once
    for step in range(found.steps):
        begun = by_step[step].keys() - by_step[step - 1].keys()
        may_explain = silent if begun else 0  # who told nothing was in no group's second step
        silent -= _check_step(step, by_step[step], last, killed, may_explain, found)
        for lines_of_group in by_step[step].values():
            for process, line in lines_of_group.items():
                apart = abs(line["loss"] - expected[step])
                found.worst = max(found.worst, apart)
                if not apart <= ALLOWED:
                    said = f"loss {line['loss']!r} of process {process}, expected {expected[step]!r}"
                    found.wrong[step].append(said)
    return found


def _check_step(
    step: int,
    groups: Mapping[str, Mapping[int, Line]],
    last: Mapping[int, int],
    killed: Collection[int],
    silent: int,
    found: Verdict,
) -> int:
    """How many of those who are missing were killed before they told anything."""
    if not groups:
        found.wrong[step].append("nobody told it")
        return 0
    *before, newest = sorted(groups.values(), key=lambda lines: min(line["time"] for line in lines.values()))
    for those in before:
        # Who was alone to have taken the step, and died with it: that of the others is the one that counts.
        if all(process in killed and last[process] == step for process in those):
            found.again += 1
        else:
            found.wrong[step].append(f"told in {len(groups)} groups of ranks, by processes {sorted(those)}")
            break
    lines = list(newest.values())
    ranks = {line["ranks"] for line in lines}
    places = {line["rank"] for line in lines}
    if len({line["loss"] for line in lines}) > 1:
        found.wrong[step].append(f"losses differ among ranks: {sorted(line['loss'] for line in lines)}")
    if len(ranks) > 1 or len(places) < len(lines) or not places <= set(range(max(ranks))):
        found.wrong[step].append(f"ranks {sorted(line['rank'] for line in lines)} of {sorted(ranks)} told it")
        return 0
    # The rank that was killed in the step, and at the very end those that were stopped in it.
    missing = max(ranks) - len(lines)
    over = step == found.steps - 1
    cut = sum(at == step - 1 and (process in killed or over) for process, at in last.items())
    if over or missing <= cut:
        return 0
    if missing - cut > silent:
        found.wrong[step].append(f"{len(lines)} of {max(ranks)} ranks told it, and {cut} were killed in it")
        return 0
    return missing - cut


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


_MANY = 1_000_000  # steps, more than it will do: the learning rate stays at its peak


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    given = parser("kills", __doc__)
    given.add_argument("--kind", choices=["pipeline", "hybrid"], default="pipeline", help="(%(default)s)")
    given.add_argument("--ranks", type=int, default=5, help="4 or more (%(default)s)")
    given.add_argument("--kills", type=int, default=10, help="(%(default)s)")
    given.add_argument("--seed", type=int, default=1, help="of victims and moments (%(default)s)")
    given.add_argument("--model", default="nano", help="(%(default)s)")
    given.add_argument(
        "--dtype",
        choices=["float32", "float64"],
        default="float64",
        help="over thousands of steps float32 drifts by the order of sums alone (%(default)s)",
    )
    given.add_argument(
        "--limit", type=float, default=60.0, help="seconds from a kill to a step (%(default)s)"
    )
    given.add_argument("--keep", type=Path, metavar="FOLDER", help="the lines of the steps stay there")
    options = given.parse_args(arguments)
    if options.ranks < 4 or options.kills < 1 or not options.limit > 0:
        given.error("--ranks must be 4 or more, --kills 1 or more, --limit above 0")
    if options.keep is not None and options.keep.exists() and any(options.keep.iterdir()):
        given.error(f"--keep {options.keep}: there is something in it; name a new folder")
    return options


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        lines = Lines(options.keep or Path(folder))
        kills, hang = killing(options, lines)
        with Progress("the same in one process"):
            expected = losses(options, lines)
    print(json.dumps(machine("kills")))
    print(figures(options, lines, kills))
    verdict = check(lines.of, {each.process for each in kills}, expected)
    verdict.asked, verdict.kills, verdict.hangs = options.kills, len(kills), int(hang is not None)
    if hang is not None:
        print(hang)
    print(verdict.text())
    return int(not verdict.good)


def killing(options: argparse.Namespace, lines: Lines) -> tuple[list[Killed], Hang | None]:
    """Ends early at a hang: nothing can be killed after it."""
    program = [str(ROOT / "examples/elastic/train.py"), "--steps", str(_MANY), "--model", options.model]
    program += ["--dtype", options.dtype, "--metrics", str(lines.folder)]
    program += ["--pipeline"] if options.kind == "pipeline" else []
    with Run(program, options.ranks, options.kills, lines, options.seed, options.limit) as run:
        try:
            for _ in track(range(options.kills), "kills"):
                run.kill()
            run.whole_again()
        except Hang as hang:
            return run.kills, hang
    return run.kills, None


def losses(options: argparse.Namespace, lines: Lines) -> list[float]:
    sys.path.insert(0, str(ROOT / "examples"))
    from elastic import alone, train

    torch.set_num_threads(1)  # as the ranks; more of them gain nothing on so small a model
    given = ["--steps", str(_MANY), "--model", options.model, "--dtype", options.dtype]
    steps = 1 + max((line["step"] for line in lines.all()), default=-1)
    return alone.losses(train.task_of(train.parser().parse_args(given)), steps)


def figures(options: argparse.Namespace, lines: Lines, kills: Sequence[Killed]) -> str:
    said = [f"{options.ranks} ranks, {options.kind}, model {options.model}, {options.dtype}"]
    followed = [a for a, b in pairwise(kills) if b.second and _early(a, b)]
    disturbed = [each for each in kills if each.second or each in followed]
    alone = [each for each in kills if each not in disturbed]
    for what, values in (
        ("to the end of the next step", [each.step for each in alone]),
        ("to the end of the next step, two ranks within one recovery", [each.step for each in disturbed]),
        ("until all ranks are there again", [each.joined for each in alone]),
    ):
        known = [value for value in values if value is not None]
        if known:
            said.append(f"from the kill {what}: {_of(known)}")
    steps = [line for line in lines.all() if line["ranks"] == options.ranks]
    for name, what in (("seconds", "a step"), ("agreeing", "of it until all agree")):
        if steps:
            said.append(f"{what}: median {1e3 * statistics.median(each[name] for each in steps):.2f} ms")
    return "\n".join(said)


def _early(first: Killed, second: Killed) -> bool:
    """Whether the second came before the first was over."""
    return first.joined is None or second.time < first.time + first.joined


def _of(values: list[float]) -> str:
    return f"median {statistics.median(values):.2f} s, most {max(values):.2f} s, of {len(values)}"
