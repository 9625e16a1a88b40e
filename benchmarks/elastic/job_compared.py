"""The GPT of examples/elastic trained three ways while workers are killed.

In each way the same ranks are killed with SIGKILL, right after the same steps: meshcast.elastic.run on stages
of 2 and 3 ranks; torchrun with the same stages, which starts all ranks anew from a checkpoint; and torchft,
which has the whole model on each rank. torchft needs an environment of its own:
`make test-clients CLIENTS=torchft`. Writes benchmarks/results/job_compared.json, the chart
and the table of docs/elastic.md; takes about four minutes, with nothing else running.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from meshcast.base.progress import Progress

from ..harness import ROOT, Page, command, machine, new_figure, parser, save, save_chart, table
from .kills import Lines, children

_TORCHFT = ROOT / ".nox/clients-torchft/bin/python"
_HERE = Path(__file__).parent


class Way(NamedTuple):
    """command: of options and the folders for metrics and for a checkpoint. why_not: or nothing."""

    name: str
    label: str
    colour: str
    command: Callable[[argparse.Namespace, Path, Path], list[str]]
    why_not: Callable[[], str]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "python"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Without it, ranks that torchrun of torch 2.13 has restarted find the addresses of the dead.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def training(options: argparse.Namespace, metrics: Path) -> list[str]:
    """Options of examples/elastic/train.py, alike in all ways."""
    return ["--model", options.model, "--steps", str(options.steps), "--metrics", str(metrics)]


def _meshcast(options: argparse.Namespace, metrics: Path, checkpoint: Path) -> list[str]:  # noqa: ARG001
    return [
        *(sys.executable, "-m", "meshcast.elastic.run", "--nproc-per-node", f"1:{options.ranks}"),
        *("--max-restarts", str(len(options.kill_at)), str(ROOT / "examples/elastic/train.py"), "--pipeline"),
        *training(options, metrics),
    ]


def _torchrun(options: argparse.Namespace, metrics: Path, checkpoint: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(options.ranks), "--max-restarts", str(len(options.kill_at))),
        *(str(_HERE / "torchrun_job.py"), str(checkpoint), str(options.every), *training(options, metrics)),
    ]


def _torchft(options: argparse.Namespace, metrics: Path, checkpoint: Path) -> list[str]:  # noqa: ARG001
    restarts = str(len(options.kill_at))
    program = [str(_TORCHFT), str(_HERE / "torchft_job.py"), str(options.ranks), restarts]
    return [*program, *training(options, metrics)]


def _no_torchft() -> str:
    if _TORCHFT.exists():
        return ""
    return "it is not installed: make test-clients CLIENTS=torchft makes its environment"


WAYS = [
    Way("meshcast", "meshcast.elastic.run", "#1f5fa8", _meshcast, lambda: ""),
    Way("torchrun", "torchrun and checkpoints", "#e15759", _torchrun, lambda: ""),
    Way("torchft", "torchft, the whole model on each rank", "#f28e2b", _torchft, _no_torchft),
]


LIMIT = 600.0  # seconds for the whole job
_LOOK = 0.02  # seconds between two looks


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
    time.sleep(_LOOK)


Series = dict[str, list[Any]]
Event = dict[str, Any]


def series(lines: Iterable[dict[str, Any]]) -> Series:
    """Columns time, step, loss and ranks, a row for each step that a group of ranks did, as they ended. Times
    are seconds since the Epoch."""
    steps: dict[tuple[int, str], dict[str, Any]] = {}
    for line in lines:
        known = steps.setdefault((line["step"], line["group"]), line)
        if line["time"] > known["time"]:
            steps[line["step"], line["group"]] = line
    rows = sorted(steps.values(), key=lambda line: line["time"])
    return {name: [row[name] for row in rows] for name in ("time", "step", "loss", "ranks")}


def events(found: Series, kills: Sequence[Event]) -> list[Event]:
    """Kills, and what shows in the steps: that ranks join, that the job goes back to an earlier step."""
    said = [{"what": "kill", "time": kill["time"], "rank": kill["rank"]} for kill in kills]
    rows = list(zip(*found.values(), strict=True))
    for (_, step, _, ranks), (at, next_step, _, next_ranks) in pairwise(rows):
        if next_step <= step:
            said.append({"what": "restart", "time": at, "step": next_step, "ranks": next_ranks})
        elif next_ranks > ranks:
            said.append({"what": "join", "time": at, "ranks": next_ranks})
    return sorted(said, key=lambda event: event["time"])


def from_start(found: Series, happened: Sequence[Event]) -> tuple[Series, list[Event]]:
    """With seconds since the end of the first step, and rounded for a file."""
    start = found["time"][0]
    times = [round(time - start, 3) for time in found["time"]]
    losses = [round(loss, 6) for loss in found["loss"]]
    moved = [{**event, "time": round(event["time"] - start, 3)} for event in happened]
    return {**found, "time": times, "loss": losses}, moved


def recoveries(found: Series, happened: Sequence[Event]) -> list[float]:
    """Seconds from each kill to the end of the next step that no rank had begun before it."""
    rows = list(zip(found["time"], found["step"], strict=True))
    times = []
    for event in happened:
        if event["what"] == "kill":
            # One more had begun: survivors complete it, or do it again.
            done = max(step for time, step in rows if time <= event["time"])
            later = [time for time, step in rows if time > event["time"] and step > done + 1]
            times.append(min(later, default=float("inf")) - event["time"])
    return times


def repeated(found: Series) -> int:
    """Steps that were done again."""
    return len(found["step"]) - len(set(found["step"]))


def apart(found: Series, expected: Sequence[float]) -> float:
    """The largest difference of a loss from that of the step in one process."""
    pairs = zip(found["step"], found["loss"], strict=True)
    return max(abs(loss - expected[step]) for step, loss in pairs)


_BIN = 1.0  # seconds
_GAP = 2.0  # seconds without a step, over which no line is drawn
_MARKS = {
    "kill": ("X", "a rank is killed"),
    "join": ("^", "a rank joins"),
    "restart": ("s", "all ranks start anew, from the checkpoint"),
}


def rates(times: list[float]) -> tuple[list[float], list[float]]:
    """Middles of bins, and steps per second in each, up to the last step. times: ascending."""
    bins = range(int(times[-1] / _BIN))
    edges = [bisect_right(times, _BIN * number) for number in range(len(bins) + 1)]
    counts = [(after - before) / _BIN for before, after in pairwise(edges)]
    return [_BIN * (number + 0.5) for number in bins], counts


def broken(times: list[float], losses: list[float]) -> tuple[list[float], list[float]]:
    """With a point that is not drawn in each gap."""
    points = [(times[0], losses[0])]
    for (before, _), (at, loss) in pairwise(zip(times, losses, strict=True)):
        if at - before > _GAP:
            points.append((at, float("nan")))
        points.append((at, loss))
    return [time for time, _ in points], [loss for _, loss in points]


def draw(results: dict[str, Any], path: Path) -> None:
    from matplotlib.lines import Line2D

    figure = new_figure(11, 6.4, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    drawn = [way for way in WAYS if way.name in results["ways"]]
    for way in drawn:
        found = results["ways"][way.name]
        times, losses = found["steps"]["time"], found["steps"]["loss"]
        middles, counts = rates(times)
        look = {"color": way.colour, "linewidth": 1.2}
        above.plot(middles, counts, drawstyle="steps-mid", label=way.label, **look)
        below.plot(*broken(times, losses), **look)
        for event in found["events"]:
            mark, _ = _MARKS[event["what"]]
            last = max(bisect_right(times, event["time"]) - 1, 0)
            near = min(int(event["time"] / _BIN), len(counts) - 1)
            look = {"color": way.colour, "marker": mark, "markersize": 8, "markeredgecolor": "black"}
            below.plot([event["time"]], [losses[last]], zorder=5, **look)
            if counts:
                above.plot([event["time"]], [counts[near]], zorder=5, **look)
    seen = {event["what"] for way in drawn for event in results["ways"][way.name]["events"]}
    marks = [
        Line2D([], [], color="white", marker=mark, markersize=8, markeredgecolor="black", label=label)
        for what, (mark, label) in _MARKS.items()
        if what in seen
    ]
    head = results["header"]
    above.set_title(
        f"A GPT on {head['ranks']} ranks, {head['steps']} steps; a rank is killed in the steps after "
        f"{' and '.join(map(str, head['kill_at']))}",
        fontsize=10,
    )
    above.set_ylabel("steps per second")
    above.set_ylim(0, 1.35 * above.get_ylim()[1])  # room for the legend
    above.legend(handles=[*above.get_legend_handles_labels()[0], *marks], frameon=False, fontsize=8, ncols=2)
    below.set_ylabel("loss")
    below.set_xlabel("seconds since the first step")
    save_chart(figure, path, dpi=110)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    given = parser("job_compared", __doc__)
    names = [way.name for way in WAYS]
    given.add_argument("--ways", nargs="+", choices=names, default=names)
    given.add_argument("--ranks", type=int, default=5, help="4 or more (%(default)s)")
    given.add_argument("--steps", type=int, default=400, help="(%(default)s)")
    given.add_argument("--every", type=int, default=50, help="steps between checkpoints (%(default)s)")
    given.add_argument("--kill-at", type=int, nargs="+", default=[125, 275], help="steps (%(default)s)")
    given.add_argument("--victims", type=int, nargs="+", default=[1, 3], help="their ranks (%(default)s)")
    given.add_argument("--model", default="nano", help="(%(default)s)")
    given.add_argument("--no-publish", action="store_true", help="leave docs/ and the kept results")
    given.add_argument(
        "--out", type=Path, metavar="FOLDER", help="for the JSON, the chart and what the jobs print"
    )
    options = given.parse_args(arguments)
    if options.ranks < 4:
        given.error(f"--ranks {options.ranks}: expected 4 or more: any rank of fewer may be one too many")
    at, victims = options.kill_at, options.victims
    if len(victims) != len(at) or any(not 0 <= rank < options.ranks for rank in victims):
        given.error(f"--victims {victims}: expected a rank below {options.ranks} for each --kill-at")
    if at != sorted(set(at)) or at[0] < 1 or at[-1] > options.steps - 4:
        given.error(f"--kill-at {at}: expected rising steps from 1 to {options.steps - 4}, 4 before the end")
    if options.every < 1:
        given.error(f"--every {options.every}: expected 1 or more")
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
    head_text = f"`{command(head)}`: commit {head['commit']}, {machine_text}."
    lines = []
    for way in WAYS:
        if way.name in results["not_run"]:
            lines.append([way.label, f"not run: {results['not_run'][way.name]}", "", "", ""])
        if way.name in results["ways"]:
            found = results["ways"][way.name]
            took = ", ".join(f"{seconds:.1f} s" for seconds in found["recoveries"])
            whole, near = f"{found['steps']['time'][-1]:.0f} s", f"within {found['apart']:.0e}"
            lines.append([way.label, took, str(found["repeated"]), whole, near])
    columns = [
        "",
        "from a kill to the next new step",
        "steps done again",
        "all steps",
        "loss, to one process",
    ]
    picture = "![Steps per second and loss over time](images/job_compared.png)"
    return f"{head_text}\n\n{table(columns, lines)}\n\n{picture}"


def losses(options: argparse.Namespace) -> list[float]:
    """Of one process that nothing happens to."""
    sys.path.insert(0, str(ROOT / "examples"))
    from elastic import alone, train

    torch.set_num_threads(1)  # as the ranks
    words = training(options, Path("none"))
    return alone.losses(train.task_of(train.parser().parse_args(words)), options.steps)


PAGE = Page(
    "job_compared", "job_compared.json", "docs/elastic.md", text, {"docs/images/job_compared.png": draw}
)
PAGES = [PAGE]


def main() -> int:
    options = parse()
    asked = [way for way in WAYS if way.name in options.ways]
    not_run = {way.name: why for way in asked if (why := way.why_not())}
    names = ("model", "ranks", "steps", "every", "kill_at", "victims")
    head = {name: getattr(options, name) for name in names}
    results: dict[str, Any] = {"header": {**machine("job_compared"), **head}, "not_run": not_run}
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
        save(options.out / PAGE.kept, results)
        draw(results, options.out / "job_compared.png")
    if not options.no_publish:
        PAGE.publish(results)
    return 0
