"""Where a broadcast is better a multicast: torch.distributed.broadcast under gloo and under backend meshcast,
from 4 KiB to 16 MiB, or of the sizes given, in KiB. Prints a table; sets MESHCAST_BROADCAST_BYTES itself.

With PYTHONPATH=python:. and, for hosts of its own, root:
python -m benchmarks.cluster run --hosts 5 --mbit 250 -- python -m benchmarks.broadcast_sizes
torchrun --nproc-per-node 4 benchmarks/broadcast_sizes.py
"""

from __future__ import annotations

import os
import statistics
import sys
import time

os.environ["MESHCAST_BROADCAST_BYTES"] = "1"

import meshcast  # noqa: F401  registers the backend
import torch
import torch.distributed as dist

from benchmarks.steps import steps

_SIZES = [4 << shift for shift in range(13)]  # KiB
_SECONDS = 1.0  # that a size may take, about, with each backend
_LEAST, _MOST = 5, 41  # repeats


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "meshcast")}
    rank = dist.get_rank()
    if rank == 0:
        print("| KiB | gloo, ms | meshcast, ms | meshcast / gloo |\n|---|---|---|---|")
    for size in steps([1024 * kib for kib in ([int(text) for text in sys.argv[1:]] or _SIZES)], "sizes"):
        data = torch.zeros(size, dtype=torch.uint8)
        times: dict[str, list[float]] = {name: [] for name in groups}
        repeats = _MOST
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
                repeats = max(_LEAST, min(_MOST, int(_SECONDS / max(times["gloo"][0], times["meshcast"][0]))))
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
    elapsed = torch.tensor(time.monotonic() - begin, dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


if __name__ == "__main__":
    main()
