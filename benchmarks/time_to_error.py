"""python -m benchmarks.time_to_error: how soon the survivors of a lost rank know.

Killed: one rank of three to five, at a random moment of each kind, in rounds that a seed draws
(tests/fault/kills.py, which also judges them). Frozen: the cases of tests/fault/cases_lost_peer.py. Writes
benchmarks/results/time_to_error.json, which keeps one run of each transport, and the tables of
docs/errors.md. A thousand kills take about twenty minutes.

PYTHONPATH=python:tests:. python -m benchmarks.time_to_error
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

from fault.kills import MOMENTS, Outcome, draw, ranks
from multiproc.harness import run_world

from .machine import ROOT, machine
from .page import replace

_RESULTS = ROOT / "benchmarks/results/time_to_error.json"
_PAGE = ROOT / "docs/errors.md"
_MARK = "<!-- {} of what python -m benchmarks.time_to_error writes -->"
_CASES = ROOT / "tests/fault/cases_lost_peer.py"
_TRANSPORTS = ("ucx", "shared memory", "gloo")
_BEFORE = "before it came"  # a row beside the moments
_FROZEN_LIMIT = 4.0  # seconds that the call allows itself


def _killed(transport: str, kills: int, seed: int) -> dict[str, Any]:
    head = machine("benchmarks.time_to_error")
    rows: dict[str, list[Outcome]] = {phase: [] for phase in (*MOMENTS, _BEFORE)}
    with ranks() as parent:
        for number in range(kills):
            phase = list(MOMENTS)[number % len(MOMENTS)]
            outcome = parent.run(draw(seed + number, transport, phase))
            rows[_BEFORE if outcome.before else phase].append(outcome)
            for text in outcome.wrong:
                print(f"{transport}, {phase}, seed {seed + number}: {text}", file=sys.stderr, flush=True)
    return {
        "header": head,
        "date": datetime.date.today().isoformat(),
        "seed": seed,
        "load": round(os.getloadavg()[2]),  # processes that want a core, over the last 15 minutes
        "rows": {phase: _row(found) for phase, found in rows.items() if found},
        "all": _row([each for phase, found in rows.items() if phase != _BEFORE for each in found]),
    }


def _row(found: list[Outcome]) -> dict[str, Any]:
    times = sorted(time for each in found for time in each.times)
    return {
        "kills": len(found),
        "survivors": len(times),
        "p50": _quantile(times, 0.5),
        "p99": _quantile(times, 0.99),
        "max": times[-1] if times else None,
        "wrong": sum(bool(each.wrong) for each in found),
        "ended": max(time for each in found for time in each.ended),
    }


def _quantile(ordered: list[float], part: float) -> float | None:
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)] if ordered else None


def _frozen() -> dict[str, Any]:
    """The worst of the survivors' times, by what the bytes go through."""
    found: dict[str, Any] = {}
    for shm in ("1", "0"):
        env = {"VICTIM": "1", "FAULT": "frozen", "MOMENT": "middle", "LIMIT": str(_FROZEN_LIMIT)}
        world = run_world(_CASES, 3, limit=150.0, env={**env, "MESHCAST_SHM": shm})
        world.check("lost_peer", [0, 2])
        values = [world.value("lost_peer", rank) for rank in (0, 2)]
        found["shared memory" if shm == "1" else "ucx"] = {
            key: max(value[key] for value in values) for key in ("elapsed", "destroyed")
        }
    return found


def text(results: dict[str, Any]) -> str:
    lines = [
        "| data go through | death came | kills | p50, s | p99, s | max, s | not as promised | end, s |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    said = []
    for transport, run in results["killed"].items():
        head = run["header"]
        said.append(f"- {transport}: `{head['command']}`,")
        said.append(
            f"  {run['date']}, commit {head['commit']}, {head['cores']} cores "
            f"with a load of {run['load']}, kernel {head['kernel']}, torch {head['torch']}. Seeds from "
            f"{run['seed']} on."
        )
        for phase, row in [*run["rows"].items(), ("at any of these", run["all"])]:
            lines.append(
                f"| {transport} | {phase} | {row['kills']} | {_shown(row['p50'])} | {_shown(row['p99'])} "
                f"| {_shown(row['max'])} | {row['wrong']} | {row['ended']:.2f} |"
            )
    lines += [
        "",
        f"| frozen in the middle, limit of the call {_FROZEN_LIMIT:g} s | raised after, s | ended in, s |",
        "|---|---:|---:|",
    ]
    for through, row in results["frozen"].items():
        lines.append(f"| {through} | {row['elapsed']:.2f} | {row['destroyed']:.2f} |")
    return "\n".join([*lines, "", *said])


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.time_to_error", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000, help="for each transport")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each has the next one")
    parser.add_argument("--transports", nargs="*", choices=_TRANSPORTS, default=_TRANSPORTS)
    parser.add_argument("--frozen", action="store_true", help="the frozen ranks as well")
    parser.add_argument("--no-publish", action="store_true", help="leave files as they are")
    args = parser.parse_args()
    results: dict[str, Any] = {"killed": {}, "frozen": {}}
    if Path(_RESULTS).exists():
        results = json.loads(_RESULTS.read_text())
    for transport in args.transports:
        results["killed"][transport] = _killed(transport, args.kills, args.seed)
    if args.frozen:
        results["frozen"] = _frozen()
    print(text(results))
    if not args.no_publish:
        _RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        replace(_PAGE, _MARK, text(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
