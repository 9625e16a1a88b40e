"""Rates of reshards over CUDA IPC between processes on one GPU, beside plain copies.

CUDA_VISIBLE_DEVICES=0 torchrun --nproc-per-node 2 -m benchmarks.cuda_ipc [--out FILE.json]      (or 4)

The first half of the ranks holds a tensor in rows, the second half receives the same rows: contiguous boxes,
of 64 KiB to 1 GiB in all, by a compiled Resharder with its output reused. Each size is compared with what was
sent, then timed on the host from a barrier until the GPU is through, the slowest rank counted, median of
repeats. Beside it, in the same run: a device-to-device copy of as many bytes inside one process, and a copy
out of memory that another process has shared through torch (the raw IPC copy). Rates count bytes read and
written. Needs a GPU and a build with CUDA.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import meshcast
import torch
import torch.distributed as dist
from meshcast.groups.parent import parent_group
from meshcast.transfers.gpu import gpu_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import reduce_tensor

from benchmarks import on_gpu
from benchmarks.steps import steps

REPEATS = 31
WARM_UP = 5
SIZES = [64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30]


def seconds_of(call: Callable[[], Any]) -> float:
    """Of one call on the slowest rank, until its GPU is through; median of the repeats."""
    taken = []
    for number in range(WARM_UP + REPEATS):
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        slowest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if number >= WARM_UP:
            taken.append(slowest.item())
    return statistics.median(taken)


def nothing() -> None:
    """What a rank does that has no part in a copy."""


def plain_seconds(nbytes: int, rank: int) -> float:
    source = torch.empty(nbytes if rank == 0 else 0, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return seconds_of((lambda: target.copy_(source)) if rank == 0 else nothing)


def raw_ipc_seconds(nbytes: int, rank: int) -> float:
    """The last rank copies out of rank 0's memory, which torch has shared."""
    receiver = dist.get_world_size() - 1
    box: list[Any] = [None]
    source = torch.empty(nbytes if rank == 0 else 0, dtype=torch.uint8, device="cuda")
    if rank == 0:
        box = [reduce_tensor(source)]
    dist.broadcast_object_list(box, 0)
    call: Callable[[], Any] = nothing
    if rank == receiver:
        rebuild, arguments = box[0]
        shared = rebuild(*arguments)
        target = torch.empty_like(shared)
        call = lambda: target.copy_(shared)  # noqa: E731
    return seconds_of(call)


def reshard_seconds(nbytes: int, rank: int) -> float:
    world = dist.get_world_size()
    senders, receivers = list(range(world // 2)), list(range(world // 2, world))
    src, dst = (DeviceMesh("cuda", ranks, _init_backend=False, _rank=rank) for ranks in (senders, receivers))
    shape = torch.Size((len(senders) * 64, nbytes // 4 // len(senders) // 64))
    mine = rank in senders
    local = torch.full((64 if mine else 0, shape[1]), float(rank + 1), device="cuda")
    local += torch.arange(local.numel(), device="cuda", dtype=torch.float32).view_as(local) % 4096
    x = DTensor.from_local(local, src, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
    resharder = meshcast.Resharder(x, dst, [Shard(0)], reuse_output=True)
    found = resharder.run(x).to_local()
    if not mine:
        count = torch.arange(found.numel(), device="cuda", dtype=torch.float32).view_as(found) % 4096
        if not torch.equal(found, count + (rank - len(senders) + 1)):
            sys.exit(f"benchmarks.cuda_ipc: {nbytes} bytes: rank {rank} got wrong bytes")
    gpu = gpu_of(parent_group(None, "benchmark").private(list(range(world))))
    if gpu is None or gpu.transport != "cuda_ipc":
        sys.exit("benchmarks.cuda_ipc: the ranks are not connected over CUDA IPC: give them one GPU")
    return seconds_of(lambda: resharder.run(x))


def main() -> None:
    out = on_gpu.begin("cuda_ipc", __doc__)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if world % 2:
        on_gpu.refuse("cuda_ipc", f"an even number of ranks is needed, found {world}")
    rows = []
    for nbytes in steps(SIZES, "sizes"):
        seconds = {
            "plain": plain_seconds(nbytes, rank),
            "raw_ipc": raw_ipc_seconds(nbytes, rank),
            "reshard": reshard_seconds(nbytes, rank),
        }
        rates = {name: 2 * nbytes / taken / 1e9 for name, taken in seconds.items()}
        rows.append({"bytes": nbytes, "seconds": seconds, "gb_per_s": rates})
        if rank == 0:
            figures = "  ".join(f"{n} {1e6 * seconds[n]:9.1f} us {rates[n]:7.1f} GB/s" for n in seconds)
            print(f"{nbytes:>11} B  {figures}", flush=True)
    if rank == 0:
        on_gpu.write_figures(out, rows, ranks=world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
