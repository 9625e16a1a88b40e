"""torchft's checkpoints and Megatron Core's weights, on four emulated hosts with links of 250 Mbit/s, by what
the packages bring themselves and by meshcast. Needs root, iproute2 and the environments of `make test-clients
CLIENTS="torchft megatron"`; a package without one is printed as NOT RUN, and the command then fails. Writes
benchmarks/results/clients.json and the table of docs/integrations.md; takes five minutes, with nothing else
running."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..cluster import Cluster, ClusterError, run_job
from ..harness import ROOT, Found, Page, command, machine, positive, table
from ..ranks import cpu_seconds, largest, total

_HOSTS = 4
_LIMIT = 400.0  # seconds for all rounds of one job
# What is moved: the package, its rank, what the job has besides.
_JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "torchft: a checkpoint of 48 MiB, one sender to three that join": ("torchft", {}),
    "Megatron Core: a GPT of degree 2, twice, to four replicas": ("megatron", {"degree": 1}),
    "Megatron Core: a GPT of degree 2, twice, to degree 4": ("megatron", {"degree": 4}),
}


def python_of(client: str) -> Path:
    return ROOT / "build" / "clients" / client / "bin" / "python"


def measure(cluster: Cluster, client: str, options: dict[str, Any], rounds: int, mbit: float) -> Any:
    """What rank 0 reports."""
    job = {"rounds": rounds, "mbit": mbit, **options}
    return run_job(
        cluster, 1, f"weights.clients_{client}:rank", job, limit=_LIMIT, python=str(python_of(client)),
        env={"PYTHONPATH": f"{ROOT / 'python'}:{ROOT}"},
    )["found"]  # fmt: skip


def text(results: dict[str, Any]) -> str:
    """The tables of the page."""
    head = results["header"]
    lines = [
        (
            f"`{command(head)}`: {head['link_mbit']:g} Mbit/s each way, {head['cores']} cores, "
            f"torch {head['torch']}, medians of {head['rounds']} rounds by turns.\n"
            "The bound is that of the busiest link: what it takes in or sends, of the same bits once."
        )
    ]
    for name, found in results["jobs"].items():
        ours = next(way for title, way in found["ways"].items() if "eshcast" in title)
        lines += [
            f"\n{name}; bound {found['bound']:.2f} s ({found['nbytes'] / 2**20:.1f} MiB)\n",
            table(
                ["", "s", "/ bound", "/ meshcast", "first call, s", "CPU of all ranks, s", "wrong bytes"],
                [
                    [
                        title, f"{way['median']:.2f}", f"{way['median'] / found['bound']:.2f}",
                        f"{way['median'] / ours['median']:.2f}", f"{way['first']:.2f}",
                        f"{sorted(way['cpu'])[len(way['cpu']) // 2]:.2f}", str(way["wrong_bytes"]),
                    ]
                    for title, way in found["ways"].items()
                ],
            ),
        ]  # fmt: skip
    return "\n".join(lines)


PAGE = Page("clients", "clients.json", "docs/integrations.md", text)
PAGES = [PAGE]


def main() -> int:
    options = PAGE.parser(__doc__)
    options.add_argument("--rounds", type=positive(int), default=5, help="after the first calls")
    options.add_argument("--mbit", type=positive(float), default=250.0, help="rate of a link each way")
    args = options.parse_args()
    missing = sorted({client for client, _ in _JOBS.values() if not python_of(client).exists()})
    for client in missing:
        print(f"{client}: NOT RUN: make test-clients CLIENTS={client} makes its environment", file=sys.stderr)
    jobs: dict[str, Any] = {}
    try:
        with Cluster(_HOSTS, args.mbit) as cluster:
            for name, (client, job) in _JOBS.items():
                if client not in missing:
                    jobs[name] = measure(cluster, client, job, args.rounds, args.mbit)
    except ClusterError as error:
        print(f"benchmarks clients did not run: {error}", file=sys.stderr)
        return 1
    head = {**machine("clients"), "link_mbit": args.mbit, "rounds": args.rounds}
    results = {"header": head, "jobs": jobs}
    print(text(results))
    if missing:
        return 1
    PAGE.finish(args, results)
    return 0


Way = Callable[[int], None]  # given the number of the round; over once this rank is through


def in_turns(ways: Mapping[str, Way], rounds: int, seen: Callable[[], int]) -> Found:
    """All ways by turns, in an order that changes. The first round has their first calls, and is kept apart.

    seen(): after each round and not timed, how many bytes are wrong on this rank; it also makes the values of
    the next round differ."""
    found: dict[str, dict[str, Any]] = {
        name: {"seconds": [], "cpu": [], "wrong_bytes": 0, "first": 0.0} for name in ways
    }
    number = 0
    for turn in range(rounds + 1):
        for name in random.Random(turn).sample(list(ways), len(ways)):
            number += 1
            seconds, cpu, wrong = _timed(ways[name], number, seen)
            one = found[name]
            one["wrong_bytes"] += wrong
            if turn == 0:
                one["first"] = seconds
            else:
                one["seconds"].append(seconds)
                one["cpu"].append(cpu)
    for one in found.values():
        one["median"] = statistics.median(one["seconds"])
    return found


def _timed(way: Way, number: int, seen: Callable[[], int]) -> tuple[float, float, int]:
    """Seconds of the slowest rank, CPU seconds and wrong bytes of all."""
    dist.barrier()
    used, begin = cpu_seconds(), time.perf_counter()
    way(number)
    seconds, used = time.perf_counter() - begin, cpu_seconds() - used
    return largest(seconds), total(used), int(total(float(seen())))
