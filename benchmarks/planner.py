"""python -m benchmarks.planner: how long plans take to make, and what the cost model predicts, up to 16,384
ranks, and for the weights of a model that go from its trainer to its replicas.

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
_HOSTS = "8 ranks a host, which copy at 80 Gbit/s among themselves, and a NIC of 400 Gbit/s for each"
MULTICASTS = f"Multicasts in bfloat16: {_HOSTS}"
WEIGHTS = (
    "Weights of a 70B Llama in bfloat16, from FSDP over 512 ranks to 64 replicas of tensor parallel 8: "
    + _HOSTS
)


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


def weights(layers: int = 80) -> dict[str, list[Problem]]:
    """Tensors of a Llama of 70 billion parameters, and all of them, from FSDP over 512 ranks to 64 replicas
    of tensor parallel 8."""
    src = Layout(list(range(512)), [Shard(0)])
    hosts = [list(range(first, first + _PER_HOST)) for first in range(512, 1024, _PER_HOST)]
    rows, columns, whole = (Layout(hosts, [Replicate(), each]) for each in (Shard(0), Shard(1), Replicate()))

    def tensor(*shape: int, dst: Layout) -> Problem:
        return Problem(shape, torch.bfloat16, src, dst)

    query, key, gate = (tensor(n, 8192, dst=rows) for n in (8192, 1024, 28672))
    out, down = (tensor(8192, n, dst=columns) for n in (8192, 28672))
    norm, embedding = tensor(8192, dst=whole), tensor(128256, 8192, dst=rows)
    layer = [query, key, key, out, gate, gate, down, norm, norm]
    batch = layers * layer + [embedding, embedding, norm]
    return {
        "8192 x 8192 to Shard(0)": [query], "8192 x 8192 to Shard(1)": [out],
        "8192 x 28672 to Shard(1)": [down], "8192, replicated": [norm],
        "128256 x 8192 to Shard(0)": [embedding],
        f"all {len(batch)} tensors, one plan": batch,
    }  # fmt: skip


def multicasts() -> dict[str, tuple[int, Problem]]:
    """Where NICs are faster than copies inside hosts: how many ranks, and the problem."""

    def replicas(first: int, ranks: int) -> Layout:
        return Layout(list(range(first, first + ranks)), [Replicate()])

    rows = Layout(list(range(128)), [Shard(0)])
    one = Problem((1 << 16, 1 << 16), torch.bfloat16, replicas(0, 1), replicas(_PER_HOST, 64))
    many = Problem((8192, 8192), torch.bfloat16, rows, replicas(128, 128))
    return {
        "65536 x 65536, one rank to 64 replicas": (65, one),
        "8192 x 8192, Shard(0) over 128 to 128 replicas": (256, many),
    }


def measure(ranks: int, kind: str, src: Layout, dst: Layout) -> dict[str, Any]:
    problem = Problem(_SHAPE, torch.bfloat16, src, dst)
    return _row(ranks, kind, [problem], Topology.uniform(_PER_HOST, 100), _REPEATS)


def measure_fast_nics(kind: str, problems: list[Problem], ranks: int = 1024) -> dict[str, Any]:
    topology = Topology.uniform(_PER_HOST, 400, nics_per_host=_PER_HOST)
    return _row(ranks, kind, problems, topology, _REPEATS if len(problems) == 1 else 1)


def _row(ranks: int, kind: str, problems: list[Problem], topology: Topology, repeats: int) -> dict[str, Any]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()  # below the cache of plans
        made = Plan(problems, topology, Options())
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
    sent = [measure_fast_nics(kind, problems) for kind, problems in weights().items()]
    spread = [measure_fast_nics(kind, [each], ranks) for kind, (ranks, each) in multicasts().items()]
    for ranks in args.ranks:
        rows += [measure(ranks, kind, *layouts) for kind, layouts in kinds(ranks).items()]
    print(
        "# predictions of the cost model, nothing was sent; 8 ranks and 100 Gbit/s per host, 1 GiB\n"
        + table(rows)
        + f"\n\n# {WEIGHTS}\n"
        + table(sent)
        + f"\n\n# {MULTICASTS}\n"
        + table(spread)
    )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        results = {
            "header": machine("benchmarks.planner"),
            "rows": rows,
            "weights": sent,
            "multicasts": spread,
        }
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
