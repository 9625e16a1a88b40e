"""Collectives of backend "meshcast" on GPUs against plain NCCL, one rank for each GPU; DEVICE=cpu runs the
same cases against gloo where there is none, which checks the cases."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import meshcast
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GROUP_TIMEOUT = 120.0
DEVICE = os.environ.get("DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
PLAIN = "nccl" if ON_GPU else "gloo"
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def use_own_gpu(rank: int) -> None:
    if ON_GPU:
        torch.cuda.set_device(rank % torch.cuda.device_count())


def unique(rank: int, length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small whole numbers, so that sums are the same in any order; they differ by rank, place and seed."""
    return ((torch.arange(length) * 3 + 7 * rank + 11 * seed) % 23).to(dtype).to(DEVICE)


def backend_of(group: dist.ProcessGroup | None, device: str = DEVICE):
    found = (dist.group.WORLD if group is None else group)._get_backend(torch.device(device))
    return getattr(found, "wrapped_pg", found)


def all_reduce(group, rank, world, dtype, seed):  # noqa: ARG001
    tensor = unique(rank, 37, dtype, seed)
    dist.all_reduce(tensor, group=group)
    return [tensor]


def reduce_to_last(group, rank, world, dtype, seed):
    tensor = unique(rank, 19, dtype, seed)
    dist.reduce(tensor, world - 1, op=dist.ReduceOp.MAX, group=group)
    return [tensor] if rank == world - 1 else []


def broadcast(group, rank, world, dtype, seed):
    small, large = unique(rank, 5, dtype, seed), unique(rank, 400_003, dtype, seed)
    dist.broadcast(small, seed % world, group=group)
    dist.broadcast(large, seed % world, group=group)
    return [small, large]


def all_gather(group, rank, world, dtype, seed):
    mine = unique(rank, 11, dtype, seed)
    several = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(several, mine, group=group)
    whole = mine.new_zeros(11 * world)
    dist.all_gather_into_tensor(whole, mine, group=group)
    return [*several, whole]


def gather_and_scatter(group, rank, world, dtype, seed):
    root, mine = seed % world, unique(rank, 6, dtype, seed)
    several = [torch.zeros_like(mine) for _ in range(world)] if rank == root else None
    dist.gather(mine, several, dst=root, group=group)
    got = torch.zeros_like(mine)
    parts = [unique(r, 6, dtype, seed + 1) for r in range(world)] if rank == root else None
    dist.scatter(got, parts, src=root, group=group)
    return [*(several or []), got]


def reduce_scatter(group, rank, world, dtype, seed):
    out = torch.zeros(4, dtype=dtype, device=DEVICE)
    dist.reduce_scatter_tensor(out, unique(rank, 4 * world, dtype, seed), group=group)
    return [out]


def all_to_all(group, rank, world, dtype, seed):
    """Rank r gives r + 1 elements to each."""
    given = unique(rank, (rank + 1) * world, dtype, seed)
    got = given.new_zeros(sum(r + 1 for r in range(world)))
    dist.all_to_all_single(got, given, [r + 1 for r in range(world)], [rank + 1] * world, group=group)
    return [got]


