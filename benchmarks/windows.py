"""python -m benchmarks.windows: what it costs to move a state dict in windows of so many bytes, each with a
plan of its own (max_bytes_in_flight), by the planner's predictions. All tensors of a Llama of 70 billion
parameters, from 512 ranks to 512; a quarter of a minute, one core. Writes benchmarks/results/windows.json and
the table of docs/planner.md."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from meshcast.base import checks
from meshcast.planning.plan import Options, Plan, Problem
from meshcast.topology import Topology

from .machine import ROOT, machine
from .models import PER_HOST, llama
from .page import replace

_RESULTS = ROOT / "benchmarks/results/windows.json"
_PAGE = ROOT / "docs/planner.md"
_MARK = "<!-- {} of what python -m benchmarks.windows writes -->"
_GIB = 1 << 30
_LIMITS = (None, 32 * _GIB, 8 * _GIB, 2 * _GIB)  # bytes in flight
_TOPOLOGY = Topology.uniform(PER_HOST, 400, nics_per_host=PER_HOST)


def windows(batch: list[Problem], limit: int | None) -> list[tuple[Problem, ...]]:
    """In order, as reshard_state_dict cuts them: a larger tensor goes alone."""
    found: list[list[Problem]] = [[]]
    total = 0
    for problem in batch:
        size = checks.total_bytes(problem.shape, problem.dtype)
        if found[-1] and limit is not None and total + size > limit:
            found.append([])
            total = 0
        found[-1].append(problem)
        total += size
    return [tuple(each) for each in found]


def measure(batch: list[Problem], limit: int | None, bound: float | None) -> dict[str, Any]:
    """bound: of the whole, seconds; None where this is the whole."""
    plans: dict[tuple[int, ...], Plan] = {}  # tensors that are alike are one object
    seconds, start = 0.0, time.process_time()
    cut = windows(batch, limit)
    for window in cut:
        key = tuple(map(id, window))
        if key not in plans:
            plans[key] = Plan(list(window), _TOPOLOGY, Options())
        seconds += plans[key].makespan
    whole = next(iter(plans.values())).lower_bound if bound is None else bound
    return {
        "limit": limit, "windows": len(cut), "distinct": len(plans), "predicted": seconds, "bound": whole,
        "plan_seconds": time.process_time() - start,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| bytes in flight | windows | distinct plans | predicted, s | / bound of the whole | to plan, s |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        limit = "all" if row["limit"] is None else f"{row['limit'] / _GIB:g} GiB"
        lines.append(
            f"| {limit} | {row['windows']} | {row['distinct']} | {row['predicted']:.4f} | "
            f"{row['predicted'] / row['bound']:.4f} | {row['plan_seconds']:.1f} |"
        )
    return "\n".join(lines)


def main() -> int:
    argparse.ArgumentParser(prog="python -m benchmarks.windows", description=__doc__).parse_args()
    batch = list(llama().values())[-1]
    rows = [measure(batch, None, None)]
    rows += [measure(batch, limit, rows[0]["bound"]) for limit in _LIMITS[1:]]
    results = {**machine("benchmarks.windows"), "rows": rows}
    _RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    text = f"`python -m benchmarks.windows`, one core:\n\n{table(rows)}"
    replace(_PAGE, _MARK, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
