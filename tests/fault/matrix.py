"""Faults by moments: one of three to five ranks fails, and what the others do is judged here. Each must raise
a typed error that names it, in time, give back no wrong byte, and then end.

A round is drawn from a seed, so that it can be run again:

    PYTHONPATH=python:tests:. python -m fault.matrix 17 --transport gloo --fault stop --moment middle

Moments are by the clock, which any build has, or by a fault point (csrc/core/common/fault_point.h), which
`make faults` builds. Every round has a control: the same without the fault, which must not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from fault.judge import Outcome, judge
from fault.rounds import BY_CLOCK, BY_POINT, ENDING, FAULTS, TRANSPORTS, Round, combinations, control, draw
from multiproc.fork_server import Forked, environment

__all__ = ["FAULT_BUILD", "ROOT", "Ranks", "ranks"]

ROOT = Path(__file__).resolve().parents[2]
FAULT_BUILD = ROOT / "build/faults/python"
_ROUND_LIMIT = 60.0  # seconds
_TRIES = 20  # of a rank that is to fail while it ends, each time twice as soon


class Ranks:
    """Where rounds are run, one after the other."""

    def __init__(self, process: subprocess.Popen[str], store: dist.TCPStore) -> None:
        self._process, self._store, self._number = process, store, 0

    def run(self, round_: Round, *, fails_like: str = "") -> Outcome:
        """fails_like: a control is judged as a round with this fault."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for _ in range(_TRIES):
            self._number += 1
            head = {"port": self._store.port, "number": self._number, "round_limit": _ROUND_LIMIT}
            self._process.stdin.write(json.dumps({**asdict(round_), **head}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, f"the ranks' parent has gone: {self._process.poll()}"
            said = json.loads(answer)
            if round_.moment != "ending" or round_.fault == "none" or _failed_in_time(said[round_.victim]):
                judged = replace(round_, fault=fails_like) if fails_like else round_
                return judge(judged, said, self._came(round_))
            round_ = replace(round_, delay=round_.delay / 2)
        raise AssertionError(f"{_TRIES} times the rank ended before it could fail: {round_}")

    def fails_without_fault(self, round_: Round) -> str:
        """Runs the control. What the assertion of the round finds there must be that nothing has failed; ""
        where it is just that."""
        outcome = self.run(control(round_), fails_like=round_.fault)
        expected = [] if round_.moment in ENDING else list(range(round_.world))
        missing = [
            rank
            for rank in expected
            if rank != round_.victim
            and not any(text.startswith(f"rank {rank} never") for text in outcome.wrong)
        ]
        if not outcome.wrong or missing:
            return f"the control passes on ranks {missing}: {outcome.wrong}"
        others = [text for text in outcome.wrong if " never " not in text and "did not fail" not in text]
        return f"the control fails otherwise: {others}" if others else ""

    def _came(self, round_: Round) -> bool:
        """Whether the victim had posted that it is there, when it failed."""
        if round_.store >= 0:
            return True
        group = ",".join(map(str, range(round_.world)))
        key = f"round {self._number}/0//meshcast/{group}/0/member/{round_.victim}"
        return bool(self._store.check([key]))


def _failed_in_time(said: dict[str, Any]) -> bool:
    """Whether a rank failed before it had ended. One that was frozen may end well once it goes on."""
    failed_at = said["failed_at"]
    return said["status"] != 0 or (failed_at is not None and failed_at < said["ended"])


@contextmanager
def ranks(*, points: bool) -> Iterator[Ranks]:
    """The parent of the ranks of all rounds; it is gone when the block is left. points: of the build that has
    them."""
    built = FAULT_BUILD if points else ROOT / "python"
    assert list((built / "meshcast").glob("_C.*.so")), (
        f"{built} has no _C: run `make {'faults' if points else ''}`"
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(built), env["PYTHONPATH"]])
    # Torch's store looks up the name of each client, which takes seconds where no name server answers.
    env["RES_OPTIONS"] = "attempts:0"
    process = Forked(
        [sys.executable, str(Path(__file__).with_name("matrix_ranks.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        text=True,
    )
    try:
        yield Ranks(process, store)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=_ROUND_LIMIT + 10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fault.matrix", description="Runs rounds and their controls, until the time is up."
    )
    parser.add_argument("seed", type=int, help="of the first round; each has the next one")
    parser.add_argument("--transport", nargs="*", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--fault", nargs="*", choices=FAULTS, default=FAULTS)
    parser.add_argument("--moment", nargs="*", choices=[*BY_CLOCK, *BY_POINT], default=[*BY_CLOCK, *BY_POINT])
    parser.add_argument("--times", type=int, default=1, help="rounds of each combination")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no round begins")
    parser.add_argument("--rows-to-columns", action="store_true", help="from each rank to each")
    parser.add_argument("--no-control", action="store_true")
    args = parser.parse_args()
    found = combinations(args.transport, args.fault, args.moment) * args.times
    random.Random(args.seed).shuffle(found)
    end, done, bad = time.monotonic() + args.seconds, 0, 0
    times: list[float] = []
    with ranks(points=True) as parent:
        for number, (transport, fault, moment) in enumerate(found):
            if time.monotonic() > end:
                break
            round_ = draw(args.seed + number, transport, fault, moment, rows_to_columns=args.rows_to_columns)
            outcome = parent.run(round_)
            times += outcome.times if not outcome.before else []
            wrong = [*outcome.wrong, "" if args.no_control else parent.fails_without_fault(round_)]
            done += 1
            bad += any(wrong)
            if any(wrong):
                print(round_, *filter(None, wrong), f"seconds: {outcome.times}", sep="\n  ", flush=True)
    times.sort()
    known = [f"{times[int(len(times) * part)]:.3f}" for part in (0.5, 0.99)] if times else []
    print(f"{done} rounds, {bad} not as promised; known after (p50, p99, max): {known} {times[-1:]} s")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
