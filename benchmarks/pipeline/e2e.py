"""The paper's jobs end to end on an emulated cluster, what each part of the method adds, and what
torch.distributed.pipelining takes. Needs root and iproute2.

Two hosts, a stage on each. Links are slowed so that transfer over compute is what it is in the paper's jobs.
real: the models of the examples, one rank for each stage. timed: the paper's four ranks for each stage, whose
compute is a sleep as long as the real one. Writes the raw results, then the chart and the tables of
docs/end_to_end.md. --choices compares the schedule that chooses itself with each that it chooses among
instead, and writes the table of docs/pipelining.md.
"""

from __future__ import annotations

import argparse
import sys
import time

from meshcast.bench.report import overload

from ..cluster import Cluster, ClusterError, run_job, set_rate
from ..harness import Found, machine, names, positive
from .e2e_page import CHOICES_PAGE, PAGE, choice_table, rows_table
from .e2e_tasks import AUTO, BASELINE, CHOICES, FREE, FREE_DELAYED, ROWS, gpt, unet

_LIMIT = 1200.0  # seconds for one start of all ranks
_HOSTS = 2
# Data x tensor parallel ranks of a stage with timed compute: those of the paper's jobs on eight accelerators.
_MESHES = {"gpt": (2, 2), "unet": (1, 4)}
_RANKS = {"calibrate": 1, "real": 1, "timed": 4}  # of a stage
_FAST = 1000.0  # Mbit/s while compute is timed
_TIMED = 100.0  # Mbit/s of the links between ranks with timed compute: what the cores carry with ease
_EFFICIENCY = 0.956  # of what a link is set to, its frames' headers left out; what it is gets measured
# Of each value that crosses the cut, by size: hidden state and skip connections.
_SHARES = {"gpt": [1.0], "unet": [0.035, 0.138, 0.276, 0.551]}


def parse() -> argparse.Namespace:
    models, computes = ["gpt", "unet"], ["real", "timed"]
    options = PAGE.parser(__doc__)
    options.add_argument("--models", type=names(models, "model"), default=models)
    options.add_argument("--compute", type=names(computes, "compute"), default=computes)
    options.add_argument("--rows", type=lambda text: text.split(";"), help="separated by ;; default: all")
    options.add_argument("--choices", action="store_true", help="auto beside the schedules that it knows")
    options.add_argument("--microbatches", type=int, default=12)
    options.add_argument("--repeats", type=positive(int), default=3)
    args = options.parse_args()
    known = [row.name for row in (CHOICES if args.choices else ROWS)]
    args.rows = args.rows or known
    for row in args.rows:
        if row not in known:
            options.error(f"--rows {row}: known are {'; '.join(known)}")
    if args.microbatches < 4:
        options.error("--microbatches must be 4 or more")
    # What the others are measured against.
    needed = {AUTO} if args.choices else {BASELINE, FREE, FREE_DELAYED}
    args.rows = [name for name in known if name in needed.union(args.rows)]
    return args


def header(args: argparse.Namespace) -> Found:
    """What a reader must know to take the figures for what they are."""
    return {
        **machine("e2e"),
        "microbatches": args.microbatches,
        "repeats": args.repeats,
    }


