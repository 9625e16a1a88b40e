"""python -m benchmarks.planner: how long plans take to make, and what the cost model predicts, up to 16,384
ranks.

Nothing is sent: the figures of the plans are predictions of the simulation, those of the planner are
measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from meshcast import Layout, Topology
from meshcast.planning.plan import Options, Plan, Problem
from torch.distributed.tensor import Replicate, Shard

from .machine import machine

_RANKS = (64, 512, 4096, 16384)  # of both meshes together
_PER_HOST = 8
_SHAPE = (1 << 14, 1 << 15)  # bfloat16: 1 GiB
_REPEATS = 3


def kinds(ranks: int) -> dict[str, tuple[Layout, Layout]]:
    """Between the two halves of the ranks, rows of 8."""
    rows = [list(range(first, first + _PER_HOST)) for first in range(0, ranks, _PER_HOST)]
    one, other = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    return {
        "rows of 8 to columns of 8, all hosts replicas": (
            Layout(one, [Replicate(), Shard(0)]), Layout(other, [Replicate(), Shard(1)]),
        ),
        "cut over all ranks to rows per host, replicas inside": (
            Layout(one, [Shard(0), Shard(1)]), Layout(other, [Shard(0), Replicate()]),
        ),
        "one rank to replicas on all others": (
            Layout([0], [Replicate()]), Layout(list(range(_PER_HOST, ranks)), [Replicate()]),
        ),
    }  # fmt: skip


def measure(ranks: int, kind: str, src: Layout, dst: Layout) -> dict[str, Any]:
    topology = Topology.uniform(_PER_HOST, 100)
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()  # below the cache of plans
        made = Plan([Problem(_SHAPE, torch.bfloat16, src, dst)], topology, Options())
        seconds.append(time.perf_counter() - start)
    return {
        "ranks": ranks, "kind": kind, "plan_seconds": statistics.median(seconds), "strategy": made.strategy,
        "tasks": len(made.tasks), "hops": len(made), "predicted": made.makespan,
        "lower_bound": made.lower_bound,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks | layouts | to plan, ms | strategy | tasks | hops | predicted, ms | predicted / bound |",
        "|---:|---|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['ranks']} | {row['kind']} | {1e3 * row['plan_seconds']:.3g} | {row['strategy']} | "
            f"{row['tasks']} | {row['hops']} | {1e3 * row['predicted']:.4g} | "
            f"{row['predicted'] / row['lower_bound']:.3f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=_RANKS, help="of both meshes together")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if any(ranks < 2 * _PER_HOST or ranks % (2 * _PER_HOST) for ranks in args.ranks):
        parser.error(f"--ranks: multiples of {2 * _PER_HOST}")
    rows = []
    for ranks in args.ranks:
        rows += [measure(ranks, kind, *layouts) for kind, layouts in kinds(ranks).items()]
    print(
        "# predictions of the cost model, nothing was sent; 8 ranks and 100 Gbit/s per host, 1 GiB\n"
        + table(rows)
    )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(
            json.dumps({"header": machine("benchmarks.planner"), "rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
