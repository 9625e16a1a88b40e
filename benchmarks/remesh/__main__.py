"""python -m benchmarks.remesh: how long `meshcast.elastic.remesh` takes beside its bound, where a rank of a
job dies and where one joins. Four emulated hosts of two ranks, links of 250 Mbit/s; the state is that of a
transformer's encoder under hybrid sharding and AdamW. Needs root and iproute2; takes two minutes, with
nothing else running."""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from meshcast.bench.report import overload

from ..cluster import Cluster, ClusterError, run_ranks
from ..machine import machine

_HOSTS, _RANKS_PER_HOST = 4, 2
_LIMIT = 600.0  # seconds for all ranks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.remesh", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="deaths and joins, by turns")
    parser.add_argument("--layers", type=int, default=8, help="of the encoder, 38 MB of state each")
    parser.add_argument("--mbit", type=float, default=250.0, help="rate of a link each way")
    args = parser.parse_args()
    if args.rounds < 1 or args.layers < 1 or not args.mbit > 0:
        parser.error("--rounds and --layers must be 1 or more, --mbit positive")
    command = [sys.executable, "-m", "benchmarks.remesh.rank", json.dumps(vars(args))]
    try:
        with Cluster(_HOSTS, args.mbit) as cluster:
            found = json.loads(run_ranks(cluster, _RANKS_PER_HOST, command, limit=_LIMIT).splitlines()[-1])
    except ClusterError as error:
        print(f"benchmarks.remesh did not run: {error}", file=sys.stderr)
        return 1
    print(", ".join(f"{what} {said}" for what, said in machine("benchmarks.remesh").items()))
    print(f"{found['tensors']} tensors, {found['nbytes'] / 1e6:.0f} MB; links of {args.mbit:.0f} Mbit/s\n")
    print("| | bound | first | median | most | median / bound |\n|---|---:|---:|---:|---:|---:|")
    for name, event in found["events"].items():
        seconds, bound = event["seconds"], event["bound"]
        middle = statistics.median(seconds)
        print(
            f"| {name} | {bound:.2f} s | {seconds[0]:.2f} s | {middle:.2f} s | {max(seconds):.2f} s "
            f"| {middle / bound:.3f} |"
        )
    if why := overload(found["calibration"]):
        print(f"DO NOT REPORT: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
