"""The calls of torch.distributed by size, under gloo and under backend meshcast. Each prints a table."""

from __future__ import annotations

import os
import statistics
import time

import meshcast  # noqa: F401  registers the backend
import torch
import torch.distributed as dist

from .harness import parser
from .ranks import cpu_seconds, largest, steps, total


def _begin(name: str, text: str | None, sizes: list[int]) -> tuple[list[int], dict[str, dist.ProcessGroup]]:
    """The sizes that were asked for, in KiB, and a group of each backend."""
    options = parser(name, text)
    options.add_argument("sizes", type=int, nargs="*", default=sizes, help="KiB")
    found: list[int] = options.parse_args().sizes
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return found, {name: dist.new_group(backend=name) for name in ("gloo", "meshcast")}


_BROADCASTS = [4 << shift for shift in range(13)]  # KiB
_SECONDS = 1.0  # that a size may take, about, with each backend
_LEAST, _REPEATS = 5, 41


def broadcasts() -> None:
    """torch.distributed.broadcast under gloo and under backend meshcast, from 4 KiB to 16 MiB, or of the
    sizes given, in KiB: where a broadcast is better a multicast. Sets MESHCAST_BROADCAST_BYTES itself.

    python -m benchmarks cluster run --hosts 5 --mbit 250 -- python -m benchmarks broadcast_sizes
    torchrun --nproc-per-node 4 -m benchmarks broadcast_sizes
    """
    os.environ["MESHCAST_BROADCAST_BYTES"] = "1"
    sizes, groups = _begin("broadcast_sizes", broadcasts.__doc__, _BROADCASTS)
    rank = dist.get_rank()
    if rank == 0:
        print("| KiB | gloo, ms | meshcast, ms | meshcast / gloo |\n|---|---|---|---|")
    for size in steps([1024 * kib for kib in sizes], "sizes"):
        data = torch.zeros(size, dtype=torch.uint8)
        times: dict[str, list[float]] = {name: [] for name in groups}
        repeats = _REPEATS
        run = 0
        while run <= repeats:
            for name, group in groups.items():
                data.fill_((run + rank) % 251)
                elapsed = _timed(data, group)
                if int(data.sum()) != size * (run % 251):
                    raise SystemExit(f"rank {rank}: {name} delivered wrong bytes")
                if run > 0:  # the first meets and agrees
                    times[name].append(elapsed)
            if run == 1:
                repeats = max(
                    _LEAST, min(_REPEATS, int(_SECONDS / max(times["gloo"][0], times["meshcast"][0])))
                )
            run += 1
        gloo, ours = (1e3 * statistics.median(times[name]) for name in ("gloo", "meshcast"))
        if rank == 0:
            print(f"| {size // 1024} | {gloo:.2f} | {ours:.2f} | {ours / gloo:.2f} |", flush=True)
    dist.destroy_process_group()


def _timed(data: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    """Seconds until the last rank has the data; the same number on all ranks."""
    dist.barrier()
    begin = time.monotonic()
    dist.broadcast(data, 0, group)
    return largest(time.monotonic() - begin)


_MESSAGES = [4, 64, 1024, 16384, 65536]  # KiB
_ROUNDS = 11  # of each backend; the first, which meets, does not count
_BYTES, _MOST = 64 << 20, 200  # messages of a round: so many bytes, but no more than so many


def messages() -> None:
    """torch.distributed.send and recv under gloo and under backend meshcast, by turns: two ranks of this
    machine or, as root, of two emulated hosts. The sizes are in KiB.

    torchrun --nproc-per-node 2 -m benchmarks message_sizes 4 64 1024 65536
    python -m benchmarks cluster run --hosts 2 --mbit 1000 -- python -m benchmarks message_sizes 4 1024
    """
    sizes, groups = _begin("message_sizes", messages.__doc__, _MESSAGES)
    if dist.get_rank() == 0:
        print("| KiB | gloo, us | meshcast, us | ratio | CPU: gloo, us | meshcast, us |")
        print("|---|---|---|---|---|---|")
    for kib in steps(sizes, "sizes"):
        data = torch.zeros(1024 * kib, dtype=torch.uint8)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
        for _ in range(_ROUNDS):
            for name, group in groups.items():
                found[name].append(_round(data, group))
        if dist.get_rank() == 0:
            (gloo, gloo_cpu), (ours, ours_cpu) = (
                [statistics.median(each[at] for each in found[name][1:]) for at in (0, 1)] for name in groups
            )
            pairs = zip(found["meshcast"][1:], found["gloo"][1:], strict=True)
            ratio = statistics.median(one[0] / other[0] for one, other in pairs)
            print(
                f"| {kib} | {gloo:.0f} | {ours:.0f} | {ratio:.2f} | {gloo_cpu:.0f} | {ours_cpu:.0f} |",
                flush=True,
            )
    dist.destroy_process_group()


def _round(data: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[float, float]:
    """Microseconds for one message one way, and of CPU time of both ranks."""
    count = max(1, min(_MOST, _BYTES // data.numel()))
    peer = 1 - dist.get_rank()
    dist.barrier()
    begin, cpu = time.perf_counter(), cpu_seconds()
    for _ in range(count):
        if peer == 1:
            dist.send(data, peer, group)
            dist.recv(data, peer, group)
        else:
            dist.recv(data, peer, group)
            dist.send(data, peer, group)
    elapsed = time.perf_counter() - begin
    return 1e6 * elapsed / count / 2, 1e6 * total(cpu_seconds() - cpu) / count / 2
