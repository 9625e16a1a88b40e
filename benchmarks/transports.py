"""python -m benchmarks.transports: messages between hosts over UCX and over gloo, beside torch's own send
and recv over gloo. Two ranks of this machine, as two hosts; then more of them for connections, and many
private groups for threads. Writes benchmarks/results/transports.json and the tables of docs/transports.md;
takes three minutes, with nothing else running."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from .machine import ROOT, machine
from .page import replace

_RESULTS = ROOT / "benchmarks/results/transports.json"
_PAGE = ROOT / "docs/transports.md"
_MARK = "<!-- {} of what python -m benchmarks.transports writes -->"
_TRANSPORTS = ("ucx", "gloo")
_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes
_BYTES = 64 << 20  # that a round of a size moves, or _CALLS calls if that is less
_CALLS = 100
_WORLDS = (2, 8, 16)  # ranks
_MANY = 20  # private groups
_IDLE = 3.0  # seconds

Call = Callable[[], object]


def _begin(rank: int, world: int, port: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world),
        MESHCAST_HOST_ID=f"host {rank}",
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def _group(transport: str) -> Any:
    os.environ["MESHCAST_TRANSPORT"] = transport
    return dist.new_group(list(range(dist.get_world_size())))


def _pair(rank: int, port: int, repeats: int, out: str) -> None:
    """Round trips of every size, by turns over each way; seconds and CPU seconds of one way."""
    import meshcast
    from torch.distributed.tensor import DTensor, Replicate

    _begin(rank, 2, port)
    meshes = [_mesh([each]) for each in (0, 1)]
    found: dict[str, list[dict[str, float]]] = {}
    for nbytes in _SIZES:
        count = max(1, min(_CALLS, _BYTES // nbytes))
        values = torch.zeros(nbytes // 4)
        mine = DTensor.from_local(values, meshes[rank], [Replicate()], run_check=False)
        ways: dict[str, Call] = {"torch": _torch_ways(values, rank)}
        for transport in _TRANSPORTS:
            group = _group(transport)
            specs = [
                meshcast.TensorSpec((nbytes // 4,), torch.float32, mesh, [Replicate()]) for mesh in meshes
            ]
            there = meshcast.Resharder(specs[0], specs[1], reuse_output=True, group=group)
            back = meshcast.Resharder(specs[1], specs[0], reuse_output=True, group=group)
            ways[transport] = _round_trip(there, back, mine, rank)
            with torch.no_grad():
                ways[transport]()  # connects, over what the variable says now
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        with torch.no_grad():
            for turn in range(repeats + 1):
                for name in random.Random(turn).sample(sorted(ways), len(ways)):
                    dist.barrier()
                    begin, used = time.perf_counter(), time.process_time()
                    for _ in range(count):
                        ways[name]()
                    seconds = time.perf_counter() - begin
                    cpu = torch.tensor([time.process_time() - used], dtype=torch.float64)
                    dist.all_reduce(cpu)
                    if turn > 0:
                        taken[name].append((seconds / (2 * count), float(cpu) / (2 * count)))
        row = {"bytes": float(nbytes)}
        for name, pairs in taken.items():
            row[name], row[f"{name} CPU"] = (statistics.median(values) for values in zip(*pairs, strict=True))
        found.setdefault("sizes", []).append(row)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _mesh(ranks: list[int]) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False, _rank=dist.get_rank())


def _round_trip(there: Any, back: Any, mine: Any, rank: int) -> Call:
    given, returned = (mine, None) if rank == 0 else (None, mine)

    def both() -> None:
        there.run(given)
        back.run(returned)

    return both


def _torch_ways(values: torch.Tensor, rank: int) -> Call:
    def both() -> None:
        for sender in (0, 1):
            if sender == rank:
                dist.send(values, 1 - rank)
            else:
                dist.recv(values, 1 - rank)

    return both


def _many(rank: int, world: int, port: int, groups: int, transport: str, out: str) -> None:
    """The first reshard over all ranks, which connects them; then threads and CPU time of idle groups."""
    import meshcast
    from torch.distributed.tensor import Replicate, Shard

    _begin(rank, world, port)
    ranks = list(range(world))
    full = torch.arange(64 * world, dtype=torch.float32)
    parents = [_group(transport) for _ in range(groups)]
    before, idle_before = len(_threads()), _idle()
    first = 0.0
    for at, group in enumerate(parents):
        dist.barrier()
        begin = time.perf_counter()
        meshcast.reshard_local(
            full.chunk(world)[rank], meshcast.Layout(ranks, [Shard(0)]), None,
            meshcast.Layout(ranks, [Replicate()]), shape=full.shape, dtype=full.dtype, group=group,
        )  # fmt: skip
        if at == 0:
            first = time.perf_counter() - begin
    names = _threads()
    idle = _idle() - idle_before
    seconds = torch.tensor([first], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    if rank == 0:
        ours = sum(name.startswith("mc-") or name == "async" for name in names)
        found = {"first": float(seconds), "threads": len(names) - before, "ours": ours, "idle": idle}
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _threads() -> list[str]:
    """The names of this process's; one that ends meanwhile may be missing."""
    names = []
    for each in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append(Path(f"/proc/self/task/{each}/comm").read_text().strip())
    return names


def _idle() -> float:
    """CPU time of this process while it waits, of a core."""
    dist.barrier()
    used = time.process_time()
    time.sleep(_IDLE)
    return (time.process_time() - used) / _IDLE


def _spawned(work: Callable[..., None], world: int, *arguments: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        port = random.SystemRandom().randrange(20000, 32000)
        processes.spawn(
            work, args=(*(() if work is _pair else (world,)), port, *arguments, str(out)), nprocs=world
        )
        return json.loads(out.read_text())


def text(results: dict[str, Any]) -> str:
    head = results["header"]
    said = (
        f"`{head['command']}`: commit {head['commit']}, {head['cores']} cores, kernel {head['kernel']}, "
        f"torch {head['torch']}; medians of {head['repeats']} rounds by turns. CPU time is that of both "
        "ranks."
    )
    lines = [
        said,
        "",
        "| one message | UCX, us | gloo, us | torch, us | CPU: UCX, us | gloo, us | torch, us |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    columns = ("ucx", "gloo", "torch", "ucx CPU", "gloo CPU", "torch CPU")
    for row in results["sizes"]:
        size = int(row["bytes"]) >> 10
        name = f"{size} KiB" if size < 1024 else f"{size >> 10} MiB"
        lines.append(f"| {name} | " + " | ".join(f"{row[column] * 1e6:.0f}" for column in columns) + " |")
    lines += [
        "",
        "| ranks | private groups | transport | first reshard, s | more threads | ours | idle, of a core |",
        "|---:|---:|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['world']} | {row['groups']} | {row['transport']} | {row['first']:.2f} | {row['threads']} "
        f"| {row['ours']} | {row['idle']:.2%} |"
        for row in results["worlds"]
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transports", description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--no-publish", action="store_true", help="leave files as they are")
    args = parser.parse_args()
    results: dict[str, Any] = {"header": {**machine("benchmarks.transports"), "repeats": args.repeats}}
    results |= _spawned(_pair, 2, args.repeats)
    results["worlds"] = [
        {"world": world, "groups": groups, "transport": transport} | _spawned(_many, world, groups, transport)
        for world, groups in [*((world, 1) for world in _WORLDS), (2, _MANY)]
        for transport in _TRANSPORTS
    ]
    print(text(results))
    if not args.no_publish:
        _RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        replace(_PAGE, _MARK, text(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
