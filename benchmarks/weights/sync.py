"""The weights of real models from four ranks that train to four that serve, on two emulated hosts each, over
links of 250 Mbit/s: WeightSync, full_tensor() with a broadcast, and torch.distributed.checkpoint through
files. Needs root, iproute2 and transformers, which tells names and shapes. Writes
benchmarks/results/weights.json, the chart and the tables of docs/end_to_end.md; takes seven minutes, with
nothing else running."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from meshcast.bench.measure import SLOW, busy
from meshcast.bench.report import calibration_text, overload
from meshcast.topology import Topology

from ..cluster import Cluster, ClusterError, Network, run_job
from ..harness import Found, Page, machine, new_figure, origin, positive, save_chart, table
from ..ranks import Report, Steps, calibrated, cpu_seconds, largest, peak_above, total
from .ways import MODELS, TRAINERS, WAYS, Way, Weights, files_folder, shapes

_HOSTS, _RANKS_PER_HOST = 4, 2
_LIMIT = 480.0  # seconds for all ranks
_IDLE = 5.0  # seconds over which the CPU time of ranks that do nothing is taken
_SLOW_ROUNDS = 1  # of a way that takes more than SLOW bounds


def rank(job: Found, report: Report) -> None:
    links = calibrated(job["ranks_per_host"], job["mbit"])
    topology = links.topology(job["ranks_per_host"], 1)
    with Steps("calls", len(job["models"]) * len(job["ways"]) * (1 + job["repeats"])) as counted:
        models = [
            _Measured(job, topology, name, shapes).run(counted) for name, shapes in job["models"].items()
        ]
    report("calibration", links.facts())
    report("models", models)


class _Measured:
    """One model: every way alone first, for its first calls and its memory, then all by turns."""

    def __init__(self, job: Found, topology: Topology, name: str, shapes: Found) -> None:
        self._job, self._topology, self._name = job, topology, name
        self._weights = Weights({each: tuple(shape) for each, shape in shapes.items()}, dist.get_rank())
        described: list[Any] = [self._weights.described()]
        dist.broadcast_object_list(described, TRAINERS[0])
        self._bound = self._weights.bound(topology, described[0])
        self._ways: dict[str, Way] = {}
        self._found: dict[str, Found] = {}
        self._version = 0

    def run(self, counted: Steps) -> Found:
        idle = self._idle()
        for name in self._job["ways"]:
            self._found[name] = self._alone(name)
            if name == "two buffers":
                self._found[name]["idle"] = self._idle()
            counted.done()
        for turn in range(self._job["repeats"]):
            for name in random.Random(turn).sample(self._job["ways"], len(self._job["ways"])):
                found = self._found[name]
                if turn < _SLOW_ROUNDS or found["first"] <= SLOW * self._bound:
                    self._again(name)
                counted.done()
        for way in self._ways.values():
            way.close()
        weights = self._weights
        return {
            "name": self._name, "tensors": len(weights.shapes), "nbytes": weights.nbytes,
            "part": largest(float(weights.nbytes_here if weights.serves else 0)), "bound": self._bound,
            "idle": idle, "ways": self._found,
        }  # fmt: skip

    def _alone(self, name: str) -> Found:
        """Seconds of the first call and of the next, the first one making the way; and the memory that the
        ranks needed beyond what they had: a state dict is counted where the way itself makes it."""
        taken: list[Found] = []

        def calls() -> None:
            taken.append(self._timed(name, lambda: self._make(name)))
            if taken[0]["seconds"] <= SLOW * self._bound:
                taken.append(self._timed(name))

        extra = float(peak_above(calls))
        weights, copies = self._weights, self._ways[name].copies
        beyond = extra - (weights.nbytes_here if weights.serves and copies else 0)
        found: Found = {"first": taken[0]["seconds"], "wrong_bytes": sum(each["wrong"] for each in taken)}
        found["first_cpu"] = taken[0]["cpu"] / dist.get_world_size()
        found["memory"] = {
            "trainers": largest(extra if weights.trains else 0.0),
            "servers": largest(beyond if weights.serves else 0.0),
        }
        # What two buffers may have besides: one more copy of a server's part.
        spare = weights.nbytes_here if weights.serves and copies == 2 else 0
        found["memory"]["servers, without the spare copy"] = largest(
            beyond - spare if weights.serves else 0.0
        )
        return found | {"seconds": [], "cpu": [], "busy": []}

    def _make(self, name: str) -> None:
        self._ways[name] = WAYS[name](self._weights, self._topology, self._job["files"])

    def _again(self, name: str) -> None:
        taken, found = self._timed(name), self._found[name]
        for what in ("seconds", "cpu", "busy"):
            found[what].append(taken[what])
        found["wrong_bytes"] += taken["wrong"]

    def _timed(self, name: str, before: Callable[[], None] = lambda: None) -> Found:
        """The next version. Seconds of the slowest rank, CPU seconds of all, part of the cores that was at
        work."""
        self._version += 1
        self._weights.become(self._version)
        dist.barrier()
        worked, had = busy()
        used, begin = cpu_seconds(), time.perf_counter()
        before()
        self._ways[name].run(self._version)
        seconds = time.perf_counter() - begin
        used = cpu_seconds() - used
        now = busy()
        found = {"seconds": largest(seconds), "cpu": total(used)}
        wrong = self._weights.wrong(self._ways[name].received(), self._version) if self._weights.serves else 0
        found["wrong"] = int(total(float(wrong)))
        self._ways[name].after()
        return found | {"busy": (now[0] - worked) / max(now[1] - had, 1)}

    def _idle(self) -> float:
        """Part of a core that a rank uses while nothing moves, on the rank where it is most."""
        dist.barrier()
        time.sleep(0.5)  # what the calls before have left to do
        used = cpu_seconds()
        time.sleep(_IDLE)
        return largest(cpu_seconds() - used) / _IDLE


MIB = 1 << 20
NAMES = {
    "two buffers": "`WeightSync`, two buffers",
    "one buffer": "`WeightSync`, one buffer",
    "two buffers, digest": "`WeightSync`, two buffers, `digest=True`",
    "Megatron plan": "Megatron's plan, same transport",
    "NeMo-RL plan": "NeMo-RL's plan, same transport",
    "broadcast": "`full_tensor()` and broadcast",
    "files": "`torch.distributed.checkpoint`, files in memory that all hosts share",
}
_NO_NETWORK = {"files"}  # ways that the links do not bound
_ALLOWED = 64.0  # MiB of a rank beyond the state dicts


def ratio(model: Found, way: str) -> float | None:
    """Median time over the lower bound; None if the way did not run, or uses no network."""
    found = model["ways"].get(way)
    return None if found is None or way in _NO_NETWORK else _median(found) / model["bound"]


def text(results: Found) -> str:
    """A section for each model, below what the figures are of."""
    head = results["header"]
    said = (
        f"{origin(head)}, links of {head['link_mbit']:g} Mbit/s; medians of {head['repeats']} rounds "
        f"by turns, where a way that takes more than three times the bound has one; "
        f"{calibration_text(results['calibration'])}."
    )
    parts = [said]
    for model in results["models"]:
        parts += _section(model)
    return "\n\n".join(parts)


def _section(model: Found) -> list[str]:
    lines = []
    for way, found in model["ways"].items():
        seconds, times = _median(found), ratio(model, way)
        ours = model["ways"].get("two buffers")
        lines.append(
            [
                NAMES[way],
                f"{seconds:.2f}",
                "-" if times is None else f"{times:.3f}",
                "-" if ours is None else f"{seconds / _median(ours):.2f}",
                f"{found['first']:.2f}",
                f"{statistics.median(found['cpu']):.2f}",
                f"{max(statistics.median(found['busy']), 0):.0%}",
                f"{found['memory']['trainers'] / MIB:.0f}",
                f"{found['memory']['servers'] / MIB:.0f}",
                str(found["wrong_bytes"]),
            ]
        )
    columns = [
        "", "s", "/ bound", "/ two buffers", "first call, s", "CPU of all ranks, s", "cores busy",
        "trainer, MiB", "server, MiB", "wrong bytes",
    ]  # fmt: skip
    what = MODELS[model["name"]].what if model["name"] in MODELS else model["name"]
    said = (
        f"{what[0].upper()}{what[1:]}. {model['tensors']} tensors, {model['nbytes'] / MIB:.0f} MiB of "
        f"bfloat16, of which a server gets {model['part'] / MIB:.0f}. Lower bound {model['bound']:.2f} s."
    )
    return [
        f"### {model['name'].capitalize()}",
        said,
        table(columns, lines),
        *_targets(model),
    ]


def _targets(model: Found) -> list[str]:
    """What WeightSync has to reach, and what it does."""
    lines = []
    for way in ("two buffers", "one buffer"):
        found, times = model["ways"].get(way), ratio(model, way)
        if found is None or times is None:
            continue
        later, first = _median(found) - model["bound"], found["first"] - model["bound"]
        memory = max(found["memory"]["trainers"], found["memory"]["servers, without the spare copy"]) / MIB
        name = NAMES[way]
        lines += [
            [f"{name}: time over the bound", f"{times:.3f}", "1.10"],
            [f"{name}: first call beyond the bound, s", f"{first:.2f}", f"{3 * max(later, 0):.2f}"],
            [f"{name}: CPU time of one rank in its first call, s", f"{found['first_cpu']:.3f}", ""],
            [f"{name}: memory beyond state dicts and spare copy, MiB", f"{memory:.0f}", f"{_ALLOWED:g}"],
        ]
        if "idle" in found:
            idle = f"{found['idle']:.2%} ({model['idle']:.2%} without it)"
            lines.append([f"{name}: of a core, while nothing is pushed", idle, ""])
    return [table(["", "measured", "at most"], lines)] if lines else []


def _median(found: Found) -> float:
    return statistics.median(found["seconds"])


_LOOK = {  # way: label and colour, from above
    "two buffers": ("WeightSync, two buffers", "#1f5fa8"),
    "one buffer": ("WeightSync, one buffer", "#5b9bd5"),
    "two buffers, digest": ("WeightSync, with digests", "#76b7b2"),
    "Megatron plan": ("Megatron's plan, same transport", "#f28e2b"),
    "NeMo-RL plan": ("NeMo-RL's plan, same transport", "#59a14f"),
    "broadcast": ("full_tensor() and broadcast", "#e15759"),
    "files": ("torch.distributed.checkpoint\n(files in shared memory, no network)", "#9c755f"),
}


def draw(results: Found, path: Path) -> None:
    models = results["models"]
    figure = new_figure(6 * len(models), 4.2)
    all_axes = figure.subplots(1, len(models), squeeze=False)
    for axes, model in zip(all_axes[0], models, strict=True):
        ways = [way for way in _LOOK if way in model["ways"]]
        places = range(len(ways))
        later = [statistics.median(model["ways"][way]["seconds"]) for way in ways]
        axes.barh(places, later, color=[_LOOK[way][1] for way in ways])
        first = [model["ways"][way]["first"] for way in ways]
        axes.plot(first, places, "k|", markersize=14, label="first call")
        axes.axvline(model["bound"], color="black", linewidth=1, linestyle="--", label="lower bound")
        for place, seconds, other in zip(places, later, first, strict=True):
            axes.annotate(f"{seconds:.1f} s", (max(seconds, other, model["bound"]), place), (6, 0),
                          textcoords="offset points", va="center", fontsize=8)  # fmt: skip
        axes.set_yticks(places, [_LOOK[way][0] for way in ways])
        axes.invert_yaxis()
        axes.set(xlabel="time until all servers have it, s", xlim=(0, 1.2 * max(*later, *first)))
        axes.set_title(f"{model['name'].capitalize()}, {model['nbytes'] / 2**20:.0f} MiB", fontsize=10)
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.suptitle(
        "A version of the weights, 4 trainers to 4 servers on 4 hosts, "
        f"{results['header']['link_mbit']:g} Mbit/s links (emulated)", fontsize=11,
    )  # fmt: skip
    figure.tight_layout()
    save_chart(figure, path)


PAGE = Page("weights", "weights.json", "docs/end_to_end.md", text, {"docs/images/weights.svg": draw})
PAGES = [PAGE]


def measure(network: Network, models: Mapping[str, Found], ways: list[str], repeats: int) -> Found:
    """What rank 0 reports. models: shapes by name of a model and of a tensor."""
    with files_folder() as files:
        job = {
            "models": models, "ways": ways, "repeats": repeats, "mbit": network.rates, "files": files,
            "ranks_per_host": _RANKS_PER_HOST,
        }  # fmt: skip
        return run_job(network, _RANKS_PER_HOST, "weights.sync:rank", job, limit=_LIMIT)


def main() -> int:
    options = PAGE.parser(__doc__)
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument("--ways", nargs="+", choices=NAMES, default=list(NAMES))
    options.add_argument(
        "--repeats", type=positive(int), default=3, help="rounds by turns, after the first calls"
    )
    options.add_argument("--mbit", type=positive(float), default=250.0, help="rate of a link each way")
    args = options.parse_args()
    try:
        models = {name: shapes(MODELS[name]) for name in args.models}
        with Cluster(_HOSTS, args.mbit) as cluster:
            found = measure(cluster, models, args.ways, args.repeats)
    except (ClusterError, ImportError) as error:
        print(f"benchmarks weights did not run: {error}", file=sys.stderr)
        return 1
    head = {**machine("weights"), "link_mbit": args.mbit, "repeats": args.repeats}
    results = {"header": head, **found}
    print(text(results))
    if why := overload(results["calibration"]):
        print(f"DO NOT REPORT: {why}", file=sys.stderr)
        return 1
    PAGE.finish(args, results)
    return 0
