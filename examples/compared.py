"""One tensor on a mesh of two ranks, moved to a mesh of three by meshcast and by what scripts do without it.

torchrun --standalone --nproc-per-node 5 examples/compared.py
"""

import statistics
import time
from collections.abc import Callable

import meshcast
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

SIZE = 4096  # rows and columns, 64 MiB of float32
ROUNDS = 5
SENDERS, RECEIVERS = [0, 1], [2, 3, 4]

Move = Callable[[DTensor, Placement], "torch.Tensor | None"]  # this rank's part of the result


def with_meshcast(x: DTensor, placement: Placement) -> torch.Tensor | None:
    return meshcast.reshard(x, receivers, [placement]).to_local()


def with_send_recv(x: DTensor, placement: Placement) -> torch.Tensor | None:
    """Each sender sends each receiver what it needs of its rows, cut by hand."""
    rank, rows = dist.get_rank(), SIZE // len(SENDERS)
    columns = {receiver: columns_of(receiver, placement) for receiver in RECEIVERS}
    if rank in SENDERS:
        local = x.to_local()
        cut = {receiver: local[:, columns[receiver]].contiguous() for receiver in RECEIVERS}
        for work in [dist.isend(part, receiver) for receiver, part in cut.items()]:
            assert work is not None  # the group is that of all ranks
            work.wait()
        return None
    width = len(range(SIZE)[columns[rank]])
    parts = [torch.empty(rows, width) for _ in SENDERS]
    for work in [dist.irecv(part, sender) for part, sender in zip(parts, SENDERS, strict=True)]:
        assert work is not None
        work.wait()
    return torch.cat(parts)


def with_gather_broadcast(x: DTensor, placement: Placement) -> torch.Tensor | None:
    """The whole tensor on rank 0, then on every receiver, which keeps its columns."""
    rank = dist.get_rank()
    whole = x.full_tensor() if rank in SENDERS else torch.empty(SIZE, SIZE)
    if rank != SENDERS[0] and rank in SENDERS:
        return None
    dist.broadcast(whole, SENDERS[0], group=feeders)
    return whole[:, columns_of(rank, placement)].contiguous() if rank in RECEIVERS else None


def columns_of(receiver: int, placement: Placement) -> slice:
    if isinstance(placement, Replicate):
        return slice(None)
    width = -(-SIZE // len(RECEIVERS))
    first = RECEIVERS.index(receiver) * width
    return slice(first, min(first + width, SIZE))


def milliseconds(move: Move, x: DTensor, placement: Placement) -> float:
    """Time until the last rank has its part, whose values are checked."""
    dist.barrier()
    begin = time.perf_counter()
    part = move(x, placement)
    longest = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    if dist.get_rank() in RECEIVERS:
        assert part is not None
        assert torch.equal(part, full[:, columns_of(dist.get_rank(), placement)])
    return 1e3 * float(longest)


def redistribute(x: DTensor, placement: Placement) -> str:
    try:
        x.redistribute(receivers, [placement])
    except Exception as error:  # torch has no class for it
        return str(error)
    return "works"


dist.init_process_group("gloo")
senders, receivers = DeviceMesh("cpu", SENDERS), DeviceMesh("cpu", RECEIVERS)
feeders = dist.new_group([SENDERS[0], *RECEIVERS])
full = torch.arange(SIZE * SIZE, dtype=torch.float32).view(SIZE, SIZE)
x = distribute_tensor(full, senders, [Shard(0)], src_data_rank=None)

WAYS: dict[str, Move] = {
    "meshcast.reshard": with_meshcast,
    "isend and irecv of each part, gloo": with_send_recv,
    "full_tensor() and broadcast, gloo": with_gather_broadcast,
}
GOALS: dict[str, Placement] = {"Shard(1)": Shard(1), "Replicate()": Replicate()}
medians: dict[str, list[float]] = {way: [] for way in WAYS}
for goal in GOALS.values():
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(1 + ROUNDS):  # by turns; the first round connects, plans and faults memory in
        for way, move in WAYS.items():
            times[way].append(milliseconds(move, x, goal))
    for way in WAYS:
        medians[way].append(statistics.median(times[way][1:]))

if dist.get_rank() == 0:
    size = SIZE * SIZE * 4 >> 20
    table = Table(title=f"{size} MiB, Shard(0) on two ranks, moved to three others")
    table.add_column("moved by")
    for name in GOALS:
        table.add_column(f"to {name}", justify="right")
    fastest = medians["meshcast.reshard"]
    for way, found in medians.items():
        table.add_row(
            way, *(f"{ms:.0f} ms {ms / least:5.1f}x" for ms, least in zip(found, fastest, strict=True))
        )
    table.add_row("DTensor.redistribute", *["refused"] * len(GOALS))
    table.caption = f"medians of {ROUNDS} rounds; x: times as long as meshcast"
    Console(width=100).print(table)
    print(f"torch's own answer: {redistribute(x, Shard(1))}")
dist.destroy_process_group()
