"""The newest version of weights for an engine that has restarted: a `WeightReader` on each of its two ranks
reads it from two engines that have received it, over links of 250 Mbit/s, alone and while versions are
pushed. Needs root and iproute2. Writes benchmarks/results/reader.json and a part of docs/end_to_end.md; takes
a minute, with nothing else running."""

from __future__ import annotations

import math
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from meshcast import Layout, WeightReader, WeightSync
from meshcast.bench.measure import numbered
from meshcast.bench.report import calibration_text, overload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..cluster import Cluster, ClusterError, run_job
from ..harness import Found, Page, machine, origin, positive, table
from ..ranks import Report, Steps, calibrated, largest
from .delta import shapes
from .ways import DTYPE

_HOSTS, _RANKS_PER_HOST = 4, 2
_LIMIT = 300.0  # seconds for all ranks
_TRAINERS, _ENGINES, _RESTARTED = [0, 1], [[2, 3], [4, 5]], [6, 7]
_STEPS = ("push", "push, read", "read", "read, pushed", "manifest", "digests")


def _cut(shape: tuple[int, ...]) -> Placement:
    return Replicate() if len(shape) == 1 else Shard(0)


def _whole(shape: tuple[int, ...], version: int) -> torch.Tensor:
    return (numbered(shape, tuple((0, size) for size in shape)) % 113 + version % 100).to(DTYPE)


class _Rank:
    """One rank's part: trainers and engines are in a process group, the restarted engine is not."""

    def __init__(self, given: dict[str, tuple[int, ...]]) -> None:
        self.given, self.rank = given, dist.get_rank()
        members = [*_TRAINERS, *(rank for engine in _ENGINES for rank in engine)]
        group = dist.new_group(members)
        training = DeviceMesh("cpu", _TRAINERS)
        engines = [DeviceMesh("cpu", engine) for engine in _ENGINES]
        store = dist.PrefixStore("readers", dist.distributed_c10d._get_default_store())
        self.trains, self.reads = self.rank in _TRAINERS, self.rank in _RESTARTED
        self.held: dict[str, DTensor] = {}
        if self.trains:
            for name, shape in given.items():
                local = torch.empty(Layout(training, [Shard(0)]).local_shapes(shape)[self.rank], dtype=DTYPE)
                size, stride = torch.Size(shape), torch.empty(shape, device="meta").stride()
                self.held[name] = DTensor.from_local(
                    local, training, [Shard(0)], run_check=False, shape=size, stride=stride
                )
        if self.reads:
            where = {name: Layout(_RESTARTED, [_cut(shape)]) for name, shape in given.items()}
            self.reader = WeightReader(store, where)
        else:
            mine = next((mesh for mesh in engines if self.rank in mesh.mesh.tolist()), engines[0])
            self.sync = WeightSync(
                self.held if self.trains else None,
                {name: (mine, [_cut(shape)]) for name, shape in given.items()},
                group=group,
                readers=store,
            )

    def become(self, version: int) -> None:
        for name, x in self.held.items():
            x.to_local().copy_(_whole(self.given[name], version).chunk(2)[self.rank])

    def wrong(self, version: int) -> int:
        """Values on this rank of the restarted engine that are not of that version."""
        bad, at = 0, self.rank - _RESTARTED[0]
        for name, shape in self.given.items():
            whole = _whole(shape, version)
            expected = whole if _cut(shape).is_replicate() else whole.chunk(2)[at]
            bad += int((self.reader.state[name] != expected).sum())
        return bad


