"""python -m benchmarks.planner: how long plans take to make, and what the cost model predicts, up to 16,384
ranks, and for the weights of models that go from their trainer to their replicas.

Nothing is sent: the figures of the plans are predictions of the simulation, those of the planner are
measured. Times are processor time (user and system) of one core, so that they hold on a busy machine, too.
Memory is the peak of what a process of its own has beyond what it had before the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from meshcast import Layout, Topology
from meshcast.base.progress import Progress
from meshcast.planning.plan import Options, Plan, Problem
from torch.distributed.tensor import Replicate, Shard

from .machine import machine
from .models import PER_HOST, Fleet, llama, mixture

_RANKS = (64, 512, 4096, 16384)  # of both meshes together
_SHAPE = (1 << 14, 1 << 15)  # bfloat16: 1 GiB
_REPEATS = 3
_HOSTS = "8 ranks a host, which copy at 80 Gbit/s among themselves, and a NIC of 400 Gbit/s for each"
MULTICASTS = f"Multicasts in bfloat16: {_HOSTS}"
MIXTURES = (
    "Weights of Kimi K2, a mixture of 384 experts with a trillion parameters, bfloat16 cast to fp8 before it "
    "travels. Trained with 32 ranks of expert parallel, each expert cut by FSDP over the others, all else by "
    "FSDP over all; served by replicas of expert parallel 32, attention tensor parallel 8: " + _HOSTS
)
FLEETS = (Fleet(256, 128), Fleet(96, 160), Fleet(512, 256), Fleet(1024, 1024))
# Measured by their authors, on their machines; beside predictions the order of magnitude is what compares.
_ARTICLE = "https://research.perplexity.ai/articles/weight-transfer-for-rl-post-training-in-under-2-seconds"
PUBLISHED = f"""\
| what others measured | seconds |
|---|---:|
| Kimi K2, bfloat16 on 256 GPUs to fp8 on 128, RDMA writes by a static schedule \
([Perplexity]({_ARTICLE})) | 1.3 |
| Kimi K2, fp8, to 256 H20 in tensor parallel 16, broadcast \
([checkpoint-engine](https://github.com/MoonshotAI/checkpoint-engine)) | 16.04 |
| Kimi K2 to thousands of GPUs (the same) | about 20 |"""
WEIGHTS = (
    "Weights of a 70B Llama in bfloat16, from FSDP over 512 ranks to 64 replicas of tensor parallel 8: "
    + _HOSTS
)

COPIES = "1 GiB in bfloat16, one rank to replicas on all other hosts: how fast ranks of a host copy"

CAPTIONS = {"weights": WEIGHTS, "multicasts": MULTICASTS, "copies": COPIES, "mixtures": MIXTURES}


def kinds(ranks: int) -> dict[str, tuple[Layout, Layout]]:
    """Between the two halves of the ranks, rows of 8."""
    rows = [list(range(first, first + PER_HOST)) for first in range(0, ranks, PER_HOST)]
    one, other = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    return {
        "rows of 8 to columns of 8, all hosts replicas": (
            Layout(one, [Replicate(), Shard(0)]), Layout(other, [Replicate(), Shard(1)]),
        ),
        "cut over all ranks to rows per host, replicas inside": (
            Layout(one, [Shard(0), Shard(1)]), Layout(other, [Shard(0), Replicate()]),
        ),
        "one rank to replicas on all others": (
            Layout([0], [Replicate()]), Layout(list(range(PER_HOST, ranks)), [Replicate()]),
        ),
    }  # fmt: skip


def multicasts() -> dict[str, tuple[int, Problem]]:
    """Where NICs are faster than copies inside hosts: how many ranks, and the problem."""

    def replicas(first: int, ranks: int) -> Layout:
        return Layout(list(range(first, first + ranks)), [Replicate()])

    rows = Layout(list(range(128)), [Shard(0)])
    one = Problem((1 << 16, 1 << 16), torch.bfloat16, replicas(0, 1), replicas(PER_HOST, 64))
    many = Problem((8192, 8192), torch.bfloat16, rows, replicas(128, 128))
    return {
        "65536 x 65536, one rank to 64 replicas": (65, one),
        "8192 x 8192, Shard(0) over 128 to 128 replicas": (256, many),
    }


def copies() -> dict[str, Topology]:
    """Slower than a NIC takes in, and faster."""
    return {
        "copies at 80 Gbit/s, a NIC of 400 for each rank": Topology.uniform(
            PER_HOST, 400, nics_per_host=PER_HOST
        ),
        "copies at 1,600 Gbit/s, a NIC of 100 for each host": Topology.uniform(
            PER_HOST, 100, local_gbps=1600
        ),
    }


def measure_copies(ranks: int, kind: str, topology: Topology) -> dict[str, Any]:
    layouts = kinds(ranks)["one rank to replicas on all others"]
    return _row(ranks, kind, [Problem(_SHAPE, torch.bfloat16, *layouts)], topology, 1)


def measure(ranks: int, kind: str, src: Layout, dst: Layout) -> dict[str, Any]:
    problem = Problem(_SHAPE, torch.bfloat16, src, dst)
    return _row(ranks, kind, [problem], Topology.uniform(PER_HOST, 100), _REPEATS)


def measure_fast_nics(kind: str, problems: list[Problem], ranks: int = 1024) -> dict[str, Any]:
    topology = Topology.uniform(PER_HOST, 400, nics_per_host=PER_HOST)
    return _row(ranks, kind, problems, topology, _REPEATS if len(problems) == 1 else 1)


def measure_mixture(fleet: Fleet) -> dict[str, Any]:
    problems = mixture(fleet)
    kind = f"{fleet.trainer} to {fleet.inference}, all {len(problems)} tensors, one plan"
    return measure_fast_nics(kind, problems, fleet.trainer + fleet.inference)


def _row(ranks: int, kind: str, problems: list[Problem], topology: Topology, repeats: int) -> dict[str, Any]:
    seconds = []
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1]) * resource.getpagesize()
    for _ in range(repeats):
        start = time.process_time()  # below the cache of plans
        made = Plan(problems, topology, Options())
        seconds.append(time.process_time() - start)
    return {
        "ranks": ranks, "kind": kind, "plan_seconds": statistics.median(seconds),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
        "strategy": made.strategy, "tasks": len(made.tasks), "hops": len(made), "predicted": made.makespan,
        "lower_bound": made.lower_bound, "filling_bound": made.filling_bound,
    }  # fmt: skip


def alone(
    look: Callable[[], None], name: str, measure_row: Callable[..., dict[str, Any]], *args: Any
) -> dict[str, Any]:
    """The row, measured in a child: a peak of memory is that of a whole process. This process must have no
    threads. look: is called now and then while it waits."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(measure_row(*args)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    while not select.select([reader], [], [], 0.5)[0]:
        look()
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError(f"{name}: the process that planned has died, or the plan was refused")
    row = dict(json.loads(text))
    print(f"{row['ranks']} ranks, {row['kind']}: {row['plan_seconds']:.2f} s", file=sys.stderr)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    columns = "ranks|layouts|plan, ms|MiB|strategy|tasks|hops|predicted, ms|predicted / bound|with filling"
    lines = [f"| {columns.replace('|', ' | ')} |", "|---:|---|---:|---:|---|---:|---:|---:|---:|---:|"]
    for row in rows:
        memory = row.get("peak_bytes")  # results of before have none
        filling = row.get("filling_bound", row["lower_bound"])
        lines.append(
            f"| {row['ranks']} | {row['kind']} | {1e3 * row['plan_seconds']:.3g} | "
            f"{'-' if memory is None else format(memory / 2**20, '.0f')} | {row['strategy']} | "
            f"{row['tasks']} | {row['hops']} | {1e3 * row['predicted']:.4g} | "
            f"{row['predicted'] / row['lower_bound']:.3f} | {row['predicted'] / filling:.3f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=_RANKS, help="of both meshes together")
    parser.add_argument("--only", default="", help="only rows whose layouts have this in their name")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if any(ranks < 2 * PER_HOST or ranks % (2 * PER_HOST) for ranks in args.ranks):
        parser.error(f"--ranks: multiples of {2 * PER_HOST}")
    measures: dict[str, list[tuple[Any, ...]]] = {
        "rows": [
            (kind, measure, ranks, kind, *layouts)
            for ranks in args.ranks
            for kind, layouts in kinds(ranks).items()
        ],
        "weights": [(kind, measure_fast_nics, kind, problems) for kind, problems in llama().items()],
        "multicasts": [
            (kind, measure_fast_nics, kind, [each], ranks) for kind, (ranks, each) in multicasts().items()
        ],
        "copies": [
            (kind, measure_copies, ranks, kind, topology)
            for kind, topology in copies().items()
            for ranks in args.ranks
        ],
        "mixtures": [(f"{fleet.trainer} to {fleet.inference}", measure_mixture, fleet) for fleet in FLEETS],
    }
    chosen = {name: [call for call in calls if args.only in call[0]] for name, calls in measures.items()}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    with Progress("plans", sum(map(len, chosen.values())), ticks=False) as shown:
        for name, calls in chosen.items():
            for call in calls:
                results[name].append(alone(shown.look, *call))
                shown.done()
    print("# predictions of the cost model, nothing was sent")
    for name, caption in {"rows": "8 ranks and 100 Gbit/s per host, 1 GiB", **CAPTIONS}.items():
        if results[name]:
            print(f"\n# {caption}\n{table(results[name])}")
    print(f"\n{PUBLISHED}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        header = {"header": machine("benchmarks.planner")}
        args.out.write_text(json.dumps(header | results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
