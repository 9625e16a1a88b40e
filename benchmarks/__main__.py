"""python -m benchmarks: reshard cases on an emulated cluster, as ratios to the lower bound and to what people
use today. Needs root and iproute2."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from .cases import CASES, RANKS_PER_HOST, find
from .cluster import Cluster, ClusterError, run_ranks
from .methods import METHODS
from .report import problems, row, table

ROOT = Path(__file__).resolve().parent.parent
_LIMIT = 3600.0  # seconds for all cases


def header(args: argparse.Namespace) -> dict[str, Any]:
    """What a reader must know to take the figures for what they are."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return {
        "command": "python -m benchmarks " + " ".join(sys.argv[1:]),
        "commit": commit,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "link_mbit": args.mbit,
        "ranks_per_host": RANKS_PER_HOST,
        "repeats": args.repeats,
    }


def names(known: list[str], what: str):
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {what} {name!r}; known are {', '.join(known)}")
        return chosen

    return parse


def parse() -> argparse.Namespace:
    groups = list(dict.fromkeys(case.group for case in CASES))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--cases", type=names([*groups, *(case.name for case in CASES)], "case"),
        default=["n-to-m", "1-to-m"], help="names of cases or of groups of cases, separated by commas",
    )  # fmt: skip
    parser.add_argument("--methods", type=names(list(METHODS), "method"), default=list(METHODS))
    parser.add_argument("--mbit", type=float, default=250, help="rate of each host's link, Mbit/s each way")
    parser.add_argument("--seconds", type=float, default=0.4, help="what the bounds are about; sizes follow")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write raw JSON here")
    args = parser.parse_args()
    if args.mbit <= 0 or args.seconds <= 0 or args.repeats < 1:
        parser.error("--mbit, --seconds and --repeats must be positive")
    return args


def main() -> int:
    args = parse()
    cases = find(args.cases)
    results: dict[str, Any] = {"header": header(args), "cases": []}
    print("# " + ", ".join(f"{k} {v}" for k, v in results["header"].items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="meshcast-bench-") as folder:
        job, lines = Path(folder, "job.json"), Path(folder, "results.jsonl")
        job.write_text(
            json.dumps(
                {
                    "cases": [case.name for case in cases], "methods": args.methods, "repeats": args.repeats,
                    "seconds": args.seconds, "out": str(lines),
                }
            )
        )  # fmt: skip
        lines.touch()
        seen = 0

        def progress() -> None:
            nonlocal seen
            for line in lines.read_text().splitlines()[seen:]:
                seen += 1
                take(json.loads(line), results, args.methods)

        try:
            with Cluster(max(case.hosts for case in cases), args.mbit) as cluster:
                command = [sys.executable, "-m", "benchmarks.worker", str(job)]
                run_ranks(cluster, RANKS_PER_HOST, command, limit=_LIMIT, progress=progress)
        except ClusterError as error:
            print(f"benchmarks did not run: {error}", file=sys.stderr)
            return 1
    found = problems(results)
    print("\n".join(found))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if found else 0


def take(line: dict[str, Any], results: dict[str, Any], methods: list[str]) -> None:
    """Adds one line of the worker's output and prints it."""
    if "calibration" in line:
        results["calibration"] = line["calibration"]
        print("# calibration: " + ", ".join(f"{k} {v:.4g}" for k, v in line["calibration"].items()))
        print(table([], methods), flush=True)
        return
    results["cases"].append(line["case"])
    print(row(line["case"], methods), flush=True)


if __name__ == "__main__":
    sys.exit(main())
