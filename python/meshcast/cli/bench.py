"""The command `bench`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from ..errors import LayoutError

if TYPE_CHECKING:
    from ..bench.cases import Case

_LISTED = ("name", "group", "shape", "notation")
_MOST_SECONDS = 3600
_LEGEND = (
    "S and R are of tensor dimensions: in 2x4:S1RR mesh dimension 1 shards tensor dimension 0, in "
    "torch's words 2x4:Replicate(),Shard(0)"
)


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("case", nargs="*", help="names of cases or of groups of cases; none: list them")
    parser.add_argument("--methods", help="columns of the table, separated by commas (default: all)")
    parser.add_argument("--seconds", type=float, default=0.3, help="what bounds are cut down to (0.3)")
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds (5)")
    parser.add_argument("--json", action="store_true", help="print the cases, or what was measured, as JSON")


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure reshard cases on the job's own ranks: torchrun --nproc-per-node 4 -m meshcast bench CASE ..."""
    from ..bench.cases import CASES, find
    from ..bench.methods import METHODS

    if not arguments.case:
        if arguments.json:
            print(json.dumps([{name: getattr(case, name) for name in _LISTED} for case in CASES], indent=2))
            return 0
        for case in CASES:
            print(f"{case.name:<36} {case.group:<11} {case.notation}")
        print(_LEGEND)
        return 0
    try:
        cases = find(arguments.case)
    except ValueError as error:
        raise LayoutError(str(error)) from None
    methods = list(METHODS) if arguments.methods is None else arguments.methods.split(",")
    for method in methods:
        if method not in METHODS:
            raise LayoutError(f"--methods: unknown {method!r}; known are {', '.join(METHODS)}")
    if not 0 < arguments.seconds <= _MOST_SECONDS or arguments.repeats < 1:
        raise LayoutError(f"--seconds must be above 0, at most {_MOST_SECONDS}, and --repeats 1 or more")
    world = int(os.environ.get("WORLD_SIZE") or "0")
    needed = max(case.ranks[-1] for case in cases) + 1
    if world < needed:
        started = f"{world} were" if world > 1 else "none was" if not world else "one was"
        raise LayoutError(
            f"these cases need {needed} ranks, and {started} started: torchrun --nproc-per-node {needed} -m "
            "meshcast bench ..."
        )
    return _measure(cases, methods, arguments)


def _measure(cases: list[Case], methods: list[str], arguments: argparse.Namespace) -> int:
    import torch.distributed as dist

    from ..base.progress import track
    from ..bench.measure import measure
    from ..bench.report import details
    from ..resharding.measure import measure_topology

    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    wrong, everything = 0, []
    try:
        topology = measure_topology()
        first = dist.get_rank() == 0
        if first and not arguments.json:
            print(f"# {topology!r}", flush=True)
        for case in track(cases, "cases", ticks=False):
            found = measure(case.scaled(topology, arguments.seconds), topology, methods, arguments.repeats)
            wrong += sum(found["wrong_bytes"].values())
            everything.append(found)
            if first and not arguments.json:
                print(details(found), flush=True)
        if first and arguments.json:
            print(json.dumps({"topology": json.loads(topology.to_json()), "cases": everything}, indent=2))
    finally:
        dist.destroy_process_group()
    if wrong:
        print(f"meshcast bench: {wrong} wrong bytes", file=sys.stderr)
    return 1 if wrong else 0
