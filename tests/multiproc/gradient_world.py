"""Runs drawn pipelines in real processes and compares them with one process.

    PYTHONPATH=python:tests .venv/bin/python -m multiproc.gradient_world --seed N     one draw
    ... --draws 2000 --first-seed S                                                    many, with a report
    ... --corner NAME                                                                  a named one

A draw fails by wrong losses, gradients or parameters, by an error that is no refusal, by a refusal on some of
its ranks only, and by not coming to an end. Of one that fails a simpler one is looked for that fails too.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import pickle
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from multiproc.gradient_compare import Expected, Result, judge
from multiproc.gradient_drawing import corners, draw
from multiproc.gradient_draws import MOST_RANKS, Draw
from multiproc.gradient_shrink import shrink
from multiproc.harness import Running, started

CASES = Path(__file__).with_name("cases_gradients.py")
LIMIT, COMPILED_LIMIT = 75.0, 260.0  # seconds of a draw: a little more than a rank gives itself
PER_WORLD = 25  # draws; their groups are kept, and a thread of gloo for each wakes 100 times a second
MOST_REFUSED = 0.1
_SHOWN = 3000  # characters of a rank's output


class World:
    """Processes that run one draw after the other."""

    def __init__(self, world: int = MOST_RANKS) -> None:
        self.size, self.draws = world, 0
        self._stack = contextlib.ExitStack()
        self._running: Running = self._stack.enter_context(started(CASES, world))
        # A connection of its own: waiting for a rank must not keep others from the store.
        self._store = dist.PrefixStore("cases", self._running.store)

    def run(self, drawn: Draw) -> Result:
        number = self.draws
        self.draws += 1
        begin = time.monotonic()
        self._store.set(f"draw {number}", pickle.dumps(drawn))
        expected = Expected(drawn)  # while the ranks are at it
        missing = self._wait(number, any(stage.compiled for stage in drawn.stages))
        if missing:
            self._running.end()
            results = self._running.results()
            said = "".join(
                f"--- rank {rank}, status {results[rank].status}\n{results[rank].output[-_SHOWN:]}\n"
                + "".join(case["error"] for case in results[rank].cases.values())
                for rank in missing
            )
            return Result(
                "failed", "does not end", f"ranks {missing} did not finish\n{said}", math.inf, clean=False,
                seconds=time.monotonic() - begin,
            )  # fmt: skip
        outcomes = []
        for rank in range(self.size):
            path = self._running.folder / f"{number}-{rank}.pt"
            outcomes.append(torch.load(path, weights_only=True))
            path.unlink()
        result = judge(outcomes[: drawn.ranks], expected)
        result.seconds = time.monotonic() - begin
        return result

    def _wait(self, number: int, compiled: bool) -> list[int]:
        """Ranks that have not finished in time."""
        end = time.monotonic() + (COMPILED_LIMIT if compiled else LIMIT) + (60.0 if number == 0 else 0.0)
        late = list(range(self.size))
        while late and time.monotonic() < end:
            ended = not self._running.runs()
            late = [rank for rank in late if not self._store.check([f"done {number}/{rank}"])]
            if late and ended:
                break
            time.sleep(0.01)  # not a wait in the store, which says at length that it was in vain
        return late

    def close(self) -> None:
        if self._running.runs():
            self._store.set(f"draw {self.draws}", pickle.dumps(None))
            with contextlib.suppress(Exception):
                self._running.start.wait(timeout=10.0)
        self._stack.close()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- many draws ------------------------------------------------------------------------------------------


@dataclass
class Report:
    """Of many draws."""

    results: dict[str, Result] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def line(self, seconds: float) -> str:
        states = Counter(result.state for result in self.results.values())
        worst = max((each.worst for each in self.results.values() if each.state == "passed"), default=0.0)
        return (
            f"{len(self.results)} draws in {seconds:.0f} s: {states['passed']} passed (worst {worst:.2f} of "
            f"what is allowed), {states['refused']} refused, {states['failed']} failed"
        )

    def causes(self, state: str) -> str:
        found = Counter(result.cause for result in self.results.values() if result.state == state)
        return "\n".join(f"  {count:4d}  {cause}" for cause, count in found.most_common())

    def check(self) -> None:
        assert not self.failures, "\n\n".join(self.failures)
        refused = sum(result.state == "refused" for result in self.results.values())
        assert refused <= MOST_REFUSED * len(self.results), (
            f"{refused} of {len(self.results)} draws were refused:\n{self.causes('refused')}"
        )


class Worlds:
    """A world that is made anew when a draw has failed in it, and now and then."""

    def __init__(self) -> None:
        self._world: World | None = None

    def run(self, drawn: Draw, *, fresh: bool = True) -> Result:
        """fresh: after any failure; else only if it may have left something behind."""
        if self._world is None:
            self._world = World()
        result = self._world.run(drawn)
        if not result.clean or (fresh and result.state == "failed") or self._world.draws >= PER_WORLD:
            self.close()
        return result

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_draws(
    drawn: Iterable[tuple[str, Draw]],
    *,
    shrink_seconds: float = 60.0,
    shrunk: int = 1,
    say: Callable[[str], None] = print,
    every: int = 20,
    fresh: bool = True,
) -> Report:
    """The draws with what reproduces each. shrunk: so many failures are made simpler. fresh: a new world
    after each failure."""
    report, begin = Report(), time.monotonic()
    with Worlds() as worlds:
        for reproduction, each in drawn:
            result = worlds.run(each, fresh=fresh)
            report.results[reproduction] = result
            if result.state == "failed":
                text = f"{reproduction} failed: {result.cause}\n{each.text()}\n{result.text}"
                if shrink_seconds and len(report.failures) < shrunk:
                    text += _shrunk(worlds, each, result, shrink_seconds)
                report.failures.append(
                    f"{text}\nPYTHONPATH=python:tests .venv/bin/python -m multiproc.gradient_world "
                    f"{reproduction}"
                )
                say(report.failures[-1] + "\n")
            if len(report.results) % every == 0:
                say(report.line(time.monotonic() - begin))
    say(report.line(time.monotonic() - begin))
    for state in ("refused", "failed"):
        if report.causes(state):
            say(f"{state}:\n{report.causes(state)}")
    return report


def _shrunk(worlds: Worlds, failed: Draw, result: Result, seconds: float) -> str:
    last = {failed: result}

    def fails(each: Draw) -> bool:
        last[each] = worlds.run(each, fresh=False)
        # Of the same kind: another failure is another draw's.
        return last[each].state == "failed" and last[each].cause[:20] == result.cause[:20]

    smallest, tried = shrink(failed, fails, seconds)
    worlds.close()
    text = f"{smallest.text()}\n{last[smallest].text}\n{smallest!r}"
    return f"\nthe simplest of {tried} draws that fails too:\n{text}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, help="run this draw alone")
    parser.add_argument("--corner", choices=list(corners()), help="run this named draw alone")
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds to look for a simpler failure")
    parser.add_argument("--shrunk", type=int, default=1, help="how many failures are made simpler")
    parser.add_argument("--reuse", action="store_true", help="go on in a world where a draw failed")
    parser.add_argument("--corners", action="store_true", help="run the named draws")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.corner is not None:
        drawn = [(f"--corner {chosen.corner!r}", corners()[chosen.corner])]
    elif chosen.corners:
        drawn = [(f"--corner {name!r}", each) for name, each in corners().items()]
    elif chosen.seed is not None:
        drawn = [(f"--seed {chosen.seed}", draw(chosen.seed))]
    else:
        seeds = range(chosen.first_seed, chosen.first_seed + chosen.draws)
        drawn = [(f"--seed {seed}", draw(seed)) for seed in seeds]
    if len(drawn) == 1:
        print(drawn[0][1].text(), flush=True)
    report = run_draws(
        drawn,
        shrink_seconds=chosen.shrink,
        shrunk=chosen.shrunk,
        say=lambda text: print(text, flush=True),
        fresh=not chosen.reuse,
    )
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
