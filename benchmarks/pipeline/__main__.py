"""python -m benchmarks.pipeline: pipeline schedules on an emulated cluster, one stage on each host, compute
timed by sleeps; measured beside simulated, and beside torch.distributed.pipelining. Needs root and iproute2.

Writes the raw results, then the picture and the tables of docs/pipelining.md from them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..cluster import Cluster, ClusterError, run_ranks
from ..machine import machine
from .chain import join_neighbours
from .methods import METHODS
from .publish import RESULTS, publish, row, table_head

_LIMIT = 900.0  # seconds for everything


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = [method.name for method in METHODS]
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--forward", type=float, default=0.1, help="seconds; a backward takes twice that")
    parser.add_argument("--transfers", type=_shares, default=[0.1, 0.25, 0.5, 0.75, 1.0], help="over forward")
    parser.add_argument("--methods", type=lambda text: text.split(";"), default=known, help="separated by ;")
    parser.add_argument("--mbit", type=float, default=50.0, help="rate of a link, each way")
    parser.add_argument("--repeats", type=int, default=2, help="steps of ours; torch's are timed once")
    parser.add_argument("--out", type=Path, default=RESULTS, help="raw JSON")
    parser.add_argument("--no-publish", action="store_true", help="leave docs/ as they are")
    args = parser.parse_args()
    if args.stages < 2 or args.microbatches < 1 or args.repeats < 1 or args.forward <= 0 or args.mbit <= 0:
        parser.error("--stages must be 2 or more, all other figures positive")
    for name in args.methods:
        if name not in known:
            parser.error(f"unknown method {name!r}; known are {'; '.join(known)}")
    return args


def _shares(text: str) -> list[float]:
    shares = [float(share) for share in text.split(",")]
    if min(shares) <= 0:
        raise argparse.ArgumentTypeError("transfer times must be positive")
    return shares


def header(args: argparse.Namespace) -> dict[str, Any]:
    """What a reader must know to take the figures for what they are."""
    return {
        **machine("benchmarks.pipeline"),
        "stages": args.stages,
        "microbatches": args.microbatches,
        "forward_seconds": args.forward,
        "link_mbit": args.mbit,
        "repeats": args.repeats,
    }


def main() -> int:
    args = parse()
    results: dict[str, Any] = {"header": header(args), "points": []}
    print("# " + ", ".join(f"{k} {v}" for k, v in results["header"].items()), flush=True)
    begin, failed = time.monotonic(), False
    with tempfile.TemporaryDirectory(prefix="meshcast-pipeline-") as folder:
        job = {
            "microbatches": args.microbatches, "forward": args.forward, "transfers": args.transfers,
            "methods": args.methods, "mbit": args.mbit, "repeats": args.repeats, "folder": folder,
        }  # fmt: skip
        Path(folder, "job.json").write_text(json.dumps(job))
        try:
            with Cluster(args.stages, args.mbit, own_cores=False) as cluster:
                join_neighbours(cluster, args.mbit)
                collector = Collector(Path(folder, "results.jsonl"), results)
                command = [sys.executable, "-m", "benchmarks.pipeline.worker", str(Path(folder, "job.json"))]
                run_ranks(cluster, 1, command, limit=_LIMIT, progress=collector.look)
                collector.look()
        except ClusterError as error:
            print(f"the benchmark did not run to its end: {error}", file=sys.stderr)
            failed = True
    if not results["points"]:
        return 1
    results["header"]["seconds"] = round(time.monotonic() - begin)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results) + "\n")
    if not args.no_publish:
        publish(results)
    return 1 if failed else 0


class Collector:
    """Takes the worker's results as they come, and prints them."""

    def __init__(self, path: Path, results: dict[str, Any]) -> None:
        self._path, self._results, self._seen = path, results, 0

    def look(self) -> None:
        """Handles what the worker has written since the last look."""
        if not self._path.exists():
            return
        for line in self._path.read_text().splitlines(keepends=True)[self._seen :]:
            if not line.endswith("\n"):
                return  # being written
            self._seen += 1
            ((kind, value),) = json.loads(line).items()
            if kind == "point":
                self._results["points"].append(value)
                if len(self._results["points"]) == 1:
                    print(table_head(value))
                print(row(value), flush=True)
            else:
                self._results[kind] = value
                print(f"# {kind}: " + ", ".join(f"{k} {v:.4g}" for k, v in value.items()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
