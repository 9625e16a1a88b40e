"""Messages between two ranks of this machine by every call of meshcast that
moves some, over UCX and through shared memory, beside torch's own over gloo, Open MPI's, UCX's own and
commux's; then up to 64 ranks for connections, and many private groups for threads. Writes
benchmarks/results/calls.json, the chart and the tables of docs/transports.md; takes up to fifteen
minutes, with nothing else running. What is a part of that, or has another tree's calls in it, is only
printed, and kept with --json."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ..harness import ROOT, machine
from ..peers.programs import OPEN_MPI, ucp_missing, ucp_origin
from .cases import (
    CONNECTS,
    GROUPS,
    SIZES,
    TRANSPORTS,
    WAYS,
    WORLDS,
    Way,
    against,
    carrier_of,
    is_against,
    sizes,
)
from .page import PAGE
from .rounds import Pair, Started, connects, idle_groups, messages

_CONNECT_ROUNDS = 3
_OURS = ("ucx", "shm", "gloo")  # carriers of meshcast


def _peers(commux: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """By peer outside: its version, or why it cannot be measured."""
    versions, left_out = {}, {}
    missing = OPEN_MPI.missing()
    if missing:
        left_out["mpi"] = left_out["mpi-shm"] = missing
    else:
        said = subprocess.run([OPEN_MPI.launcher, "--version"], capture_output=True, text=True, check=True)
        versions["mpi"] = f"Open MPI {said.stdout.splitlines()[0].split()[-1]}"
    missing = ucp_missing()
    if missing:
        left_out["ucp"] = missing
    else:
        versions["ucp"] = f"UCX of {ucp_origin()}"
    asked = (
        "import importlib.metadata as m; import torch, commux; "
        "print(f'commux {m.version(\"commux\")} with torch {torch.__version__}')"
    )
    if commux is None:
        left_out["commux"] = "no interpreter was given that has it (`--commux`)"
    else:
        said = subprocess.run([commux, "-c", asked], capture_output=True, text=True)
        if said.returncode == 0:
            versions["commux"] = said.stdout.strip()
        else:
            left_out["commux"] = said.stderr.strip().splitlines()[-1]
    return versions, left_out


def _asked(args: argparse.Namespace, way: Way) -> bool:
    """Returns whether a way is to be measured, where nothing is missing."""
    return (args.ways is None or way.kind in args.ways) and bool(set(way.transports) & set(args.transports))


@contextmanager
def _pairs(ways: list[str], args: argparse.Namespace) -> Iterator[dict[str, Pair]]:
    """The processes of ways, by carrier."""
    with ExitStack() as ends:
        found = {}
        for carrier in dict.fromkeys(carrier_of(key) for key in ways):
            tree = args.against if is_against(carrier) else ROOT
            found[carrier] = Pair(carrier, args.commux if carrier == "commux" else sys.executable, tree)
            ends.callback(found[carrier].close)
        yield found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    versions, left_out = _peers(args.commux)
    asked = {key: way for key, way in WAYS.items() if _asked(args, way)}
    left_out = {carrier: why for carrier, why in left_out.items() if carrier in map(carrier_of, asked)}
    ways = [key for key in asked if carrier_of(key) not in left_out]
    if args.against:
        ways += [against(key) for key in ways if carrier_of(key) in _OURS]
    head = {
        **machine("calls"),
        "repeats": args.repeats,
        "peers": ", ".join(versions.values()) or "no peers",
    }
    if args.commux:
        head["command"] = head["command"].replace(args.commux, "PYTHON")
    results: dict[str, Any] = {"header": head, "ways": ways, "left_out": left_out}
    with _pairs(ways, args) as pairs:
        results["sizes"] = messages(pairs, ways, args.sizes, args.repeats)
    return results if args.only == "messages" else results | _worlds(args, left_out)


def _worlds(args: argparse.Namespace, left_out: dict[str, str]) -> dict[str, Any]:
    carriers = [carrier for carrier in WORLDS if carrier not in left_out]
    started = Started(
        {carrier: args.commux if carrier == "commux" else sys.executable for carrier in carriers}
    )
    worlds = [world for world in CONNECTS if world <= args.most_ranks]
    try:
        return {
            "carriers": carriers,
            "connects": connects(started.run, carriers, min(args.repeats, _CONNECT_ROUNDS), worlds),
            "groups": idle_groups(started.run, GROUPS),
        }
    finally:
        started.close()


def _parsed() -> argparse.Namespace:
    options = PAGE.parser(__doc__)
    options.add_argument(
        "--repeats", "--rounds", type=int, default=5, help="rounds of messages; connections have three"
    )
    options.add_argument("--commux", metavar="PYTHON", help="an interpreter that has commux and its torch")
    options.add_argument("--most-ranks", type=int, default=max(CONNECTS), help="of a world; at least 16")
    part = options.add_argument_group("parts")
    part.add_argument("--only", choices=["messages"], help="no connections and no threads")
    part.add_argument("--sizes", type=int, nargs="+", metavar="KIB")
    kinds = list(dict.fromkeys(way.kind for way in WAYS.values()))
    part.add_argument("--ways", nargs="+", choices=kinds, metavar="WAY", help=f"of {', '.join(kinds)}")
    part.add_argument("--transports", nargs="+", choices=list(TRANSPORTS), default=list(TRANSPORTS))
    part.add_argument(
        "--against", type=Path, metavar="TREE", help="another tree of meshcast, built, whose calls take turns"
    )
    args = options.parse_args()
    if args.repeats < 1 or args.most_ranks < 16:
        options.error("--repeats must be 1 or more, --most-ranks 16 or more")
    if args.against is not None:
        args.against = args.against.resolve()
        if not list((args.against / "python/meshcast").glob("_C.*.so")):
            options.error(f"--against: {args.against} is no tree of meshcast that has been built")
    if args.only or args.sizes or args.ways or args.against or len(args.transports) == 1:
        args.no_publish = True
    if args.sizes and min(args.sizes) < 1:
        options.error("--sizes are KiB, 1 or more")
    args.sizes = sizes(args.sizes) if args.sizes else SIZES
    return args


def main() -> int:
    args = _parsed()
    results = measure(args)
    print(PAGE.text(results))
    PAGE.finish(args, results)
    return 0
