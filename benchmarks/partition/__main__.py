"""python -m benchmarks.partition: what `partition` proposes beside three obvious choices, measured and
simulated, on an emulated cluster of four hosts with two ranks each; compute timed by sleeps. Needs root and
iproute2.

Writes the raw results, then the table of docs/pipelining.md from them.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..cluster import Cluster, ClusterError, run_ranks
from ..machine import machine
from .choices import GBIT, HOST_RANKS, MODELS, choices, emulated
from .publish import RESULTS, publish, rows

_HOSTS = 4
_LIMIT = 1800.0  # seconds for everything


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.partition",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models", type=lambda text: text.split(";"), default=list(MODELS), help="split by ;"
    )
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--forward", type=float, default=0.6, help="seconds of a micro-batch through all layers on one rank"
    )
    parser.add_argument("--mbit", type=float, default=25.0, help="rate of a host's link, each way")
    parser.add_argument(
        "--repeats", type=int, default=5, help="rounds, in each of which every choice steps once"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="raw JSON")
    parser.add_argument("--no-publish", action="store_true", help="leave docs/ as they are")
    args = parser.parse_args()
    if args.microbatches < 1 or args.repeats < 1 or args.forward <= 0 or args.mbit <= 0:
        parser.error("all figures must be positive")
    for name in args.models:
        if name not in MODELS:
            parser.error(f"unknown model {name!r}; known are {'; '.join(MODELS)}")
    return args


def main() -> int:
    args = parse()
    header = {
        **machine("benchmarks.partition"),
        "hosts": _HOSTS,
        "host_ranks": HOST_RANKS,
        "microbatches": args.microbatches,
        "forward_seconds": args.forward,
        "link_mbit": args.mbit,
        "emulated_gbit": GBIT,
        "repeats": args.repeats,
    }
    results: dict[str, Any] = {"header": header, "models": {}}
    print("# " + ", ".join(f"{name} {value}" for name, value in header.items()), flush=True)
    begin, failed = time.monotonic(), False
    with tempfile.TemporaryDirectory(prefix="meshcast-partition-") as folder:
        models = {}
        for name in args.models:
            work = emulated(MODELS[name](), args.forward, args.mbit)
            models[name] = work, choices(work, _HOSTS * HOST_RANKS, args.microbatches)
        job = {
            "models": models, "microbatches": args.microbatches, "repeats": args.repeats, "folder": folder,
        }  # fmt: skip
        Path(folder, "job.pickle").write_bytes(pickle.dumps(job))
        found = Path(folder, "results.jsonl")

        def look() -> None:
            lines = found.read_text().splitlines(keepends=True) if found.exists() else []
            for line in lines[len(results["models"]) :]:
                if line.endswith("\n"):  # else it is being written
                    results["models"] |= (new := json.loads(line))
                    print("\n".join(rows(*next(iter(new.items())))), flush=True)

        try:
            with Cluster(_HOSTS, args.mbit, own_cores=False) as cluster:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.partition.worker",
                    str(Path(folder, "job.pickle")),
                ]
                run_ranks(cluster, HOST_RANKS, command, limit=_LIMIT, progress=look)
                look()
        except ClusterError as error:
            print(f"the benchmark did not run to its end: {error}", file=sys.stderr)
            failed = True
    if not results["models"]:
        return 1
    header["seconds"] = round(time.monotonic() - begin)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    if not args.no_publish and not failed:
        publish(results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
