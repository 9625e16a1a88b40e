"""The cost of a group and its first calls for each of 8 to 128 ranks.

One process loads torch and meshcast and forks the ranks, all on this machine; each takes itself for a host of
its own, so that all messages go over loopback. Half of them send to the other half: rows to the same rows,
where each rank has one peer, or rows to columns, where each has half of the ranks. The machine has fewer
cores than that, so times are processor time of the rank, all its threads. Traffic with the store is that of
its connections, as the kernel counts it. Writes benchmarks/results/many_ranks.json and the table of
docs/benchmarks.md."""

from __future__ import annotations

import json
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import meshcast
import torch
import torch.distributed as dist
from meshcast import Layout
from torch.distributed.tensor import Shard

from .harness import Found, Page, in_child, machine, table

_RANKS = (8, 16, 32, 64, 128)
_LIMIT = timedelta(seconds=300)
_STEPS = ("first call", "another call", "the same again")
_KINDS = {"rows to the same rows": 0, "rows to columns": 1}  # name: dimension that is cut at the destination
# Bytes that the peer has acknowledged and that came, and segments out, in the kernel's tcp_info.
_COUNTERS = struct.Struct("=120xQQI")


def store_traffic(port: int) -> tuple[int, int, int]:
    """Bytes out and in and segments out, over all connections of this process to that port."""
    total = [0, 0, 0]
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(descriptor))) as connection:
                if connection.getpeername()[1] != port:
                    continue
                found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTERS.size)
        except (OSError, IndexError):  # no socket, or one that is not connected
            continue
        total = [sum(pair) for pair in zip(total, _COUNTERS.unpack(found), strict=True)]
    return total[0], total[1], total[2]


def resident() -> int:
    """Bytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


class Rank:
    def __init__(self, rank: int, world: int, store: dist.TCPStore) -> None:
        self._rank, self._world, self._store = rank, world, store
        self._seen = (0.0, (0, 0, 0), 0)

    def _since(self) -> dict[str, float]:
        now = (time.process_time(), store_traffic(self._store.port), resident())
        before, self._seen = self._seen, now
        sent, received, questions = (a - b for a, b in zip(now[1], before[1], strict=True))
        return {
            "cpu_seconds": now[0] - before[0], "store_sent": sent, "store_received": received,
            "store_segments": questions, "bytes": now[2] - before[2],
        }  # fmt: skip

    def _meet(self, name: str) -> None:
        """All ranks, so that none works while another is measured. Not part of any figure."""
        self._store.add(name, 1)
        while self._store.add(name, 0) < self._world:
            time.sleep(0.05)
        self._since()

    def run(self, dim: int) -> dict[str, dict[str, float]]:
        os.environ["MESHCAST_HOST_ID"] = f"host {self._rank}"
        half = self._world // 2
        src, dst = (Layout(list(range(at, at + half)), [Shard(d)]) for at, d in ((0, 0), (half, dim)))
        dist.init_process_group(
            "meshcast", store=dist.PrefixStore("job", self._store), rank=self._rank, world_size=self._world,
            timeout=_LIMIT,
        )  # fmt: skip
        found = {}
        for step, width in zip(_STEPS, (half, 2 * half, 2 * half), strict=True):
            shape = (4 * half, width)
            mine = torch.full((4, width), float(self._rank)) if self._rank < half else None
            self._meet(step)
            out = meshcast.reshard_local(mine, src, None, dst, shape=shape, dtype=torch.float32)
            found[step] = self._since()
            if out is not None:
                rows = torch.arange(half, dtype=torch.float32).repeat_interleave(4)
                want = rows[4 * (self._rank - half) :][:4, None] if dim == 0 else rows[:, None]
                assert torch.equal(out, want.expand(out.shape)), "wrong values"
        self._meet("end")
        dist.destroy_process_group()
        return found


def rank_main(rank: int, world: int, kind: str, port: int, folder: Path) -> int:
    try:
        client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        found = Rank(rank, world, client).run(_KINDS[kind])
        (folder / str(rank)).write_text(json.dumps(found))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def fork_ranks(kind: str, world: int, port: int, folder: Path) -> int:
    """In a process without threads, which a fork would not copy. Returns how many ranks failed."""
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            os._exit(rank_main(rank, world, kind, port, folder))
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def measure(kind: str, world: int) -> dict[str, Any]:
    """Of the ranks, the median and the most of each figure and step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reader, writer = os.pipe()
        parent = os.fork()
        if parent == 0:
            os._exit(min(255, fork_ranks(kind, world, int(os.read(reader, 16)), folder)))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(store.port).encode())
        failed = os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1])
        os.close(reader)
        os.close(writer)
        if failed:
            raise RuntimeError(f"{kind}, {world} ranks: {failed} of them failed")
        said = [json.loads((folder / str(rank)).read_text()) for rank in range(world)]
    steps = {}
    for step in _STEPS:
        figures = {name: [each[step][name] for each in said] for name in said[0][step]}
        steps[step] = {name: [statistics.median(every), max(every)] for name, every in figures.items()}
    return {"kind": kind, "ranks": world, "steps": steps}


def text(results: Found) -> str:
    parts = [f"`python -m benchmarks many_ranks`: {results['cores']} cores; medians over the ranks."]
    columns = ["ranks", "", "CPU, ms", "to the store, KiB", "from it, KiB", "segments to it", "memory, KiB"]
    for kind in _KINDS:
        steps = [
            (str(row["ranks"]), step, {name: median for name, (median, _) in row["steps"][step].items()})
            for row in results["rows"]
            for step in _STEPS
            if row["kind"] == kind
        ]
        lines = [
            [
                ranks, step, f"{1e3 * each['cpu_seconds']:.1f}", f"{each['store_sent'] / 1024:.2f}",
                f"{each['store_received'] / 1024:.2f}", f"{each['store_segments']:.0f}",
                f"{each['bytes'] / 1024:.0f}",
            ]
            for ranks, step, each in steps
        ]  # fmt: skip
        parts += [f"{kind.capitalize()}:", table(columns, lines, "rlr")]
    return "\n\n".join(parts)


PAGE = Page("many_ranks", "many_ranks.json", "docs/benchmarks.md", text)
PAGES = [PAGE]


def main() -> int:
    options = PAGE.parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="*", default=_RANKS, help="even numbers")
    args = options.parse_args()
    if any(ranks < 2 or ranks % 2 for ranks in args.ranks):
        options.error("--ranks: even numbers from 2 on")
    for name in meshcast.__all__:
        getattr(meshcast, name)  # imports the module that has it, once for all ranks
    results: Found = {**machine("many_ranks"), "rows": []}
    for kind in _KINDS:
        for ranks in args.ranks:
            name = f"{kind}, {ranks} ranks"
            results["rows"].append(in_child(measure, kind, ranks, name=name))
            print(name, file=sys.stderr)
    print(text(results))
    PAGE.finish(args, results)
    return 0
