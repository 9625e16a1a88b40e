"""Worlds of many ranks: the first exchange of all with all, which connects them; threads, memory, idling.

python -m benchmarks.calls.worlds reads a world per line, CARRIER RANKS GROUPS TARGET, and answers each
with JSON. Ranks are forked from one process that has loaded torch and meshcast, so that 64 of them fit into
little memory, and loading modules is no part of the first exchange. Uses meshcast only where that is the
carrier, so that other interpreters can run it.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from .cases import CARRIERS

EACH = 4096  # bytes from each rank to each
_LIMIT = 90.0  # seconds for a world
_IDLE = 4.0  # seconds
_SETTLE = 0.5  # seconds before threads are counted


def _rank(carrier: str, rank: int, world: int, groups: int, target: str, port: int, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(dict(CARRIERS[carrier].env), MESHCAST_HOST_ID=f"host {rank}")
    torch.set_num_threads(1)
    limit = timedelta(seconds=_LIMIT)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    backend = CARRIERS[carrier].backend
    ranks = list(range(world))
    if backend:
        exchange = _torch_exchange(backend, rank, world)
        parents = [None] * groups
    else:
        exchange = _meshcast_exchange(rank, world, target)
        # Each private group belongs to a process group of its own, whose gloo has threads too.
        parents = [dist.new_group(ranks) for _ in range(groups)]
    known, memory = set(_threads()), _resident()
    first = 0.0
    for at, parent in enumerate(parents):
        dist.barrier()
        begin = time.perf_counter()
        exchange(parent)
        if at == 0:
            first = time.perf_counter() - begin
            memory = _resident() - memory
    dist.barrier()
    time.sleep(_SETTLE)  # threads that only connect have ended then
    new = {thread: name for thread, name in _threads().items() if thread not in known}
    slowest = torch.tensor([first], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    found = {"first": float(slowest), "threads": len(new), "memory": memory}
    if not backend and world == 2:
        found["ours"] = sum(name.startswith("mc-") or name == "async" for name in new.values())
        found["idle"] = _idle(known)
    if rank == 0:
        answers.put(found)
        answers.close()
        answers.join_thread()
    dist.barrier()
    dist.destroy_process_group()


def _torch_exchange(backend: str, rank: int, world: int) -> Any:
    import torch
    import torch.distributed as dist

    if backend != "gloo":
        import commux

        commux.register()
    given = torch.ones(world, EACH, dtype=torch.uint8)
    got = torch.ones(world, EACH, dtype=torch.uint8)

    def exchange(_: Any) -> None:
        group = dist.new_group(list(range(world)), backend=backend)
        works = []
        for step in range(1, world):
            to, source = (rank + step) % world, (rank - step) % world
            works.append(dist.irecv(got[source], source, group=group))
            works.append(dist.isend(given[to], to, group=group))
        for work in works:
            work.wait()

    return exchange


def _meshcast_exchange(rank: int, world: int, target: str) -> Any:
    """Rows become columns, so that all ranks connect with all; or replicas, by chains."""
    import meshcast
    import torch
    from torch.distributed.tensor import Replicate, Shard

    row = torch.arange(EACH * world // 4, dtype=torch.int32)[None] + rank
    columns = target == "columns"
    layouts = [
        meshcast.Layout(list(range(world)), [placement])
        for placement in (Shard(0), Shard(1) if columns else Replicate())
    ]

    def exchange(parent: Any) -> None:
        found = meshcast.reshard_local(
            row, layouts[0], None, layouts[1], shape=(world, row.shape[1]), dtype=row.dtype, group=parent
        )
        if int(found[-1, 0]) != (rank * EACH // 4 if columns else 0) + world - 1:
            raise RuntimeError(f"rank {rank}: wrong values")

    return exchange


def _threads() -> dict[str, str]:
    """The names of this process's by number; one that ends meanwhile may be missing."""
    names = {}
    for each in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names[each] = Path(f"/proc/self/task/{each}/comm").read_text().strip()
    return names


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _idle(known: set[str]) -> float:
    """CPU time of all threads but these while this process waits, of a core. What a thread takes that ends
    meanwhile is not known."""
    before = _nanoseconds(known)
    time.sleep(_IDLE)
    used = sum(taken - before.get(each, 0) for each, taken in _nanoseconds(known).items())
    return used / 1e9 / _IDLE


def _nanoseconds(known: set[str]) -> dict[str, int]:
    """CPU time by thread, but for these."""
    found = {}
    for each in set(_threads()) - known:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[each] = int(Path(f"/proc/self/task/{each}/schedstat").read_text().split()[0])
    return found


class Worlds:
    """Starts worlds by a server that forks ranks."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._store_of = dist.TCPStore
        self._context = multiprocessing.get_context("forkserver")
        # What is not there is left out.
        self._context.set_forkserver_preload(
            ["torch.distributed.tensor", "meshcast.resharding.reshard", __name__]
        )

    def run(self, carrier: str, world: int, groups: int, target: str) -> dict[str, Any]:
        """What rank 0 found, or {"failed": why}."""
        answers = self._context.Queue()
        store = self._store_of("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [
            self._context.Process(
                target=_rank, args=(carrier, rank, world, groups, target, store.port, answers)
            )
            for rank in range(world)
        ]
        try:
            for rank in ranks:
                rank.start()
            end = time.monotonic() + _LIMIT
            while any(rank.is_alive() for rank in ranks) and all(not rank.exitcode for rank in ranks):
                if time.monotonic() > end:
                    return {"failed": f"not done within {_LIMIT:.0f} s"}
                time.sleep(0.02)
            bad = next((at for at, rank in enumerate(ranks) if rank.exitcode != 0), None)
            return answers.get(timeout=5) if bad is None else {"failed": f"rank {bad} ended with an error"}
        finally:
            for rank in ranks:
                if rank.pid is not None:
                    rank.kill()
                    rank.join()


def main() -> None:
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what ranks print, as gloo does, is no answer
        worlds = Worlds()
        for line in sys.stdin:
            carrier, world, groups, target = line.split()
            print(json.dumps(worlds.run(carrier, int(world), int(groups), target)), file=answers, flush=True)


if __name__ == "__main__":
    main()