def exchange(group, rank, world, dtype, seed):
    """Around a ring in one batch, larger than NCCL holds for a receiver that is not there yet."""
    if world == 1:
        return []
    given = unique(rank, 3_000_001, dtype, seed)
    got = torch.zeros_like(given)
    batch = [
        dist.P2POp(dist.isend, given, (rank + 1) % world, group),
        dist.P2POp(dist.irecv, got, (rank - 1) % world, group),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return [got]


def coalesced(group, rank, world, dtype, seed):  # noqa: ARG001
    tensors = [unique(rank, length, dtype, seed) for length in (3, 17, 8)]
    with dist.distributed_c10d._coalescing_manager(group=group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    return tensors


OPERATIONS: list[Callable] = [
    all_reduce, reduce_to_last, broadcast, all_gather, gather_and_scatter, reduce_scatter, all_to_all,
    exchange, coalesced,
]  # fmt: skip


def each_operation_does_what_the_plain_backend_does(context) -> None:
    use_own_gpu(context.rank)
    plain = dist.new_group(backend=PLAIN)
    for seed, operation in enumerate(OPERATIONS):
        for dtype in DTYPES:
            if not ON_GPU and operation is reduce_scatter and dtype is torch.bfloat16:
                continue  # gloo has none
            arguments = (context.rank, context.world, dtype, seed)
            expected, found = operation(plain, *arguments), operation(None, *arguments)
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other), (operation.__name__, dtype, seed)
    if ON_GPU:
        assert isinstance(backend_of(None).inner_cuda, dist.ProcessGroupNCCL)
    dist.destroy_process_group(plain)


def the_backend_for_gpus_is_made_when_it_is_needed(context) -> None:
    use_own_gpu(context.rank)
    group = dist.new_group(backend="meshcast")
    dist.all_reduce(torch.ones(3), group=group)
    dist.barrier(group)
    assert backend_of(group).inner_cuda is None
    both = torch.ones(3), torch.ones(3, device=DEVICE)
    for tensor in both:
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [context.world] * 3
    if ON_GPU:
        assert isinstance(backend_of(group).inner_cuda, dist.ProcessGroupNCCL)
        dist.barrier(group, device_ids=[torch.cuda.current_device()])
    dist.destroy_process_group(group)


def sub_groups_and_other_names(context) -> None:
    use_own_gpu(context.rank)
    evens = list(range(0, context.world, 2))
    for name in (f"{DEVICE}:meshcast", "cpu:meshcast,cuda:meshcast", "meshcast"):
        group = dist.new_group(evens, backend=name)
        if context.rank in evens:
            tensor = unique(context.rank, 9, torch.float32, 3)
            dist.all_reduce(tensor, group=group)
            assert torch.equal(tensor, sum(unique(rank, 9, torch.float32, 3) for rank in evens))
        dist.destroy_process_group(group)


def works_order_the_current_stream(context) -> None:
    """The tensor is made, and used, on a stream of its own; what else is there must not be in the way."""
    use_own_gpu(context.rank)
    stream = torch.cuda.Stream() if ON_GPU else None
    for _ in range(20):
        if stream is not None:
            torch.cuda.set_stream(stream)
            torch.cuda._sleep(1_000_000)
        tensor = torch.full((1 << 18,), float(context.rank), device=DEVICE)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        doubled = tensor * 2
        del tensor
        assert (doubled == context.world * (context.world - 1)).all()
        if stream is not None:
            torch.cuda.set_stream(torch.cuda.default_stream())


def futures_and_functional_collectives(context) -> None:
    from torch.distributed._functional_collectives import all_gather_tensor

    use_own_gpu(context.rank)
    mine = unique(context.rank, 5, torch.float32, 1)
    work = dist.all_reduce(mine.clone(), async_op=True)
    (found,) = work.get_future().wait()
    total = sum(unique(rank, 5, torch.float32, 1) for rank in range(context.world))
    assert torch.equal(found, total)
    gathered = all_gather_tensor(mine, 0, dist.group.WORLD)
    whole = torch.cat([unique(rank, 5, torch.float32, 1) for rank in range(context.world)])
    assert torch.equal(gathered, whole)


def ddp_trains_as_on_one_rank(context) -> None:
    use_own_gpu(context.rank)

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(DEVICE)

    def loss_of(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return module(rows).pow(2).mean()

    torch.manual_seed(5)
    batch = torch.randn(4 * context.world, 16).to(DEVICE)
    alone = model(0)
    loss_of(alone, batch).backward()
    shared = DistributedDataParallel(model(context.rank), device_ids=[torch.cuda.current_device()]
                                     if ON_GPU else None)  # fmt: skip
    with torch.no_grad():  # DDP has given all ranks the weights of rank 0
        for mine, first in zip(shared.parameters(), alone.parameters(), strict=True):
            assert torch.equal(mine, first)
    loss_of(shared, batch.chunk(context.world)[context.rank]).backward()
    for mine, first in zip(shared.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, first.grad, rtol=1e-4, atol=1e-6)


def options_reach_nccl(context) -> None:
    if not ON_GPU:
        return
    use_own_gpu(context.rank)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    group = dist.new_group(backend="meshcast", timeout=timedelta(seconds=77), pg_options=options)
    dist.all_reduce(torch.ones(2, device=DEVICE), group=group)
    inner = backend_of(group).inner_cuda
    assert inner.options.is_high_priority_stream and inner.options._timeout == timedelta(seconds=77)
    backend_of(group).set_timeout(timedelta(seconds=55))
    assert inner.options._timeout == timedelta(seconds=55)
    dist.destroy_process_group(group)


def an_aborted_group_says_so(context) -> None:
    use_own_gpu(context.rank)
    group = dist.new_group(backend="meshcast")
    dist.all_reduce(torch.ones(2, device=DEVICE), group=group)
    context.wait_for_all("done")
    dist.distributed_c10d._abort_process_group(group)
    if not ON_GPU:
        return
    backend = backend_of(None)  # the other group lives on
    tensor = torch.ones(2, device=DEVICE)
    backend.allreduce([tensor]).wait()
    assert tensor.tolist() == [context.world] * 2


def a_mixture_is_refused(context) -> None:
    if not ON_GPU:
        return
    use_own_gpu(context.rank)
    try:
        backend_of(None).allreduce_coalesced([torch.ones(2), torch.ones(2, device=DEVICE)])
    except meshcast.LayoutError as error:
        assert "all of one call must be on one kind of device" in str(error)
    else:
        raise AssertionError("tensors on both kinds of device were taken in one call")


CASES = [
    the_backend_for_gpus_is_made_when_it_is_needed,
    each_operation_does_what_the_plain_backend_does,
    sub_groups_and_other_names,
    works_order_the_current_stream,
    futures_and_functional_collectives,
    ddp_trains_as_on_one_rank,
    options_reach_nccl,
    a_mixture_is_refused,
    an_aborted_group_says_so,
]
