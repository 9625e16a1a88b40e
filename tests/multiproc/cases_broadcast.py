"""torch.distributed.broadcast under backend "meshcast", in five processes: large ones are multicasts and must
do what gloo's do."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import meshcast
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.nn.parallel import DistributedDataParallel

GROUP_TIMEOUT = 60.0
LEAVE_UP = True  # the last case ends the groups
LARGE = int(os.environ.get("MESHCAST_BROADCAST_BYTES", 1 << 20))
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.bool,
    torch.int32, torch.int64,
)  # fmt: skip


def content(length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Differs from place to place and seed to seed."""
    return ((torch.arange(length) * 7 + 13 * seed) % 101 < 50 if dtype == torch.bool
            else (torch.arange(length) * 7 + 13 * seed) % 101).to(dtype)  # fmt: skip


def multicasts() -> int:
    """Broadcasts in the flight record: those that were multicasts."""
    return sum(call["op"] == "broadcast" for call in meshcast.flight_record())


def every_root_and_dtype(context) -> None:
    before = multicasts()
    for root in range(context.world):
        for dtype in DTYPES:
            length = LARGE // dtype.itemsize + 3 * root
            expected = content(length, dtype, root)
            tensor = expected.clone() if context.rank == root else torch.zeros(length, dtype=dtype)
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, expected), (root, dtype)
    assert multicasts() - before == context.world * len(DTYPES)


def small_ones_are_gloos(context) -> None:
    before = multicasts()
    tensor = content(LARGE - 1, torch.uint8, context.rank)
    dist.broadcast(tensor, 2)
    assert torch.equal(tensor, content(LARGE - 1, torch.uint8, 2))
    assert multicasts() == before


def shapes_and_strides(context) -> None:
    """Elements travel in the order of memory, as with gloo: what is dense arrives, whatever its strides."""
    side = 1024
    expected = content(side * side, torch.float32, 5).reshape(side, side)
    tensor = (expected if context.rank == 1 else torch.zeros(side, side)).t().contiguous().t()
    assert not tensor.is_contiguous()
    dist.broadcast(tensor, 1)
    assert torch.equal(tensor, expected)
    storage = torch.full((side * side + 2,), -1.0)
    part = storage[1:-1].view(side, side)  # somewhere inside a larger piece of memory
    if context.rank == 3:
        part.copy_(expected)
    dist.broadcast(part, 3)
    assert torch.equal(part, expected)
    assert storage[0] == storage[-1] == -1
    pair = torch.complex(expected, -expected) if context.rank == 0 else torch.zeros(side, side) * 1j
    dist.broadcast(pair, 0)
    assert torch.equal(pair, torch.complex(expected, -expected))


def several_in_flight(context) -> None:
    """Asynchronous, from several roots, waited for in another order, with other collectives between them."""
    count = 6
    length = LARGE // 4 + 1
    tensors = [
        content(length, torch.float32, i) if i % context.world == context.rank else torch.zeros(length)
        for i in range(count)
    ]
    works, total = [], torch.ones(1)
    for i, tensor in enumerate(tensors):
        works.append(dist.broadcast(tensor, i % context.world, async_op=True))
        dist.all_reduce(total)
    assert total.item() == context.world**count
    for i in (4, 0, 5):
        works[i].wait()
        assert works[i].is_completed()
        assert works[i].is_success()
        assert torch.equal(tensors[i], content(length, torch.float32, i))
    for i in (1, 2, 3):
        (value,) = works[i].get_future().wait()
        assert value.data_ptr() == tensors[i].data_ptr()
        assert torch.equal(value, content(length, torch.float32, i))
        assert works[i].result()[0].data_ptr() == tensors[i].data_ptr()


def a_late_rank_holds_up_no_call(context) -> None:
    """A call returns at once, also the first of a group, whose ranks have not met."""
    group = dist.new_group([0, 2, 4])
    if context.rank in (0, 2, 4):
        tensor = content(LARGE, torch.uint8, context.rank)
        if context.rank == 4:
            assert dist.recv(torch.zeros(1), 0) == 0  # sent after that rank's call
        work = dist.broadcast(tensor, 2, group=group, async_op=True)
        if context.rank == 0:
            assert not work.is_completed()
            try:
                work.wait(timedelta(milliseconds=50))
            except meshcast.DeadlineExceededError as error:
                assert "continues" in str(error), error
            else:
                raise AssertionError("it cannot have arrived: a rank has not called")
            dist.send(torch.zeros(1), 4)
        work.wait()
        assert torch.equal(tensor, content(LARGE, torch.uint8, 2))
        dist.destroy_process_group(group)
    context.wait_for_all("end")


def sub_group_in_an_order_of_its_own(context) -> None:
    group = dist.new_group([4, 1, 2])
    if context.rank in (1, 2, 4):
        tensor = content(LARGE, torch.uint8, context.rank)
        dist.broadcast(tensor, group=group, group_src=1)
        assert torch.equal(tensor, content(LARGE, torch.uint8, dist.get_global_rank(group, 1)))
        dist.broadcast(tensor, 4, group=group)
        dist.destroy_process_group(group)
    context.wait_for_all("end")


