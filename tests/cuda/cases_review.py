"""What CUDA's and NCCL's documents leave open, between processes: each case is a doubt of docs/cuda.md.
DEVICE=cpu runs the same cases over the CPU path where there is no GPU, which checks the cases."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import meshcast
import torch
import torch.distributed as dist
from multiproc.devices import GPU, check, given, use_a_gpu
from multiproc.meshes import resharder_between
from multiproc.oracle import cut, unique_fill
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.multiprocessing.reductions import reduce_tensor

sys.path.append(str(Path(__file__).parent))
import pace
from cases_reshard import mesh_of

GROUP_TIMEOUT = 120.0
ON_GPU = GPU == "cuda"
# Every tensor is then an allocation of its own, and goes back to the GPU at once.
UNCACHED = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1"
OWN_SEGMENT = 3 << 20  # elements of float32: torch gives as much a segment of its own


def turned(world: int) -> list[int]:
    """Ranks so that each one's rows are the next one's, whole: they travel from where they lie."""
    return [(rank + 1) % world for rank in range(world)]


def calls_of_two_groups_in_unlike_orders(context) -> None:
    """Half of the ranks start the call of one group first, half that of the other, and all wait for both."""
    use_a_gpu(context.rank)
    everybody = list(range(context.world))
    mesh, shape = mesh_of(everybody), (512, 4096)
    specs = [meshcast.TensorSpec(shape, torch.float32, mesh, [Shard(dim)]) for dim in (0, 1)]
    groups = [dist.new_group(everybody) for _ in range(2)]
    calls = [resharder_between(*specs, group=group) for group in groups]
    fulls = [unique_fill(shape, torch.float32, number) for number in range(2)]
    xs = [given(full, mesh, [Shard(0)], context.rank) for full in fulls]
    for call, x in zip(calls, xs, strict=True):
        call.run(x)  # connected, in one order
    for number in range(40):
        order = (0, 1) if (context.rank + number) % 2 else (1, 0)
        handles = {which: calls[which].start(xs[which]) for which in order}
        for which in order:
            y = handles[which].wait()
            if number % 8 == 0:
                check(y, fulls[which], mesh, [Shard(1)], context.rank)
    context.wait_for_all("through")
    for group in groups:
        dist.destroy_process_group(group)


def nothing_waits_for_a_busy_stream(context) -> dict | None:
    """More allocations are sent from than are kept mapped, so memory is exported, mapped and closed while a
    kernel of rank 0 runs on for much longer: no call may wait for that. Returns the pace of calls and of
    plain copies, which test_review.py judges."""
    use_a_gpu(context.rank)
    if UNCACHED:
        return None  # torch's own frees wait for it
    everybody = list(range(context.world))
    mesh, other = mesh_of(everybody), mesh_of(turned(context.world))
    count, width = (72, OWN_SEGMENT) if ON_GPU else (5, 64)
    shape = (context.world, width)
    specs = [meshcast.TensorSpec(shape, torch.float32, each, [Shard(0)]) for each in (mesh, other)]
    call = resharder_between(*specs, reuse_output=True)
    # Its kernels have not run before: they must have been loaded when the ranks were connected.
    cold = resharder_between(
        meshcast.TensorSpec((48, 48), torch.bfloat16, mesh, [Shard(0)]),
        meshcast.TensorSpec((48, 48), torch.float32, mesh, [Shard(1)]),
    )
    full = torch.arange(48 * 48).reshape(48, 48).to(torch.bfloat16)
    first = given(full, mesh, [Shard(0)], context.rank)
    one = DTensor.from_local(torch.ones(1, width, device=GPU), mesh, [Shard(0)], run_check=False)
    xs = [one * (number + 2 + context.rank) for number in range(count)]
    call.run(one).to_local().mean()  # torch's own kernels are loaded by now, too
    pace.synchronize()

    def seconds_of_calls() -> tuple[float, list[torch.Tensor]]:
        begin = time.perf_counter()
        sums = [call.run(x).to_local().mean() for x in xs]
        pace.synchronize()
        return time.perf_counter() - begin, sums

    found = pace.Pace(seconds_of_calls()[0], pace.seconds_of_copies(count, width, GPU))
    context.wait_for_all("measured")
    busy = None
    if ON_GPU and context.rank == 0:
        seconds = max(pace.SHORTEST_S, min(pace.LONGEST_S, pace.TIMES * found.calls))
        busy = pace.keep_busy(seconds)
    context.wait_for_all("busy")
    found.busy_copies = pace.seconds_of_copies(count, width, GPU)
    found.busy_calls, sums = seconds_of_calls()
    y = cold.run(first)
    pace.synchronize()
    if context.rank == 0:
        found.busy = busy is None or not busy.query()
    check(y, full.float(), mesh, [Shard(1)], context.rank)
    owner = turned(context.world).index(context.rank)
    assert [round(each.item()) for each in sums] == [number + 2 + owner for number in range(count)]
    return found.value()


def memory_of_calls_and_backwards_is_freed(context) -> None:
    """The forward sends from what the backward before has sent from, now another allocation, and the other
    way round: the receiver of either has its own mappings."""
    use_a_gpu(context.rank)
    mesh, other = mesh_of(list(range(context.world))), mesh_of(turned(context.world))
    rng = random.Random(17)
    for number in range(16 if ON_GPU else 3):
        rows = context.world * rng.choice([3, 5, 8])
        full = unique_fill((rows, OWN_SEGMENT // 3 if ON_GPU else 60), torch.float32, number)
        x = given(full, mesh, [Shard(0)], context.rank).requires_grad_()
        y = meshcast.reshard(x, other, [Shard(0)])
        meshcast.backward(y.to_local().mul(3.0).sum())
        check(x.grad, torch.full_like(full, 3.0), mesh, [Shard(0)], context.rank)
        check(y, full, other, [Shard(0)], context.rank)
        del x, y
        if ON_GPU:
            torch.cuda.empty_cache()


def memory_that_another_process_shared(context) -> None:
    """The shard of the last rank lies in memory of rank 0, which torch has mapped there: as where weights are
    handed over by CUDA IPC. It cannot be exported once more."""
    use_a_gpu(context.rank)
    if context.world == 1 or UNCACHED:
        return  # torch itself shares cached memory only
    world, last = context.world, context.world - 1
    mesh, other = mesh_of(list(range(world))), mesh_of(turned(world))
    full = unique_fill((4 * world, 1 << 18), torch.float32, 3)
    theirs = cut(full, (world,), (last,), [Shard(0)]).contiguous()
    box: list = [None]
    if context.rank == 0:
        theirs = theirs.to(GPU)
        box = [reduce_tensor(theirs) if ON_GPU else theirs]
    dist.broadcast_object_list(box, 0)
    x = given(full, mesh, [Shard(0)], context.rank)
    if context.rank == last:
        shared = box[0][0](*box[0][1]) if ON_GPU else box[0]
        x = DTensor(shared, x._spec, requires_grad=False)
    for destination in (other, mesh):  # as it lies, and copied inside the rank
        y = meshcast.reshard(x, destination, [Shard(0)])
        check(y, full, destination, [Shard(0)], context.rank)
    y = meshcast.reshard(x, mesh, [Shard(1)])  # packed
    check(y, full, mesh, [Shard(1)], context.rank)
    del x
    context.wait_for_all("read")  # before rank 0 lets go of it


def a_rank_ends_while_another_has_yet_to_pass_its_event(context) -> None:
    """Rank 0 waits on its GPU for what rank 1 has copied, which takes long, and then for what rank 2 has: by
    then rank 2 has destroyed that event, and its group."""
    use_a_gpu(context.rank)
    if context.world < 3:
        return
    group = dist.new_group([0, 1, 2])
    if context.rank > 2:
        return
    src, dst = mesh_of([0]), mesh_of([1, 2])
    full = unique_fill((64, 5000), torch.float32, 5)
    specs = [
        meshcast.TensorSpec(full.shape, torch.float32, mesh, [placement])
        for mesh, placement in ((src, Replicate()), (dst, Shard(0)))
    ]
    call = resharder_between(*specs, group=group)
    x = given(full, src, [Replicate()], context.rank)
    call.run(x)
    context.wait_for_all("known", [0, 1, 2])
    if ON_GPU and context.rank == 1:
        torch.cuda._sleep(4_000_000_000)
    check(call.run(x), full, dst, [Shard(0)], context.rank)
    if ON_GPU and context.rank == 0:
        torch.cuda.synchronize()
    dist.destroy_process_group(group)


CASES = [
    calls_of_two_groups_in_unlike_orders,
    nothing_waits_for_a_busy_stream,
    memory_of_calls_and_backwards_is_freed,
    memory_that_another_process_shared,
    a_rank_ends_while_another_has_yet_to_pass_its_event,
]
