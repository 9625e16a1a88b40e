"""Memory, CPU time, small calls and copies inside a host, each beside what it is to be compared with. Four
ranks on this machine, connected by loopback or by shared memory. Writes benchmarks/results/resources.json and
the table of docs/benchmarks.md; takes about two minutes, with nothing else running."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import meshcast
import torch
import torch.distributed as dist
from meshcast import Resharder, TensorSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .cluster import Loopback, run_job
from .harness import Found, Page, machine, origin, positive, table
from .ranks import (
    Figure,
    Report,
    call_seconds,
    compared,
    cpu_seconds,
    largest,
    on_core,
    peak_above,
    steps,
    total,
)

MIB = 1 << 20
COLUMNS = 4096  # of the matrices, int32: a row has 16 KiB
_ALLOWED = (64 * MIB, 0.05)  # bytes, and part of what a rank holds


class Matrix:
    """Rows cut over one mesh, to be laid out by `placement` on another whose memory is there and touched.
    Every element has a value of its own."""

    def __init__(self, nbytes: int, source: list[int], target: list[int], placement: Any) -> None:
        self.rank, self.rows = dist.get_rank(), nbytes // COLUMNS // 4
        self._target, self._placement = target, placement
        meshes = [DeviceMesh("cpu", ranks) for ranks in (source, target)]
        size, stride = torch.Size((self.rows, COLUMNS)), (COLUMNS, 1)
        local = torch.empty(0, 0, dtype=torch.int32)
        if self.rank in source:
            own = self.rows // len(source) * COLUMNS
            begin = source.index(self.rank) * own
            local = torch.arange(begin, begin + own, dtype=torch.int32).view(-1, COLUMNS)
        shape = [self.rows, COLUMNS]
        if placement.is_shard():
            shape[placement.dim] //= len(target)
        out = torch.zeros(shape if self.rank in target else [0, 0], dtype=torch.int32)
        self.source = DTensor.from_local(
            local, meshes[0], [Shard(0)], run_check=False, shape=size, stride=stride
        )
        self.out = DTensor.from_local(out, meshes[1], [placement], run_check=False, shape=size, stride=stride)

    def reshard(self) -> None:
        meshcast.reshard_(self.out, self.source)

    def check(self) -> None:
        """Looks at some rows. Raises RuntimeError where a value is wrong."""
        if self.rank not in self._target:
            return
        found, place = self.out.to_local(), self._target.index(self.rank)
        first = [0, 0]
        if self._placement.is_shard():
            first[self._placement.dim] = place * found.shape[self._placement.dim]
        for row in {0, len(found) // 3, len(found) - 1}:
            begin = (first[0] + row) * COLUMNS + first[1]
            if not torch.equal(found[row], torch.arange(begin, begin + found.shape[1], dtype=torch.int32)):
                raise RuntimeError(f"rank {self.rank}: wrong values in row {row}")


def memory(nbytes: int) -> Figure:
    """Rows of two ranks become columns of two others. nbytes: of each rank. In MiB: the peak of the rank
    with the largest, and what is allowed."""
    small = Matrix(16 * MIB, [0, 1], [2, 3], Shard(1))
    small.reshard()  # connects
    matrix = Matrix(2 * nbytes, [0, 1], [2, 3], Shard(1))
    extra = largest(float(peak_above(matrix.reshard)))
    matrix.check()
    allowed = _ALLOWED[0] + _ALLOWED[1] * nbytes
    return {"ours": extra / MIB, "theirs": allowed / MIB, "value": extra / allowed}


def cpu(nbytes: int, dim: int, repeats: int, packs: bool = False) -> Figure:
    """CPU seconds of all ranks, beside isend and irecv of gloo for the same bytes between the same ranks, in
    one piece each. packs: there too the senders pack what has gaps, by torch, into memory that is there."""
    matrix = Matrix(nbytes, [0, 1], [2, 3], Shard(dim))
    sends = matrix.rank < 2
    peers = [(matrix.rank + 2) % 4] if dim == 0 else ([2, 3] if sends else [0, 1])
    local = (matrix.source if sends else matrix.out).to_local().clone()
    parts = local.reshape(-1).chunk(len(peers))

    def gloo() -> None:
        post = dist.isend if sends else dist.irecv
        if packs and sends:
            for part, columns in zip(parts, matrix.source.to_local().chunk(len(peers), dim), strict=True):
                part.view(columns.shape).copy_(columns)
        for work in [post(part, peer) for part, peer in zip(parts, peers, strict=True)]:
            work.wait()

    found = compared(matrix.reshard, gloo, repeats, cpu_seconds, total)
    matrix.check()
    return found


def digests(nbytes: int, repeats: int) -> dict[str, Figure]:
    """A state dict of one matrix with digests, beside the same without. Seconds of the slowest rank; and in
    MiB the peak of the rank with the largest, beside what is allowed."""
    matrix = Matrix(nbytes, [0, 1], [2, 3], Shard(1))
    sends = matrix.rank < 2
    held, outs = ({"w": matrix.source}, None) if sends else (None, {"w": matrix.out})
    where = {"w": (matrix.out.device_mesh, [Shard(1)])}

    def call(digest: bool) -> None:
        meshcast.reshard_state_dict(held, where, outs, digest=digest)

    found = compared(lambda: call(True), lambda: call(False), repeats, time.perf_counter, largest)
    matrix.check()
    extra = largest(float(peak_above(lambda: call(True))))
    allowed = _ALLOWED[0] + _ALLOWED[1] * nbytes / 2
    return {"time": found, "memory": {"ours": extra / MIB, "theirs": allowed / MIB, "value": extra / allowed}}


def in_host(nbytes: int, placement: Any, repeats: int) -> dict[str, Figure]:
    """Rows of four ranks of one host, laid out anew in memory that is there, beside plain copies of the
    bytes that each rank gets, by the four at once, also into memory that is there. Seconds: "one core" for
    all ranks, where every copy finds the caches of the last, and "all cores", which the ranks take in turn.
    """
    matrix = Matrix(nbytes, [0, 1, 2, 3], [0, 1, 2, 3], placement)
    given = torch.ones_like(matrix.out.to_local())
    copied = torch.zeros_like(given)
    found = {}
    for cores, number in (("one core", 0), ("all cores", matrix.rank)):
        with on_core(number):
            found[cores] = compared(
                matrix.reshard, lambda: copied.copy_(given), repeats, time.perf_counter, largest
            )
    matrix.check()
    return found


_FLOATS = 1024  # 4 KiB
_CALLS = 200  # timed together
_MICRO = 1e6

Call = Callable[[], object]


def calls(repeats: int) -> dict[str, Figure]:
    """Microseconds: of one way between ranks 0 and 1, and of calls of rank 0 whose 4 KiB stay where they are.
    The other ranks take part in the barriers."""
    rank = dist.get_rank()
    meshes = [DeviceMesh("cpu", [each]) for each in (0, 1)]
    there: Call = _nothing
    back: Call = _nothing
    alone: Call = _nothing
    grad: Call = _nothing
    kept: list[DTensor] = []
    if rank < 2:
        specs = [TensorSpec((_FLOATS,), torch.float32, mesh, [Shard(0)]) for mesh in meshes]
        mine = DTensor.from_local(torch.zeros(_FLOATS), meshes[rank], [Shard(0)], run_check=False)
        forth = Resharder(specs[0], meshes[1], [Shard(0)], reuse_output=True)
        home = Resharder(specs[1], meshes[0], [Shard(0)], reuse_output=True)
        there = partial(forth.run, mine if rank == 0 else None)
        back = partial(home.run, mine if rank == 1 else None)
    if rank == 0:
        parameter = mine.detach().requires_grad_()
        alone = partial(Resharder(specs[0], meshes[0], [Shard(0)], reuse_output=True).run, mine)

        def grad() -> None:
            kept.append(meshcast.reshard(parameter, meshes[0], [Shard(0)]))

    buffer = torch.zeros(_FLOATS)

    def ping_pong() -> None:
        with torch.no_grad():
            for _ in range(_CALLS):
                there()
                back()

    def gloo() -> None:
        for _ in range(_CALLS if rank < 2 else 0):
            if rank == 0:
                dist.send(buffer, 1)
                dist.recv(buffer, 1)
            else:
                dist.recv(buffer, 0)
                dist.send(buffer, 0)

    def one_way(seconds: float) -> float:
        return largest(seconds) / (2 * _CALLS) * _MICRO

    found = {"4 KiB": compared(ping_pong, gloo, repeats, time.perf_counter, one_way)}
    with torch.no_grad():
        found["call"] = _each(alone, repeats)

    def backward() -> None:
        if kept:
            meshcast.backward(*(value.to_local().sum() for value in kept))
            kept.clear()

    found["call, autograd"] = _each(grad, repeats, backward)
    return found


def _nothing() -> None: ...


def _each(call: Call, repeats: int, after: Call = _nothing) -> Figure:
    """Median over rounds of the time of a call, after a round that does not count; `after` each round,
    untimed."""
    times = []
    for _ in range(repeats + 1):
        times.append(largest(call_seconds(lambda: [call() for _ in range(_CALLS)])) / _CALLS * _MICRO)
        after()
    median = statistics.median(times[1:])
    return {"ours": median, "value": median}


_BYTES = 256 * MIB


def network(nbytes: int, repeats: int) -> dict[str, Figure]:
    return _all(
        "figures over loopback",
        lambda: {"memory, loopback": memory(nbytes)},
        lambda: {"CPU, in one piece": cpu(_BYTES, 0, repeats)},
        lambda: {"CPU, strided": cpu(_BYTES, 1, repeats)},
        lambda: {"CPU, packed": cpu(_BYTES, 1, repeats, packs=True)},
        lambda: _digests("loopback", repeats),
        lambda: calls(repeats),
    )


def shared(nbytes: int, repeats: int) -> dict[str, Figure]:
    return _all(
        "figures in shared memory",
        lambda: {"memory, shared": memory(nbytes)},
        lambda: _digests("shared", repeats),
        lambda: _in_host("rows to columns", Shard(1), repeats),
        lambda: _in_host("all-gather", Replicate(), repeats),
    )


def _all(what: str, *measures: Callable[[], dict[str, Figure]]) -> dict[str, Figure]:
    found: dict[str, Figure] = {}
    for measure in steps(measures, what):
        found |= measure()
    return found


def _in_host(name: str, placement: Placement, repeats: int) -> dict[str, Figure]:
    figures = in_host(_BYTES, placement, repeats)
    return {f"in host, {name}, {cores}": figure for cores, figure in figures.items()}


def _digests(where: str, repeats: int) -> dict[str, Figure]:
    return {f"digest, {what}, {where}": figure for what, figure in digests(_BYTES, repeats).items()}


def rank(job: Found, report: Report) -> None:
    """Reports the figures of its world."""
    measure = {"network": network, "shared": shared}[job["world"]]
    report("figures", measure(job["mib"] * MIB, job["repeats"]))


_RANKS = 4
_LIMIT = 300.0  # seconds for one start of the ranks
_WORLDS = {"network": "0", "shared": "1"}  # name: MESHCAST_SHM


@dataclass(frozen=True)
class Row:
    what: str
    against: str
    unit: str
    scale: float
    target: float | None  # of the quotient, or of the figure itself where it is compared with nothing


_ROWS = {
    "memory, loopback": Row("most resident memory beyond that before, rows to columns",
                            "64 MiB + 5 % of what a rank holds", "MiB", 1.0, 1.0),
    "memory, shared": Row("the same through shared memory", "the same", "MiB", 1.0, 1.0),
    "CPU, in one piece": Row("CPU time of all ranks, 256 MiB, rows to the same rows",
                             "gloo isend and irecv of the bytes", "s", 1.0, 1.3),
    "CPU, strided": Row("the same, rows to columns", "the same, nothing packed", "s", 1.0, 1.3),
    "CPU, packed": Row("the same", "the same, packed by torch first", "s", 1.0, 1.3),
    "in host, rows to columns, one core": Row("256 MiB in a host, rows to columns, on one core",
                                              "each copies what it gets", "ms", 1e3, 1.5),
    "in host, rows to columns, all cores": Row("the same, on all cores in turn", "the same", "ms", 1e3, None),
    "in host, all-gather, one core": Row("256 MiB in a host, rows to replicas, on one core",
                                         "each copies what it gets", "ms", 1e3, 1.5),
    "in host, all-gather, all cores": Row("the same, on all cores in turn", "the same", "ms", 1e3, None),
    "digest, time, loopback": Row("256 MiB as a state dict with `digest=True`, rows to columns, loopback",
                                  "without", "ms", 1e3, 1.3),
    "digest, time, shared": Row("the same through shared memory", "without", "ms", 1e3, 1.3),
    "digest, memory, loopback": Row("most resident memory beyond that before, with digests, loopback",
                                    "64 MiB + 5 % of what a rank holds", "MiB", 1.0, 1.0),
    "digest, memory, shared": Row("the same through shared memory", "the same", "MiB", 1.0, 1.0),
    "4 KiB": Row("Resharder.run of 4 KiB, one way over loopback", "gloo send and recv", "us", 1.0, 1.5),
    "call": Row("Resharder.run of 4 KiB that stay where they are", "", "us", 1.0, 100.0),
    "call, autograd": Row("reshard with autograd of 4 KiB that stay", "", "us", 1.0, 250.0),
}  # fmt: skip


def text(results: Found) -> str:
    """A Markdown table with its head."""
    head = results["header"]
    said = (
        f"{origin(head)}; {head['mib']} MiB per rank where memory is measured; medians of "
        f"{head['repeats']} rounds taken in turn."
    )
    lines = []
    for name, row in _ROWS.items():  # rows that say "the same" mean the one above
        found = results["figures"].get(name)
        if found is None:
            continue
        other = f"{found['theirs'] * row.scale:.4g}" if "theirs" in found else ""
        quotient = f"{found['value']:.2f}" if "theirs" in found else ""
        target = "" if row.target is None else f"{row.target:g}"
        ours = f"{found['ours'] * row.scale:.4g}"
        lines.append([row.what, row.unit, ours, row.against, other, quotient, target])
    head = ["", "unit", "meshcast", "compared with", "", "quotient", "target"]
    return f"{said}\n\n{table(head, lines, 'llrlr')}"


PAGE = Page("resources", "resources.json", "docs/benchmarks.md", text)
PAGES = [PAGE]


def run(world: str, args: argparse.Namespace) -> Found:
    """The figures of four ranks of one host, as rank 0 reports them."""
    job = {"world": world, "mib": args.mib, "repeats": args.repeats}
    with Loopback(1, 1.0) as host:
        return run_job(
            host, _RANKS, "resources:rank", job, limit=_LIMIT, env={"MESHCAST_SHM": _WORLDS[world]}
        )["figures"]


def main() -> int:
    options = PAGE.parser(__doc__)
    options.add_argument("--mib", type=int, default=2048, help="that a rank holds where memory is measured")
    options.add_argument("--repeats", type=positive(int), default=7)
    options.add_argument("--worlds", nargs="+", choices=list(_WORLDS), default=list(_WORLDS))
    args = options.parse_args()
    if args.mib < 16:
        options.error("--mib must be 16 or more")
    figures: Found = {}
    for world in args.worlds:
        figures |= run(world, args)
    head = {**machine("resources"), "mib": args.mib, "repeats": args.repeats}
    results = {"header": head, "figures": figures}
    print(text(results))
    PAGE.finish(args, results)
    return 0
