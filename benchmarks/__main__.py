"""python -m benchmarks: the paper's mesh-to-mesh cases on an emulated cluster. Needs root and iproute2."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from .cases import CASES, RANKS_PER_HOST
from .cluster import Cluster, ClusterError, run_ranks
from .methods import METHODS

ROOT = Path(__file__).resolve().parent.parent


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: median time over the lower bound, per case and method."""
    lines = [
        "| case | layouts | MiB | bound, s | " + " | ".join(METHODS) + " | wrong elements |",
        "|---|---|---:|---:|" + "---:|" * len(METHODS) + "---:|",
    ]
    for r in results:
        ratios = [f"{statistics.median(r['seconds'][m]) / r['lower_bound']:.2f}" for m in METHODS]
        layouts = f"`{r['src']}` to `{r['dst']}`"
        lines.append(
            f"| {r['case']} | {layouts} | {r['nbytes'] / 2**20:.0f} | {r['lower_bound']:.3f} | "
            + " | ".join(ratios)
            + f" | {r['wrong_elements']} |"
        )
    return "\n".join(lines)


def header(mbit: float, repeats: int) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return {
        "commit": commit, "cores": os.cpu_count(), "kernel": platform.release(), "torch": torch.__version__,
        "link_mbit": mbit, "ranks_per_host": RANKS_PER_HOST, "repeats": repeats,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--cases", default=",".join(c.name for c in CASES), help="comma-separated case numbers"
    )
    parser.add_argument("--mbit", type=float, default=250, help="rate of each host's link, Mbit/s each way")
    parser.add_argument(
        "--seconds", type=float, default=0.4, help="about how long the bound of case 1 is; sizes follow"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write raw JSON here")
    args = parser.parse_args()
    chosen = [c for c in CASES if c.name in args.cases.split(",")]
    unknown = set(args.cases.split(",")) - {c.name for c in CASES}
    if unknown:
        parser.error(f"--cases: unknown {sorted(unknown)}; known are {[c.name for c in CASES]}")
    factor = max(1, round(0.5 * 2**31 / (args.mbit * 1e6 / 8 * args.seconds)))
    head, results = header(args.mbit, args.repeats), []
    print("# " + ", ".join(f"{k} {v}" for k, v in head.items()), flush=True)
    for case in chosen:
        try:
            with Cluster(case.hosts, args.mbit) as cluster:
                command = [
                    "-m",
                    "benchmarks.worker",
                    "--case",
                    case.name,
                    "--factor",
                    str(factor),
                    "--repeats",
                    str(args.repeats),
                ]
                output = run_ranks(cluster, RANKS_PER_HOST, command, limit=600)
        except ClusterError as error:
            print(f"case {case.name} did not run: {error}", file=sys.stderr)
            return 1
        results.append(json.loads(next(line for line in output.splitlines() if line.startswith("{"))))
        print(
            table(results).splitlines()[-1] if len(results) > 1 else table(results),
            flush=True,
        )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"header": head, "results": results}, indent=1) + "\n")
    return 1 if any(r["wrong_elements"] for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
