"""python -m benchmarks.clients: torchft's checkpoints and Megatron Core's weights, on four emulated hosts
with links of 250 Mbit/s, by what the packages bring themselves and by meshcast. Needs root, iproute2 and the
environments of `make test-clients CLIENTS="torchft megatron"`; a package without one is printed as NOT RUN,
and the command then fails. Writes benchmarks/results/clients.json and the table of docs/integrations.md;
takes five minutes, with nothing else running."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..cluster import Cluster, ClusterError, run_ranks
from ..machine import ROOT, machine
from ..page import replace

_RESULTS = ROOT / "benchmarks/results/clients.json"
_PAGE = ROOT / "docs/integrations.md"
_MARK = "<!-- {} of what python -m benchmarks.clients writes -->"
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
    """What rank 0 found (rounds.py)."""
    path = cluster.folder / "job.json"
    path.write_text(json.dumps({"rounds": rounds, "mbit": mbit, **options}))
    command = [str(python_of(client)), "-m", f"benchmarks.clients.{client}_rank", str(path)]
    env = {"PYTHONPATH": f"{ROOT / 'python'}:{ROOT}"}
    return json.loads(run_ranks(cluster, 1, command, limit=_LIMIT, env=env).splitlines()[-1])


def text(results: dict[str, Any]) -> str:
    """The tables of the page."""
    head = results["header"]
    lines = [
        (
            f"`{head['command']}`: {head['link_mbit']:g} Mbit/s each way, {head['cores']} cores, "
            f"torch {head['torch']}, medians of {head['rounds']} rounds by turns.\n"
            "The bound is that of the busiest link: what it takes in or sends, of the same bits once."
        )
    ]
    for name, found in results["jobs"].items():
        ours = next(way for title, way in found["ways"].items() if "eshcast" in title)
        lines += [
            f"\n{name}; bound {found['bound']:.2f} s ({found['nbytes'] / 2**20:.1f} MiB)\n",
            "|  | s | / bound | / meshcast | first call, s | CPU of all ranks, s | wrong bytes |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for title, way in found["ways"].items():
            cpu = sorted(way["cpu"])[len(way["cpu"]) // 2]
            lines.append(
                f"| {title} | {way['median']:.2f} | {way['median'] / found['bound']:.2f} | "
                f"{way['median'] / ours['median']:.2f} | {way['first']:.2f} | {cpu:.2f} | "
                f"{way['wrong_bytes']} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="after the first calls")
    parser.add_argument("--mbit", type=float, default=250.0, help="rate of a link each way")
    parser.add_argument("--no-publish", action="store_true", help="leave files as they are")
    args = parser.parse_args()
    if args.rounds < 1 or not args.mbit > 0:
        parser.error("--rounds must be 1 or more, --mbit positive")
    missing = sorted({client for client, _ in _JOBS.values() if not python_of(client).exists()})
    for client in missing:
        print(f"{client}: NOT RUN: make test-clients CLIENTS={client} makes its environment", file=sys.stderr)
    jobs: dict[str, Any] = {}
    try:
        with Cluster(_HOSTS, args.mbit) as cluster:
            for name, (client, options) in _JOBS.items():
                if client not in missing:
                    jobs[name] = measure(cluster, client, options, args.rounds, args.mbit)
    except ClusterError as error:
        print(f"benchmarks.clients did not run: {error}", file=sys.stderr)
        return 1
    head = {**machine("benchmarks.clients"), "link_mbit": args.mbit, "rounds": args.rounds}
    results = {"header": head, "jobs": jobs}
    print(text(results))
    if missing:
        return 1
    if not args.no_publish:
        _RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        replace(_PAGE, _MARK, text(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
