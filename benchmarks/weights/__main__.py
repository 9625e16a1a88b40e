"""python -m benchmarks.weights: the weights of real models from four ranks that train to four that serve, on
two emulated hosts each, over links of 250 Mbit/s: WeightSync, full_tensor() with a broadcast, and
torch.distributed.checkpoint through files. Needs root, iproute2 and transformers, which tells names and
shapes. Writes benchmarks/results/weights.json, the chart and the tables of docs/end_to_end.md; takes seven
minutes, with nothing else running."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from meshcast.bench.report import overload

from ..cluster import Cluster, ClusterError, Network, run_ranks
from ..machine import ROOT, machine
from ..page import publish
from .chart import draw
from .models import MODELS, shapes
from .page import WAYS, text
from .ways import files_folder

_RESULTS = ROOT / "benchmarks/results/weights.json"
_PAGE = ROOT / "docs/end_to_end.md"
_CHART = ROOT / "docs/images/weights.svg"
_MARK = "<!-- {} of what python -m benchmarks.weights writes -->"
_HOSTS, _RANKS_PER_HOST = 4, 2
_LIMIT = 480.0  # seconds for all ranks

Found = dict[str, Any]


def measure(network: Network, models: Mapping[str, Found], ways: list[str], repeats: int) -> Found:
    """What rank 0 found (rank.py). models: shapes by name of a model and of a tensor."""
    with files_folder() as files:
        job = {
            "models": models, "ways": ways, "repeats": repeats, "mbit": network.rates, "files": files,
            "ranks_per_host": _RANKS_PER_HOST,
        }  # fmt: skip
        path = network.folder / "job.json"
        path.write_text(json.dumps(job))
        command = [sys.executable, "-m", "benchmarks.weights.rank", str(path)]
        return json.loads(run_ranks(network, _RANKS_PER_HOST, command, limit=_LIMIT).splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=3, help="rounds by turns, after the first calls")
    parser.add_argument("--mbit", type=float, default=250.0, help="rate of a link each way")
    parser.add_argument("--no-publish", action="store_true", help="leave files as they are")
    parser.add_argument("--redraw", action="store_true", help="tables and chart from the committed figures")
    args = parser.parse_args()
    if args.repeats < 1 or not args.mbit > 0:
        parser.error("--repeats must be 1 or more, --mbit positive")
    if args.redraw:
        results = json.loads(_RESULTS.read_text())
    else:
        try:
            models = {name: shapes(MODELS[name]) for name in args.models}
            with Cluster(_HOSTS, args.mbit) as cluster:
                found = measure(cluster, models, args.ways, args.repeats)
        except (ClusterError, ImportError) as error:
            print(f"benchmarks.weights did not run: {error}", file=sys.stderr)
            return 1
        head = {**machine("benchmarks.weights"), "link_mbit": args.mbit, "repeats": args.repeats}
        results = {"header": head, **found}
    print(text(results))
    if why := overload(results["calibration"]):
        print(f"DO NOT REPORT: {why}", file=sys.stderr)
        return 1
    if not args.no_publish:
        publish(results, _RESULTS, _PAGE, _MARK, text(results), draw, _CHART)
    return 0


if __name__ == "__main__":
    sys.exit(main())