def _timed(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def rank(job: Found, report: Report) -> None:
    links = calibrated(job["ranks_per_host"], job["mbit"])
    given = {name: tuple(shape) for name, shape in job["shapes"].items()}
    here = _Rank(given)
    taken: dict[str, list[float]] = {step: [] for step in _STEPS}
    wrong = 0
    with Steps("versions", job["versions"]) as counted:
        for version in range(job["versions"]):
            found = dict.fromkeys(_STEPS, 0.0)
            here.become(2 * version)
            dist.barrier()
            if here.trains:
                found["push"] = _timed(lambda at=2 * version: here.sync.push(at))
            elif not here.reads:
                here.sync.pull(2 * version)
            dist.barrier()
            if here.reads:
                found["manifest"] = _timed(here.reader.manifest)
                found["digests"] = _timed(lambda: here.reader.manifest(digest=True))
            dist.barrier()
            if here.reads:
                found["read"] = _timed(lambda at=2 * version: here.reader.pull(at))
                wrong += here.wrong(2 * version)
            here.become(2 * version + 1)
            dist.barrier()
            if here.trains:
                found["push, read"] = _timed(lambda at=2 * version + 1: here.sync.push(at))
            elif here.reads:
                found["read, pushed"] = _timed(lambda at=2 * version + 1: here.reader.pull(at))
                wrong += here.wrong(here.reader.version or 0)
            else:
                here.sync.pull(2 * version + 1)
            for step, seconds in found.items():
                slowest = largest(seconds)
                if version:  # the first one connects and plans
                    taken[step].append(slowest)
            counted.done()
    dist.barrier()
    if not here.reads:
        here.sync.close()
    nbytes = sum(math.prod(shape) for shape in given.values()) * DTYPE.itemsize
    report("calibration", links.facts())
    report("nbytes", nbytes)
    report("bound", 8 * nbytes / (links.facts()["slowest_link_mbit"] * 1e6))
    report("taken", taken)
    report("wrong", int(largest(float(wrong))))


def text(results: Found) -> str:
    head, bound = results["header"], results["bound"]
    said = (
        f"{origin(head)}, links of {head['link_mbit']:g} Mbit/s; medians of {head['versions'] - 1} versions; "
        f"{calibration_text(results['calibration'])}. {results['nbytes'] / 2**20:.1f} MiB of bfloat16, all "
        f"of which the restarted host takes in: {bound:.3f} s at the rate of its link. "
        f"{results['wrong']} wrong values."
    )
    told = {
        "push": "a push to the two engines",
        "push, read": "a push, while the restarted engine waits for that version",
        "read": "both ranks of the restarted engine pull",
        "read, pushed": "the same from the begin of a push: the version arrives, and is read",
        "manifest": "`manifest()`",
        "digests": "`manifest(digest=True)`",
    }
    seconds = {step: statistics.median(results["taken"][step]) for step in _STEPS}
    rows = [
        [told[step], f"{seconds[step]:.3f}", f"{seconds[step] / bound:.2f}" if "read" in step[:4] else "-"]
        for step in _STEPS
    ]
    return "\n\n".join([said, table(["", "s", "/ that time"], rows)])


PAGE = Page("reader", "reader.json", "docs/end_to_end.md", text)
PAGES = [PAGE]


def main() -> int:
    options = PAGE.parser(__doc__)
    options.add_argument("--width", type=positive(int), default=384, help="of the model, a multiple of 6")
    options.add_argument("--layers", type=positive(int), default=6)
    options.add_argument("--versions", type=positive(int), default=8, help="of each kind")
    options.add_argument("--mbit", type=positive(float), default=250.0, help="rate of a link each way")
    args = options.parse_args()
    try:
        with Cluster(_HOSTS, args.mbit) as cluster:
            job = {
                "shapes": shapes(args.width, args.layers), "versions": args.versions, "mbit": cluster.rates,
                "ranks_per_host": _RANKS_PER_HOST,
            }  # fmt: skip
            found = run_job(cluster, _RANKS_PER_HOST, "weights.reader:rank", job, limit=_LIMIT)
    except ClusterError as error:
        print(f"benchmarks reader did not run: {error}", file=sys.stderr)
        return 1
    head = {**machine("reader"), "link_mbit": args.mbit, "versions": args.versions}
    results = {"header": head, **found}
    print(text(results))
    if why := overload(results["calibration"]):
        print(f"DO NOT REPORT: {why}", file=sys.stderr)
        return 1
    PAGE.finish(args, results)
    return 0
