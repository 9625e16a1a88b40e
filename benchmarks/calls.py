"""The time of one call between two processes, by size and by kind of call, beside torch's gloo send and recv.

    python -m benchmarks.calls [--sizes 4 64 1024] [--against TREE] [--rounds 5] [--json FILE]

Two ranks of this machine pass a float32 tensor of so many KiB back and forth: through shared memory, and over
UCX on the loopback. `stays` is a reshard() to the same layout, which moves nothing; with a gradient, without
its backward. With --against, the same calls of another tree of meshcast, built, take turns with those of this
one, round by round; a round is a pair of processes of each. Figures are medians of the rounds, in us a call.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CALLS = ("stays, gradient", "stays", "reshard", "reshard_", "Resharder", "gloo")
TRANSPORTS = {"shm": "1", "ucx": "0"}  # MESHCAST_SHM
_SECONDS = 0.25  # of one figure, about
_LIMIT = 300.0  # seconds of one pair


def _resharder(source: Any, mesh: Any, placements: Any, spec: Any) -> Any:
    import meshcast

    if "placements" in inspect.signature(meshcast.Resharder).parameters:
        return meshcast.Resharder(source, mesh, placements, reuse_output=True)
    return meshcast.Resharder(source, spec, reuse_output=True)  # another tree may know this form alone


def _steps(rank: int, kib: int) -> dict[str, tuple[Callable[[], None], int]]:
    """What each kind of call does, there and back, and how many calls that is."""
    import meshcast
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    count = kib * 256
    meshes = [DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])]
    both = DeviceMesh("cpu", [0, 1])
    place = [Replicate()]
    ends = [
        DTensor.from_local(
            torch.arange(float(count)) if rank == holder else torch.empty(0),
            mesh,
            place,
            run_check=False,
            shape=torch.Size([count]),
            stride=(1,),
        )
        for holder, mesh in enumerate(meshes)
    ]
    there = _resharder(ends[0], meshes[1], place, ends[1])
    back = _resharder(ends[1], meshes[0], place, ends[0])
    split = distribute_tensor(torch.arange(2.0 * count), both, [Shard(0)])
    tracked = split.detach().requires_grad_()
    plain = torch.arange(float(count))

    def gradient() -> None:
        meshcast.reshard(tracked, both, [Shard(0)])

    @torch.no_grad()
    def stays() -> None:
        meshcast.reshard(split, both, [Shard(0)])

    @torch.no_grad()
    def reshard() -> None:
        meshcast.reshard(ends[0], meshes[1], place)
        meshcast.reshard(ends[1], meshes[0], place)

    def reshard_() -> None:
        meshcast.reshard_(ends[1], ends[0])
        meshcast.reshard_(ends[0], ends[1])

    @torch.no_grad()
    def resharder() -> None:
        there.run(ends[0] if rank == 0 else None)
        back.run(ends[1] if rank == 1 else None)

    def gloo() -> None:
        for sender in (0, 1):
            dist.send(plain, 1 - sender) if rank == sender else dist.recv(plain, sender)

    steps = (gradient, stays, reshard, reshard_, resharder, gloo)
    return dict(zip(CALLS, zip(steps, (1, 1, 2, 2, 2, 2), strict=True), strict=True))


def _rank(sizes: list[int]) -> None:
    """Measures all kinds of calls, and prints what rank 0 saw."""
    import meshcast
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, float] = {}
    for kib in sizes:
        for name, (step, calls) in _steps(rank, kib).items():
            for _ in range(20):
                step()
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(10):
                step()
            each = torch.tensor([(time.perf_counter() - begin) / 10])
            dist.all_reduce(each, dist.ReduceOp.MAX)
            times = max(10, int(_SECONDS / 5 / each.item()))
            rounds = []
            for _ in range(5):
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(times):
                    step()
                rounds.append((time.perf_counter() - begin) / times / calls * 1e6)
                meshcast.backward()  # frees the graph
            found[f"{name}/{kib}"] = statistics.median(rounds)
    dist.barrier()
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def _pair(tree: Path, transport: str, sizes: list[int]) -> dict[str, float]:
    """One pair of processes that use the meshcast of `tree`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        environment = os.environ | {
            "PYTHONPATH": f"{tree / 'python'}{os.pathsep}{ROOT}",
            "MESHCAST_SHM": TRANSPORTS[transport],
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "benchmarks.calls", "--rank", "--sizes", *map(str, sizes)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT))
    try:
        outputs = [rank.communicate(timeout=_LIMIT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank over {transport} ended with {[rank.returncode for rank in ranks]}")
    return {f"{transport}/{name}": value for name, value in json.loads(outputs[0]).items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calls", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[4], metavar="KIB")
    parser.add_argument("--against", type=Path, metavar="TREE", help="another tree of meshcast, built")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        _rank(arguments.sizes)
        return 0
    trees = {"this": ROOT}
    if arguments.against is not None:
        trees["against"] = arguments.against.resolve()
    found: dict[str, dict[str, list[float]]] = {name: {} for name in trees}
    for _ in range(arguments.rounds):
        for name, tree in trees.items():
            for transport in TRANSPORTS:
                for key, value in _pair(tree, transport, arguments.sizes).items():
                    found[name].setdefault(key, []).append(value)
    medians: dict[str, dict[str, float]] = {
        name: {key: statistics.median(values) for key, values in each.items()} for name, each in found.items()
    }
    print(_table(medians))
    if arguments.json is not None:
        from .machine import machine

        result: dict[str, Any] = {**machine("benchmarks.calls"), "unit": "us a call", "medians": medians}
        arguments.json.write_text(json.dumps(result | {"rounds": found}, indent=1) + "\n")
    return 0


def _table(medians: dict[str, dict[str, float]]) -> str:
    names = list(medians)
    lines = [f"| call | KiB | {' | '.join(names)} | of gloo |", "|---|---:|" + "---:|" * (len(names) + 1)]
    for key, value in medians["this"].items():
        transport, call, kib = key.split("/")
        figures = [f"{medians[name][key]:.1f}" for name in names]
        peer = medians["this"][f"{transport}/gloo/{kib}"]
        lines.append(f"| {transport}, {call} | {kib} | {' | '.join(figures)} | {value / peer:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
