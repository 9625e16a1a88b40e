"""Figures on GPUs: kernels, reshards over CUDA IPC, and a matrix product next to a reshard. They refuse to
begin where nothing can be measured."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import meshcast
import torch
import torch.distributed as dist
from meshcast.base import settings
from meshcast.base.progress import track
from meshcast.groups.parent import parent_group
from meshcast.topology import stored_figures
from meshcast.transfers.gpu import gpu_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import reduce_tensor

from .harness import ROOT, parser, save
from .ranks import steps

sys.path.append(str(ROOT / "tests"))

import cuda_kernels as kernel_calls
from kernel_shapes import ALL


def begin(name: str, text: str | None) -> Path | None:
    """Reads the command line of benchmark `name`, whose help is `text`, and returns the file that its figures
    go to, if any. Ends the process where nothing can be measured."""
    options = parser(name, text)
    options.add_argument("--out", type=Path, help="write the figures as JSON")
    out: Path | None = options.parse_args().out
    if not torch.cuda.is_available():
        refuse(name, "torch sees no CUDA device")
    if not kernel_calls.available():
        refuse(name, "this build of meshcast has no CUDA code")
    return out


def refuse(name: str, reason: str) -> NoReturn:
    sys.exit(f"benchmarks {name}: {reason}: nothing was measured")


def write_figures(out: Path | None, rows: list[dict[str, Any]], **facts: Any) -> None:
    """The rows, with the facts and what they were measured on."""
    if out is None:
        return
    machine = {"device": _clocks(), "torch": torch.__version__, "cuda": torch.version.cuda}
    save(out, facts | machine | {"rows": rows})


def _clocks() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    try:
        return subprocess.run(query, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"


CALLS = 20  # in a graph, which is replayed KERNEL_REPEATS times
KERNEL_REPEATS = 15
SMALLEST = 1 << 20


def rate(call: Callable[[], Any], nbytes: int) -> float:
    """Bytes read plus bytes written per second, median of the repeats."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    seconds = []
    for _ in range(KERNEL_REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return 2 * nbytes / statistics.median(seconds)


def plain_rate(nbytes: int) -> float:
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return rate(lambda: target.copy_(source), nbytes)


def measure_box(name: str, pairs: list[kernel_calls.Pair], direction: str) -> dict[str, Any]:
    def by_torch() -> None:
        for source, target in pairs:
            target.copy_(source)

    kernel_calls.copy(pairs)
    if not all(torch.equal(source, target) for source, target in pairs):
        sys.exit(f"benchmarks cuda_kernels: {name}, {direction}: wrong bytes")
    nbytes = sum(source.nbytes for source, _ in pairs)
    plain = plain_rate(nbytes)
    ours, theirs = rate(lambda: kernel_calls.copy(pairs), nbytes), rate(by_torch, nbytes)
    row = {
        "box": name,
        "direction": direction,
        "bytes": nbytes,
        "gb_per_s": ours / 1e9,
        "of_plain_copy": ours / plain,
        "torch_of_plain_copy": theirs / plain,
    }
    ratios = f"{ours / plain:6.2f} torch {theirs / plain:6.2f}"
    print(f"{name:<24} {direction:<7} {nbytes:>11} B {ours / 1e9:8.0f} GB/s {ratios}")
    return row


def kernels() -> None:
    """Rates of the pack and unpack kernels beside a plain device-to-device copy and torch's copy_.

    For every box of tests/kernel_shapes.py with at least 1 MiB, and for boxes of 4 KiB in one call: bytes
    read and written per second, median of repeats, timed by CUDA events around a CUDA graph of calls that
    follow each other, after the bytes were compared. Without a graph the host would be measured: a GPU copies
    these boxes faster than Python starts the next call. Ratios are to a copy of as many contiguous bytes in
    the same run. Needs a GPU and a build with CUDA.
    """
    out = begin("cuda_kernels", kernels.__doc__)
    rows = []
    for box in track(ALL, "boxes", ticks=False):
        tensor = torch.randint(0, 1 << 30, box.full, dtype=torch.int32, device="cuda")
        view = box.of(tensor)
        if view.nbytes < SMALLEST:
            continue
        packed = torch.empty(view.shape, dtype=view.dtype, device="cuda")
        rows.append(measure_box(box.name, [(view, packed)], "pack"))
        rows.append(measure_box(box.name, [(packed, view)], "unpack"))
    tensor = torch.randint(0, 1 << 30, (112, 64, 32), dtype=torch.int32, device="cuda")
    pairs = [(part[:, :16], torch.empty(64, 16, dtype=torch.int32, device="cuda")) for part in tensor]
    rows.append(measure_box("112 boxes of 4 KiB", pairs, "pack"))
    write_figures(out, rows)


IPC_REPEATS = 31
WARM_UP = 5
IPC_SIZES = [64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30]


def seconds_of(call: Callable[[], Any]) -> float:
    """Of one call on the slowest rank, until its GPU is through; median of the repeats."""
    taken = []
    for number in range(WARM_UP + IPC_REPEATS):
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
            sys.exit(f"benchmarks cuda_ipc: {nbytes} bytes: rank {rank} got wrong bytes")
    gpu = gpu_of(parent_group(None, "benchmark").private(list(range(world))))
    if gpu is None or gpu.transport != "cuda_ipc":
        sys.exit("benchmarks cuda_ipc: the ranks are not connected over CUDA IPC: give them one GPU")
    return seconds_of(lambda: resharder.run(x))


def ipc() -> None:
    """Rates of reshards over CUDA IPC between processes on one GPU, beside plain copies.

    CUDA_VISIBLE_DEVICES=0 torchrun --nproc-per-node 2 -m benchmarks cuda_ipc [--out FILE.json]      (or 4)

    The first half of the ranks holds a tensor in rows, the second half receives the same rows: contiguous
    boxes, of 64 KiB to 1 GiB in all, by a compiled Resharder with its output reused. Each size is compared
    with what was sent, then timed on the host from a barrier until the GPU is through, the slowest rank
    counted, median of repeats. Beside it, in the same run: a device-to-device copy of as many bytes inside
    one process, and a copy out of memory that another process has shared through torch (the raw IPC copy).
    Rates count bytes read and written. Needs a GPU and a build with CUDA.
    """
    out = begin("cuda_ipc", ipc.__doc__)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if world % 2:
        refuse("cuda_ipc", f"an even number of ranks is needed, found {world}")
    rows = []
    for nbytes in steps(IPC_SIZES, "sizes"):
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
        write_figures(out, rows, ranks=world)
    dist.destroy_process_group()


MEASURED_SECONDS = 0.05  # about, of one transfer


def topology() -> None:
    """What measure_topology finds between the GPUs of this job, and what it keeps for later ones.

    torchrun --nproc-per-node 2 -m benchmarks cuda_topology [--out FILE.json]      (or more)

    Ranks take the GPUs in turns, so that those of a machine with a single one share it. The rates are of
    tensors on the GPUs, over the transport that other calls take; a round is what the rounds of a plan cost
    apart from their bytes. A group that is made afterwards must plan with these figures. Needs a GPU and a
    build with CUDA.
    """
    out = begin("cuda_topology", topology.__doc__)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if world < 2:
        refuse("cuda_topology", f"two ranks are needed, found {world}")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    found = meshcast.measure_topology(seconds=MEASURED_SECONDS, device="cuda")
    group = parent_group(None, "benchmark").private(list(range(world)))
    group.connect(group.timeout)
    machine = settings.gpu_machine()
    slots, ignored = stored_figures(machine) if machine else ({}, "NVML is missing")
    figures = group.figures
    kept = f"kept ({figures.slot}), and taken by a new group" if figures else ignored or "not kept"
    if rank == 0:
        rows = json.loads(found.to_json())["hosts"]
        for host in rows:
            nic = host["nics"][0]
            print(
                f"ranks {host['ranks']}: {host['local_rate'] / 1e9:.1f} GB/s inside, "
                f"{nic['out_rate'] / 1e9:.1f} out, {nic['in_rate'] / 1e9:.1f} in"
            )
        print(f"a round costs {1e6 * found.latency:.1f} us apart from its bytes; figures: {kept}")
        for slot, each in slots.items():
            print(f"{slot}: {each.text(time.time())}")
        links = sorted(machine.links) if machine else None
        write_figures(out, rows, ranks=world, round_us=1e6 * found.latency, kept=kept, nvlinks=links)
    dist.destroy_process_group()
    if machine is not None and settings.figures_folder() is not None and figures is None:
        sys.exit(f"benchmarks cuda_topology: a new group does not plan with the figures: {kept}")


ROUNDS = 9
PRODUCTS = 20
PRODUCT_SIZES = (4096, 8192)
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
        sys.exit("benchmarks cuda_beside: rank 1 got wrong bytes")
    return resharder, x


def milliseconds(size: int, rank: int, calls: int, resharder: meshcast.Resharder, x: DTensor) -> float:
    """Of a product on rank 0, while each of the PRODUCTS has `calls` reshards beside it."""
    a = torch.randn(size, size, dtype=torch.bfloat16, device="cuda") if rank == 0 else None
    torch.cuda.synchronize()
    dist.barrier()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    other = torch.cuda.Stream()  # neither waits for a product, nor a product for it
    pending: list[meshcast.Handle] = []
    start.record()
    for _ in range(PRODUCTS):
        with torch.cuda.stream(other):
            for _ in range(calls):
                pending.append(resharder.start(x))
                if len(pending) > IN_FLIGHT:
                    pending.pop(0).wait()
        if a is not None:
            torch.mm(a, a)
    end.record()
    with torch.cuda.stream(other):
        for handle in pending:
            handle.wait()
    torch.cuda.synchronize()
    taken = torch.tensor([start.elapsed_time(end) / PRODUCTS if rank == 0 else 0.0])
    dist.broadcast(taken, 0)
    return taken.item()


def beside() -> None:
    """What a bf16 matrix product loses while a reshard runs beside it, between two processes on one GPU.

    CUDA_VISIBLE_DEVICES=0 torchrun --nproc-per-node 2 -m benchmarks cuda_beside [--out FILE.json]

    Rank 0 multiplies on one stream. From another, 256 MiB go to rank 1 by asynchronous calls: one for each
    product, as between the stages of a pipeline, and one after the other without a pause, which is the most
    that can be asked. Time is that of the products, by CUDA events, the median of alternating rounds. The
    loss is against rounds without a reshard in the same run. Needs a GPU and a build with CUDA.
    """
    out = begin("cuda_beside", beside.__doc__)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if world != 2:
        refuse("cuda_beside", f"two ranks are needed, found {world}")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    resharder, x = transfer(rank)
    rows = []
    for size in steps(PRODUCT_SIZES, "sizes"):
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
        write_figures(out, rows, ranks=world)
    dist.destroy_process_group()
