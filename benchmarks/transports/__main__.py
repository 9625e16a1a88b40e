"""python -m benchmarks.transports: messages between hosts over UCX and over gloo, beside torch's own over
gloo, Open MPI's and commux's. Two ranks of this machine, as two hosts; then up to 64 of them for
connections, and many private groups for threads. Writes benchmarks/results/transports.json, the chart and
the tables of docs/transports.md; takes up to eight minutes, with nothing else running."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from ..machine import ROOT, machine
from ..page import publish
from ..peers.mpi import OPEN_MPI
from .cases import CONNECTS, GROUPS, SIZES, WAYS
from .chart import draw
from .page import text
from .pair import Pair
from .rounds import Started, connects, idle_groups, messages

_RESULTS = ROOT / "benchmarks/results/transports.json"
_PAGE = ROOT / "docs/transports.md"
_CHART = ROOT / "docs/images/transports.svg"
_MARK = "<!-- {} of what python -m benchmarks.transports writes -->"
_CONNECT_ROUNDS = 3


def _peers(commux: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """By peer outside: its version, or why it cannot be measured."""
    versions, left_out = {}, {}
    missing = OPEN_MPI.missing()
    if missing:
        left_out["mpi"] = missing
    else:
        said = subprocess.run([OPEN_MPI.launcher, "--version"], capture_output=True, text=True, check=True)
        versions["mpi"] = f"Open MPI {said.stdout.splitlines()[0].split()[-1]}"
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


def measure(args: argparse.Namespace) -> dict[str, Any]:
    versions, left_out = _peers(args.commux)
    ways = [way for way in WAYS if way not in left_out]
    pythons = {way: args.commux if way == "commux" else sys.executable for way in ways}
    head = {
        **machine("benchmarks.transports"),
        "repeats": args.repeats,
        "peers": ", ".join(versions.values()) or "no peers",
    }
    if args.commux:
        head["command"] = head["command"].replace(args.commux, "PYTHON")
    results: dict[str, Any] = {"header": head, "ways": ways, "left_out": left_out}
    pairs: list[Pair] = []
    try:
        for way in ways:
            pairs.append(Pair(way, pythons[way]))
        results["sizes"] = messages(pairs, SIZES, args.repeats)
    finally:
        for pair in pairs:
            pair.close()
    started = Started(pythons)
    worlds = [world for world in CONNECTS if world <= args.most_ranks]
    try:
        results["connects"] = connects(started.run, ways, min(args.repeats, _CONNECT_ROUNDS), worlds)
        results["groups"] = idle_groups(started.run, GROUPS)
    finally:
        started.close()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transports", description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="rounds of messages; connections have three")
    parser.add_argument("--commux", metavar="PYTHON", help="an interpreter that has commux and its torch")
    parser.add_argument("--most-ranks", type=int, default=max(CONNECTS), help="of a world; at least 16")
    parser.add_argument("--no-publish", action="store_true", help="leave files as they are")
    parser.add_argument("--redraw", action="store_true", help="tables and chart from the committed figures")
    args = parser.parse_args()
    if args.repeats < 1 or args.most_ranks < 16:
        parser.error("--repeats must be 1 or more, --most-ranks 16 or more")
    results = json.loads(_RESULTS.read_text()) if args.redraw else measure(args)
    print(text(results))
    if not args.no_publish:
        publish(results, _RESULTS, _PAGE, _MARK, text(results), draw, _CHART)
    return 0


if __name__ == "__main__":
    sys.exit(main())
