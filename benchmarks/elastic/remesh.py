"""How long `meshcast.elastic.remesh` takes beside its bound, where a rank of a
job dies and where one joins. Four emulated hosts of two ranks, links of 250 Mbit/s; the state is that of a
transformer's encoder under hybrid sharding and AdamW. Needs root and iproute2; takes two minutes, with
nothing else running."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from meshcast import Layout, elastic, plan_many
from meshcast.bench.measure import calibrate, numbered
from meshcast.bench.report import overload
from meshcast.topology import Topology
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..cluster import Cluster, ClusterError, run_job
from ..harness import Found, machine, parser, positive, table
from ..ranks import Report, Steps, largest

_HOSTS = 4
_LIMIT = 600.0  # seconds for all ranks
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_PERIOD = 1 << 20  # of the values: float32 has them all
_ALL = list(range(8))
_DEAD = 7
_PER_HOST = 2


class Training:
    """Model and optimizer on some ranks: two replicas in four shards of eight ranks, one in seven shards of
    seven. Every element of the state is its number."""

    def __init__(self, ranks: list[int], layers: int) -> None:
        mesh = (
            DeviceMesh("cpu", torch.tensor(ranks).view(2, 4), mesh_dim_names=("replicate", "shard"))
            if len(ranks) == 8
            else DeviceMesh("cpu", ranks)
        )
        with torch.device("meta"):
            layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
            model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        weights, moments = get_state_dict(model, optimizer, options=_FLAT)
        self.state: dict[str, Any] = {**weights, **moments}
        self.kept = model, optimizer

    def shards(self) -> dict[str, DTensor]:
        return {name: x for name, x in self.state.items() if isinstance(x, DTensor)}

    def fill(self, with_numbers: bool) -> None:
        for number, x in enumerate(self.shards().values()):
            x.to_local().copy_(_values(x, number) if with_numbers else torch.full_like(x.to_local(), -1))

    def wrong(self) -> int:
        """Shards on this rank that are not what they were."""
        return sum(
            not torch.equal(x.to_local(), _values(x, number))
            for number, x in enumerate(self.shards().values())
        )


def _values(x: DTensor, number: int) -> torch.Tensor:
    sizes, offsets = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    box = tuple((low, low + size) for low, size in zip(offsets, sizes, strict=True))
    return ((numbered(tuple(x.shape), box) + number) % _PERIOD).to(x.dtype)


class Groups:
    """The default process group, made anew among other ranks each time."""

    def __init__(self, rank: int) -> None:
        self._rank, self._number = rank, 0
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1
        self._store = dist.TCPStore(host, port, is_master=rank == 0, wait_for_workers=False)

    def among(self, ranks: list[int]) -> bool:
        """Whether this rank is one of them. All ranks call it; the others wait until the group is over."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        self._number += 1
        store = dist.PrefixStore(str(self._number), self._store)
        if self._rank not in ranks:
            store.wait(["over"], timedelta(seconds=300))
            return False
        dist.init_process_group("gloo", store=store, rank=ranks.index(self._rank), world_size=len(ranks))
        return True

    def over(self) -> None:
        """Wakes those who are not in the group."""
        dist.PrefixStore(str(self._number), self._store).set("over", "")


def bound(topology: Topology, then: Mapping[str, Any], now: Mapping[str, Any], lost: list[int]) -> float:
    """Seconds that no plan can beat, from ranks that live. then, now: (shape, dtype, layout) by name."""
    problems = []
    for name, (shape, dtype, layout) in then.items():
        boxes = {rank: held for rank, held in layout.shards(shape).items() if rank not in lost}
        problems.append((shape, dtype, Layout.from_boxes(boxes), now[name][2]))
    return plan_many(problems, topology).lower_bound


def described(training: Training) -> dict[str, Any]:
    return {
        name: (tuple(x.shape), x.dtype, Layout(x.device_mesh.mesh.tolist(), x.placements))
        for name, x in training.shards().items()
    }


def move(old: Training | None, new: Training, topology: Topology, **changed: Any) -> float:
    """Seconds of the slowest rank. A rank that joins has no old training."""
    new.fill(with_numbers=False)
    dist.barrier()
    begin = time.perf_counter()
    elastic.remesh(None if old is None else old.state, None, new.state, topology=topology, **changed)
    seconds = largest(time.perf_counter() - begin)
    if wrong := new.wrong():
        raise SystemExit(f"rank {dist.get_rank()}: {wrong} shards are wrong")
    return seconds


def rank(job: Found, report: Report) -> None:
    here = dist.get_rank()
    groups = Groups(here)
    groups.among(_ALL)
    links = calibrate(_PER_HOST, [job["mbit"]] * 4)
    topology = links.topology(_PER_HOST, 1)
    left = [each for each in _ALL if each != _DEAD]
    found: Found = {"a rank dies, 8 to 7": {"seconds": []}, "a rank joins, 7 to 8": {"seconds": []}}
    died, joined = found.values()
    eight = Training(_ALL, job["layers"])
    eight.fill(with_numbers=True)
    with Steps("rounds", job["rounds"]) as counted:
        for _ in range(job["rounds"]):
            seven = None
            layouts = described(eight)
            if groups.among(left):
                seven = Training(left, job["layers"])
                numbers = {each: each for each in left}
                died["seconds"].append(move(eight, seven, topology, lost=[_DEAD], ranks=numbers))
                died["bound"] = bound(topology, layouts, described(seven), [_DEAD])
                if here == 0:
                    groups.over()
            groups.among(_ALL)
            eight = Training(_ALL, job["layers"])
            numbers = {each: each for each in left}
            joined["seconds"].append(move(seven, eight, topology, ranks=numbers))
            if seven is not None:
                joined["bound"] = bound(topology, described(seven), described(eight), [])
            counted.done()
    shards = eight.shards().values()
    nbytes = sum(x.numel() * x.element_size() for x in shards)
    facts = {"calibration": links.facts(), "tensors": len(shards), "nbytes": nbytes, "events": found}
    report("found", facts)


def main() -> int:
    options = parser("remesh", __doc__)
    options.add_argument("--rounds", type=positive(int), default=5, help="deaths and joins, by turns")
    options.add_argument(
        "--layers", type=positive(int), default=8, help="of the encoder, 38 MB of state each"
    )
    options.add_argument("--mbit", type=positive(float), default=250.0, help="rate of a link each way")
    args = options.parse_args()
    try:
        with Cluster(_HOSTS, args.mbit) as cluster:
            found = run_job(cluster, _PER_HOST, "elastic.remesh:rank", vars(args), limit=_LIMIT)["found"]
    except ClusterError as error:
        print(f"benchmarks remesh did not run: {error}", file=sys.stderr)
        return 1
    print(", ".join(f"{what} {said}" for what, said in machine("remesh").items()))
    print(f"{found['tensors']} tensors, {found['nbytes'] / 1e6:.0f} MB; links of {args.mbit:.0f} Mbit/s\n")
    lines = []
    for name, event in found["events"].items():
        seconds, least = event["seconds"], event["bound"]
        middle = statistics.median(seconds)
        shown = [f"{each:.2f} s" for each in (least, seconds[0], middle, max(seconds))]
        lines.append([name, *shown, f"{middle / least:.3f}"])
    print(table(["", "bound", "first", "median", "most", "median / bound"], lines))
    if why := overload(found["calibration"]):
        print(f"DO NOT REPORT: {why}", file=sys.stderr)
        return 1
    return 0