class Session:
    """Starts the ranks again and again on one cluster, and keeps what they report."""

    def __init__(self, cluster: Cluster, args: argparse.Namespace, results: Found) -> None:
        self._cluster, self._args, self._results = cluster, args, results
        self._times: Found = {}
        self._nbytes: dict[str, int] = {}
        self._ratios = {job["model"]: job["ratio"] for job in results["paper"]}

    def run(self) -> None:
        args = self._args
        self._start("calibrate", args.models, _FAST)
        if "real" in args.compute:
            for name in args.models:
                transfer = self._ratios[name] * self._compute(name)
                self._start("real", [name], self._nbytes[name] * 8e-6 / transfer / _EFFICIENCY)
        if "timed" in args.compute:
            self._start("timed", args.models, _TIMED)

    def _compute(self, name: str) -> float:
        """Seconds of forward and backward of a stage."""
        times = self._times[name]
        return (sum(times["forward"]) + sum(times["backward"])) / _HOSTS

    def _start(self, compute: str, models: list[str], mbit: float) -> None:
        args, ranks = self._args, _RANKS[compute]
        set_rate(self._cluster, mbit)
        job = {
            "compute": compute, "models": models, "mbit": mbit,
            "meshes": {name: _MESHES[name] if ranks > 1 else (1, 1) for name in models},
            "ranks_per_stage": ranks, "microbatches": args.microbatches,
            "repeats": 2 if compute == "calibrate" else args.repeats, "rows": args.rows,
            "choices": args.choices,
            "ratios": self._ratios, "shares": _SHARES,
            "times": {name: self._given(name, compute) for name in models if name in self._times},
        }  # fmt: skip
        run_job(self._cluster, ranks, "pipeline.e2e_rank:rank", job, limit=_LIMIT, heard=self._heard)

    def _given(self, name: str, compute: str) -> dict[str, list[float]]:
        """The times of compute as found; where compute is timed, those of a job cut into even stages."""
        found = self._times[name]
        late = [
            w / b * whole
            for w, b, whole in zip(
                found["split_weight"], found["split_backward"], found["backward"], strict=True
            )
        ]
        if compute == "real":
            return {"forward": found["forward"], "backward": found["backward"], "weight": late}
        mean = {key: sum(found[key]) / _HOSTS for key in ("forward", "backward")}
        share = late[-1] / found["backward"][-1]  # the first stage has no input gradient
        return {
            "forward": [mean["forward"]] * _HOSTS,
            "backward": [mean["backward"]] * _HOSTS,
            "weight": [mean["backward"] * share] * _HOSTS,
        }

    def _heard(self, kind: str, value: Found) -> None:
        if kind == "times":
            self._times[value["model"]] = value
            self._nbytes[value["model"]] = value["nbytes"]
            self._results["times"].append(value)
            print(f"# {value['model']}: forward and backward {self._compute(value['model']):.4f} s")
        elif kind == "links":
            self._results["links"].append(value)
            if value["compute"] != "calibrate" and (why := overload(value)):
                raise ClusterError(why)
            print(
                f"# links of {value['mbit']:.1f} Mbit/s carry {value['efficiency']:.1%} of that, "
                f"all at once {value['slowest_all_at_once']:.1%} of what one carries alone",
                flush=True,
            )
        else:
            self._results["tables"].append(value)
            print(f"\n{choice_table([value]) if self._args.choices else rows_table(value)}\n", flush=True)


def main() -> int:
    args = parse()
    jobs = {"gpt": gpt(), "unet": unet()}
    found = [
        {
            "model": name, "name": job.name, "samples": job.samples, "flops": job.flops, "peak": job.peak,
            "nbytes": job.nbytes, "compute": job.compute, "transfer": job.transfer, "ratio": job.ratio,
            "microbatches": job.microbatches,
        }
        for name, job in jobs.items()
    ]  # fmt: skip
    results: Found = {
        "header": header(args), "paper": found, "links": [], "times": [], "tables": [],
    }  # fmt: skip
    print("# " + ", ".join(f"{k} {v}" for k, v in results["header"].items()), flush=True)
    for job in jobs.values():
        print(f"# {job.name}: {job.transfer:.3f} s over {job.compute:.3f} s is {job.ratio:.3f}", flush=True)
    begin, failed = time.monotonic(), False
    try:
        # A rank that computes leaves its transfers the other core where that has nothing to do.
        with Cluster(_HOSTS, _FAST, own_cores=False) as cluster:
            Session(cluster, args, results).run()
    except ClusterError as error:
        print(f"the benchmark did not run to its end: {error}", file=sys.stderr)
        failed = True
    if not results["tables"]:
        return 1
    results["header"]["seconds"] = round(time.monotonic() - begin)
    if args.out or not failed:
        (CHOICES_PAGE if args.choices else PAGE).finish(args, results)
    return 1 if failed else 0