def parameters_and_ddp(context) -> None:
    """Leaves that need gradients are written in place; DDP spreads rank 0's parameters and buffers."""
    parameter = nn.Parameter(torch.full((LARGE // 4,), float(context.rank)))
    dist.broadcast(parameter, 3)
    assert parameter.is_leaf
    assert bool((parameter == 3).all())
    torch.manual_seed(context.rank)
    model = nn.Sequential(nn.Linear(600, 600), nn.BatchNorm1d(600), nn.Linear(600, 3))
    before = multicasts()
    wrapped = DistributedDataParallel(model)
    assert multicasts() > before
    sums = [torch.zeros(1, dtype=torch.float64) for _ in range(context.world)]
    dist.all_gather(sums, sum(p.detach().double().sum() for p in model.parameters()).reshape(1))
    assert all(torch.equal(each, sums[0]) for each in sums)
    wrapped(torch.ones(4, 600)).sum().backward()


def unlike_lengths_are_refused(context) -> None:
    """gloo would write past the end, or not at all."""
    group = dist.new_group()
    tensor = torch.zeros(LARGE + (context.rank == 2), dtype=torch.uint8)
    try:
        dist.broadcast(tensor, 0, group=group)
    except meshcast.PlanMismatchError as error:
        assert "broadcast" in str(error)
    else:
        raise AssertionError("lengths differ")
    tensor = content(LARGE, torch.uint8, context.rank)
    dist.broadcast(tensor, 0, group=group)  # the group is as good as before
    assert torch.equal(tensor, content(LARGE, torch.uint8, 0))
    dist.destroy_process_group(group)


def sequence_numbers_count_them(context) -> None:
    group = dist.new_group(list(range(context.world)))
    backend = group._get_backend(torch.device("cpu"))  # torch asks backends of its own alone for the number
    backend = getattr(backend, "wrapped_pg", backend)
    first = backend._get_sequence_number_for_group()
    dist.broadcast(torch.zeros(LARGE, dtype=torch.uint8), 0, group=group)
    assert backend._get_sequence_number_for_group() == first + 1
    dist.destroy_process_group(group)


def beside_reshards_of_the_same_ranks(context) -> None:
    """Two threads may order reshards and broadcasts as they like: the two share nothing."""
    world = list(range(context.world))
    src, dst = meshcast.Layout.parse("1:R"), meshcast.Layout(world, [Replicate()])
    full = content(1000, torch.float32, 9)

    def move():
        return meshcast.reshard_local(
            full if context.rank == 0 else None, src, None, dst,
            shape=(1000,), dtype=torch.float32, async_op=True,
        )  # fmt: skip

    tensor = content(LARGE, torch.uint8, context.rank)
    if context.rank % 2:
        handle = move()
        work = dist.broadcast(tensor, 1, async_op=True)
    else:
        work = dist.broadcast(tensor, 1, async_op=True)
        handle = move()
    work.wait()
    assert torch.equal(handle.wait(), full)
    assert torch.equal(tensor, content(LARGE, torch.uint8, 1))


def a_lost_rank(context) -> dict:
    """The others of its group get a typed error in time; small broadcasts among the rest go on."""
    group = dist.new_group()
    rest = dist.new_group([0, 1, 2, 3])
    tensor = torch.zeros(LARGE, dtype=torch.uint8)
    dist.broadcast(tensor, 4, group=group)
    if context.rank < 4:
        dist.broadcast(tensor, 2, group=rest)
    context.wait_for_all("ready")
    if context.rank == 4:
        os._exit(7)
    begin = time.monotonic()
    try:
        dist.broadcast(tensor, 4, group=group)
    except meshcast.MeshcastError as error:
        found = type(error).__name__
    else:
        raise AssertionError("rank 4 is gone")
    elapsed = time.monotonic() - begin
    dist.broadcast(tensor, 2, group=rest)
    small = torch.zeros(1)
    dist.all_reduce(small, group=rest)
    begin = time.monotonic()
    for each in (group, rest, None):
        dist.destroy_process_group(each)
    return {"error": found, "elapsed": elapsed, "destroyed": time.monotonic() - begin}


# torch's checks let no rank go on before all have called, and find other lengths and lost ranks themselves.
UNCHECKED = [a_late_rank_holds_up_no_call, unlike_lengths_are_refused, a_lost_rank]
CHECKED = [
    every_root_and_dtype,
    small_ones_are_gloos,
    shapes_and_strides,
    several_in_flight,
    sub_group_in_an_order_of_its_own,
    parameters_and_ddp,
    sequence_numbers_count_them,
    beside_reshards_of_the_same_ranks,
]
CASES = CHECKED if os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL" else CHECKED + UNCHECKED
