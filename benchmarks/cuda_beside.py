"""What a bf16 matrix product loses while a reshard runs beside it, between two processes on one GPU.

CUDA_VISIBLE_DEVICES=0 torchrun --nproc-per-node 2 -m benchmarks.cuda_beside [--out FILE.json]

Rank 0 multiplies on one stream. From another, 256 MiB go to rank 1 by asynchronous calls: one for each
product, as between the stages of a pipeline, and one after the other without a pause, which is the most that
can be asked. Time is that of the products, by CUDA events, the median of alternating rounds. The loss is
against rounds without a reshard in the same run. Needs a GPU and a build with CUDA.
"""

from __future__ import annotations

import statistics
import sys

import meshcast
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import on_gpu
from benchmarks.steps import steps

ROUNDS = 9
PRODUCTS = 20
SIZES = (4096, 8192)
NBYTES = 256 << 20
# Calls in flight at once, where they follow each other without a pause.
IN_FLIGHT = 4


def transfer(rank: int) -> tuple[meshcast.Resharder, DTensor]:
    """From rank 0 to rank 1, which finds what was sent."""
    source, target = (DeviceMesh("cuda", [each], _init_backend=False, _rank=rank) for each in (0, 1))
    shape = torch.Size((64, NBYTES // 4 // 64))
    local = torch.arange(shape.numel() if rank == 0 else 0, dtype=torch.float32, device="cuda").remainder_(
        4093
    )
    x = DTensor.from_local(
        local.view(shape if rank == 0 else (0, 0)), source, [Shard(0)], run_check=False, shape=shape,
        stride=(shape[1], 1),
    )  # fmt: skip
    resharder = meshcast.Resharder(x, target, [Shard(0)])
    found = resharder.run(x).to_local()
    expected = torch.arange(shape.numel(), dtype=torch.float32, device="cuda").remainder_(4093)
    if rank == 1 and not torch.equal(found.flatten(), expected):
        sys.exit("benchmarks.cuda_beside: rank 1 got wrong bytes")
    return resharder, x


def milliseconds(size: int, rank: int, calls: int, resharder: meshcast.Resharder, x: DTensor) -> float:
    """Of a product on rank 0, while each of the PRODUCTS has `calls` reshards beside it."""
    a = torch.randn(size, size, dtype=torch.bfloat16, device="cuda") if rank == 0 else None
    torch.cuda.synchronize()
    dist.barrier()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    beside = torch.cuda.Stream()  # neither waits for a product, nor a product for it
    pending: list[meshcast.Handle] = []
    begin.record()
    for _ in range(PRODUCTS):
        with torch.cuda.stream(beside):
            for _ in range(calls):
                pending.append(resharder.start(x))
                if len(pending) > IN_FLIGHT:
                    pending.pop(0).wait()
        if a is not None:
            torch.mm(a, a)
    end.record()
    with torch.cuda.stream(beside):
        for handle in pending:
            handle.wait()
    torch.cuda.synchronize()
    taken = torch.tensor([begin.elapsed_time(end) / PRODUCTS if rank == 0 else 0.0])
    dist.broadcast(taken, 0)
    return taken.item()


def main() -> None:
    out = on_gpu.begin("cuda_beside", __doc__)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if world != 2:
        on_gpu.refuse("cuda_beside", f"two ranks are needed, found {world}")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    resharder, x = transfer(rank)
    rows = []
    for size in steps(SIZES, "sizes"):
        taken: dict[int, list[float]] = {0: [], 1: [], IN_FLIGHT: []}
        for number in range(ROUNDS + 1):
            for calls, found in taken.items():
                each = milliseconds(size, rank, calls, resharder, x)
                if number > 0:  # the first round warms up
                    found.append(each)
        alone, one, many = (statistics.median(found) for found in taken.values())
        row = {"size": size, "alone_ms": alone, "one_each_ms": one, "without_pause_ms": many}
        row |= {
            "one_each_loss": one / alone - 1,
            "without_pause_loss": many / alone - 1,
            "moved_bytes": NBYTES,
        }
        rows.append(row)
        if rank == 0:
            print(
                f"{size:>6}: {alone:8.3f} ms alone, {one / alone - 1:+7.1%} with a reshard for each product, "
                f"{many / alone - 1:+7.1%} with reshards without a pause",
                flush=True,
            )
    if rank == 0:
        on_gpu.write_figures(out, rows, ranks=world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
