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
from meshcast import Topology
from meshcast.bench.cases import CASES, RANKS_PER_HOST, find
from meshcast.bench.methods import METHODS
from meshcast.bench.report import calibration_text, problems, row, table

from .cluster import Cluster, ClusterError, run_ranks
from .peers.mpi import NOT_MEASURED, PEERS, MpiPeer

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
        "nics": args.nics,
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
    known = [*METHODS, *(peer.name for peer in PEERS)]
    parser.add_argument("--methods", type=names(known, "method"), default=known, help="columns of the table")
    parser.add_argument(
        "--mbit", type=rates, default=[250.0], help="rate of a link, Mbit/s each way; or one for each host"
    )
    parser.add_argument("--nics", type=int, default=1, help="links per host, 1 to 4")
    parser.add_argument("--seconds", type=float, default=0.4, help="what the bounds are about; sizes follow")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write raw JSON here")
    args = parser.parse_args()
    if args.seconds <= 0 or args.repeats < 1:
        parser.error("--seconds and --repeats must be positive")
    hosts = max(case.hosts for case in find(args.cases))
    if len(args.mbit) == 1:
        args.mbit *= hosts
    if len(args.mbit) != hosts:
        parser.error(f"--mbit: {len(args.mbit)} rates for {hosts} hosts")
    return args


def rates(text: str) -> list[float]:
    found = [float(rate) for rate in text.split(",")]
    if min(found) <= 0:
        raise argparse.ArgumentTypeError("rates must be positive")
    return found


def main() -> int:
    args = parse()
    cases = find(args.cases)
    peers = [peer for peer in PEERS if peer.name in args.methods]
    for missing in [*(peer.missing() for peer in peers), *(f"not measured: {note}" for note in NOT_MEASURED)]:
        if missing:
            print(f"# {missing}")
    peers = [peer for peer in peers if not peer.missing()]
    results: dict[str, Any] = {"header": header(args), "cases": []}
    print("# " + ", ".join(f"{k} {v}" for k, v in results["header"].items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="meshcast-bench-") as folder:
        job = {
            "cases": [case.name for case in cases], "methods": [m for m in args.methods if m in METHODS],
            "peers": bool(peers), "repeats": args.repeats, "seconds": args.seconds, "mbit": args.mbit,
            "nics": args.nics, "folder": folder,
        }  # fmt: skip
        Path(folder, "job.json").write_text(json.dumps(job))
        try:
            with Cluster(len(args.mbit), args.mbit, args.nics) as cluster:
                collector = Collector(Path(folder), cluster, args, peers, results)
                command = [sys.executable, "-m", "benchmarks.worker", str(Path(folder, "job.json"))]
                run_ranks(cluster, RANKS_PER_HOST, command, limit=_LIMIT, progress=collector.look)
        except (ClusterError, RuntimeError) as error:
            print(f"benchmarks did not run: {error}", file=sys.stderr)
            return 1
    found = problems(results)
    print("\n".join(found))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if found else 0


class Collector:
    """Takes the worker's results as they come, lets the peers of other kinds run in between, and prints."""

    def __init__(
        self, folder: Path, cluster: Cluster, args: argparse.Namespace, peers: list[MpiPeer],
        results: dict[str, Any],
    ) -> None:  # fmt: skip
        self._folder, self._cluster, self._args, self._peers = folder, cluster, args, peers
        self._results, self._seen = results, 0

    def look(self) -> None:
        """Handles what the worker has written since the last look."""
        path = self._folder / "results.jsonl"
        for line in path.read_text().splitlines()[self._seen :] if path.exists() else []:
            self._seen += 1
            found = json.loads(line)
            if "calibration" in found:
                self._results["calibration"] = found["calibration"]
                print(f"# {calibration_text(self._results)}")
                print(table([], self._args.methods), flush=True)
            else:
                self._take(found["case"])

    def _take(self, measured: dict[str, Any]) -> None:
        topology = Topology.from_json(self._results["calibration"]["topology"])
        (case,) = find([measured["name"]])
        case = case.scaled(topology, self._args.seconds)
        for peer in self._peers:
            # A warm-up and one run tell what the run costs; the fast ones are repeated.
            found = peer.run(self._cluster, case, topology, 1)
            if found["seconds"][0] < 3 * measured["lower_bound"]:
                found = peer.run(self._cluster, case, topology, self._args.repeats)
            measured["seconds"][peer.name] = found["seconds"]
            measured["busy"][peer.name] = found["busy"]
            measured["wrong_elements"][peer.name] = found["wrong_elements"]
        self._results["cases"].append(measured)
        print(row(measured, self._args.methods), flush=True)
        (self._folder / f"go {case.name}").touch()


if __name__ == "__main__":
    sys.exit(main())
