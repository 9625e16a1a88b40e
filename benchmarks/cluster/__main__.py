"""python -m benchmarks.cluster up|run|down: an emulated cluster by hand. Needs root and iproute2.

run  --hosts 4 --ranks-per-host 2 --mbit 250 -- python train.py    every rank with torchrun's environment
up   --hosts 4 --mbit 1000,250,250,250 --nics 2                    stays until Ctrl-C, prints the names
down                                                               removes what killed owners left behind
"""

from __future__ import annotations

import argparse
import signal
import sys

from .launch import run_ranks
from .network import Cluster, ClusterError, remove_stale


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("up", "run"):
        sub = commands.add_parser(name)
        sub.add_argument("--hosts", type=int, default=2)
        sub.add_argument("--nics", type=int, default=1, help="links per host, 1 to 4")
        sub.add_argument("--mbit", type=_rates, default=[250.0], help="rate of each link, or one per host")
        if name == "run":
            sub.add_argument("--ranks-per-host", type=int, default=1)
            sub.add_argument("--limit", type=float, default=600, help="seconds")
            sub.add_argument("program", nargs="+", help="after --: what every rank runs")
    commands.add_parser("down")
    args = parser.parse_args()
    if args.command == "run":  # ended from outside, it cleans up behind itself as after an error
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if args.command == "down":
            print("\n".join(remove_stale()) or "nothing left behind")
            return 0
        rates = args.mbit[0] if len(args.mbit) == 1 else args.mbit
        with Cluster(args.hosts, rates, args.nics) as cluster:
            if args.command == "run":
                print(run_ranks(cluster, args.ranks_per_host, args.program, limit=args.limit), end="")
                return 0
            for host in range(cluster.hosts):
                addresses = " ".join(cluster.address(host, nic) for nic in range(cluster.nics))
                print(f"host {host}: ip netns exec {cluster.namespace(host)} ...   {addresses}", flush=True)
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
            return 0
    except ClusterError as error:
        print(f"benchmarks.cluster: {error}", file=sys.stderr)
        return 2


def _rates(text: str) -> list[float]:
    rates = [float(rate) for rate in text.split(",")]
    if not rates or min(rates) <= 0:
        raise argparse.ArgumentTypeError("positive rates in Mbit/s, separated by commas")
    return rates


if __name__ == "__main__":
    # Blocked from the start, so that no moment is left in which it would end the process uncleaned.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if "up" in sys.argv[1:2] else set())
    sys.exit(main())
