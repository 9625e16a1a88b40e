"""python -m benchmarks.job_compared: the GPT of examples/elastic trained three ways while workers are killed.

In each way the same ranks are killed with SIGKILL, right after the same steps: meshcast.elastic.run on stages
of 2 and 3 ranks; torchrun with the same stages, which starts all ranks anew from a checkpoint; and torchft,
which has the whole model on each rank. torchft needs an environment of its own:
`make test-clients CLIENTS=torchft`. Writes benchmarks/results/job_compared.json, the chart and the table of
docs/elastic.md; takes about four minutes, with nothing else running.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from meshcast.base.progress import Progress

from ..machine import ROOT, machine
from ..page import publish
from . import chart
from .run import JobError, run
from .series import apart, events, from_start, recoveries, repeated, series
from .ways import WAYS, Way, training

RESULTS = ROOT / "benchmarks/results/job_compared.json"
_PAGE = ROOT / "docs/elastic.md"
_PICTURE = ROOT / "docs/images/job_compared.png"
_MARK = "<!-- {} of what python -m benchmarks.job_compared writes -->"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.job_compared",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [way.name for way in WAYS]
    parser.add_argument("--ways", nargs="+", choices=names, default=names)
    parser.add_argument("--ranks", type=int, default=5, help="4 or more (%(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="(%(default)s)")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints (%(default)s)")
    parser.add_argument("--kill-at", type=int, nargs="+", default=[125, 275], help="steps (%(default)s)")
    parser.add_argument("--victims", type=int, nargs="+", default=[1, 3], help="their ranks (%(default)s)")
    parser.add_argument("--model", default="nano", help="(%(default)s)")
    parser.add_argument("--no-publish", action="store_true", help="leave docs/ and the kept results")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="for the JSON, the chart and what the jobs print"
    )
    options = parser.parse_args(arguments)
    if options.ranks < 4:
        parser.error(f"--ranks {options.ranks}: expected 4 or more: any rank of fewer may be one too many")
    at, victims = options.kill_at, options.victims
    if len(victims) != len(at) or any(not 0 <= rank < options.ranks for rank in victims):
        parser.error(f"--victims {victims}: expected a rank below {options.ranks} for each --kill-at")
    if at != sorted(set(at)) or at[0] < 1 or at[-1] > options.steps - 4:
        parser.error(f"--kill-at {at}: expected rising steps from 1 to {options.steps - 4}, 4 before the end")
    if options.every < 1:
        parser.error(f"--every {options.every}: expected 1 or more")
    return options


def measure(way: Way, options: argparse.Namespace, expected: Sequence[float]) -> dict[str, Any]:
    lines, kills = run(way, options)
    found = series(lines.all())
    moved, happened = from_start(found, events(found, kills))
    return {
        "steps": moved,
        "events": happened,
        "recoveries": [round(seconds, 2) for seconds in recoveries(moved, happened)],
        "repeated": repeated(found),
        "apart": apart(found, expected),
    }


def text(results: dict[str, Any]) -> str:
    """A Markdown table with its head."""
    head = results["header"]
    machine_text = f"{head['cores']} cores, kernel {head['kernel']}, torch {head['torch']}"
    lines = [
        f"`{head['command']}`: commit {head['commit']}, {machine_text}.",
        "",
        "| | from a kill to the next new step | steps done again | all steps | loss, to one process |",
        "|---|---:|---:|---:|---:|",
    ]
    for way in WAYS:
        if way.name in results["not_run"]:
            lines.append(f"| {way.label} | not run: {results['not_run'][way.name]} | | | |")
        if way.name in results["ways"]:
            found = results["ways"][way.name]
            took = ", ".join(f"{seconds:.1f} s" for seconds in found["recoveries"])
            whole, near = f"{found['steps']['time'][-1]:.0f} s", f"within {found['apart']:.0e}"
            lines.append(f"| {way.label} | {took} | {found['repeated']} | {whole} | {near} |")
    return "\n".join([*lines, "", f"![Steps per second and loss over time](images/{_PICTURE.name})"])


def losses(options: argparse.Namespace) -> list[float]:
    """Of one process that nothing happens to."""
    sys.path.insert(0, str(ROOT / "examples"))
    from elastic import alone, train

    torch.set_num_threads(1)  # as the ranks
    given = training(options, Path("none"))
    return alone.losses(train.task_of(train.parser().parse_args(given)), options.steps)


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the job that runs is ended
    asked = [way for way in WAYS if way.name in options.ways]
    not_run = {way.name: why for way in asked if (why := way.why_not())}
    names = ("model", "ranks", "steps", "every", "kill_at", "victims")
    head = {name: getattr(options, name) for name in names}
    results: dict[str, Any] = {"header": {**machine("benchmarks.job_compared"), **head}, "not_run": not_run}
    for name, why in not_run.items():
        print(f"{name}: not run: {why}", flush=True)
    with Progress("ways", 1 + len(asked) - len(not_run), ticks=False) as shown:
        expected = losses(options)
        shown.done()
        results["ways"] = {}
        for way in asked:
            if way.name not in not_run:
                try:
                    results["ways"][way.name] = measure(way, options, expected)
                except JobError as error:
                    print(error, file=sys.stderr)
                    return 1
                shown.done()
    print(text(results))
    if options.out is not None:
        (options.out / RESULTS.name).write_text(json.dumps(results) + "\n")
        chart.draw(results, options.out / _PICTURE.name)
    if not options.no_publish:
        publish(results, RESULTS, _PAGE, _MARK, text(results), chart.draw, _PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
