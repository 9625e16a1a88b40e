"""python -m benchmarks.going_on: from the kill of a rank to the end of the next step, in the job of
examples/elastic, and whether each step is right.

Kills a random worker with SIGKILL at a random moment once all ranks are there. After a third of these kills
it kills another one, while the job recovers or is about to be whole again. Each must be followed by a step
within --limit seconds. Then each step is compared with one process: who did it, how often, and its loss. A
pipeline has stages of 2 and 3 of five ranks. The exit status is 0 where everything was right.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from meshcast.base.progress import Progress, track

from ..machine import ROOT, machine
from .check import check
from .kills import Hang, Killed, Run
from .lines import Lines

_STEPS = 1_000_000  # more than it will do: the learning rate stays at its peak


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.going_on",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kind", choices=["pipeline", "hybrid"], default="pipeline", help="(%(default)s)")
    parser.add_argument("--ranks", type=int, default=5, help="4 or more (%(default)s)")
    parser.add_argument("--kills", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of victims and moments (%(default)s)")
    parser.add_argument("--model", default="nano", help="(%(default)s)")
    parser.add_argument(
        "--dtype",
        choices=["float32", "float64"],
        default="float64",
        help="over thousands of steps float32 drifts by the order of sums alone (%(default)s)",
    )
    parser.add_argument(
        "--limit", type=float, default=60.0, help="seconds from a kill to a step (%(default)s)"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="the lines of the steps stay there")
    options = parser.parse_args(arguments)
    if options.ranks < 4 or options.kills < 1 or not options.limit > 0:
        parser.error("--ranks must be 4 or more, --kills 1 or more, --limit above 0")
    if options.keep is not None and options.keep.exists() and any(options.keep.iterdir()):
        parser.error(f"--keep {options.keep}: there is something in it; name a new folder")
    return options


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the job is ended
    with tempfile.TemporaryDirectory() as folder:
        lines = Lines(options.keep or Path(folder))
        kills, hang = killing(options, lines)
        with Progress("the same in one process"):
            expected = losses(options, lines)
    print(f"{json.dumps(machine('benchmarks.going_on'))}")
    print(figures(options, lines, kills))
    verdict = check(lines.of, {each.process for each in kills}, expected)
    verdict.asked, verdict.kills, verdict.hangs = options.kills, len(kills), int(hang is not None)
    if hang is not None:
        print(hang)
    print(verdict.text())
    return int(not verdict.good)


def killing(options: argparse.Namespace, lines: Lines) -> tuple[list[Killed], Hang | None]:
    """Ends early at a hang: nothing can be killed after it."""
    program = [str(ROOT / "examples/elastic/train.py"), "--steps", str(_STEPS), "--model", options.model]
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
    given = ["--steps", str(_STEPS), "--model", options.model, "--dtype", options.dtype]
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


if __name__ == "__main__":
    sys.exit(main())
