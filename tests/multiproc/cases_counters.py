"""What meshcast.counters() says of real calls, in three processes."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast import Layout
from multiproc.meshes import quiet_mesh, resharder_between, sharded
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 30.0
A, B = [0], [1, 2]


def everywhere(value):
    """Of all ranks, by rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def rows(context, dtype=torch.float32, **options):
    """12 rows of 7 from rank 0 to ranks 1 and 2, six each."""
    full = torch.arange(84).reshape(12, 7).to(dtype)
    x = sharded(full, quiet_mesh(A), [Replicate()], context.rank)
    return meshcast.reshard(x, quiet_mesh(B), [Shard(0)], **options)


def bytes_of_both_types(context) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        before = meshcast.counters()
        for _ in range(3):
            rows(context, dtype)
        found = meshcast.counters() - before
        half = 3 * 6 * 7 * dtype.itemsize  # what each receiver needs
        call = found.calls["reshard"]
        assert (call.calls, call.failed, call.retries) == (3, 0, 0)
        assert (call.bytes_sent, call.bytes_received) == ((2 * half, 0) if context.rank == 0 else (0, half))
        mine = {pair: each.bytes for pair, each in found.pairs.items() if each.bytes}
        assert mine == ({(0, 1): half, (0, 2): half} if context.rank == 0 else {(0, context.rank): half})
        assert call.bound > 0
        assert abs(call.ratio - call.seconds / call.bound) < 1e-9


def both_ends_of_a_pair_agree(context) -> None:
    """Also where ranks pass on what others need, and where several chunks travel."""
    full = torch.arange(3.0 * 100_000).reshape(3, -1)
    before = meshcast.counters()
    for src, dst in (([0], [0, 1, 2]), ([0, 1], [2]), ([0, 1, 2], [1, 2])):
        local = full.chunk(len(src))[src.index(context.rank)].clone() if context.rank in src else None
        meshcast.reshard_local(
            local,
            Layout(src, [Shard(0)]),
            None,
            Layout(dst, [Replicate()]),
            shape=full.shape,
            dtype=full.dtype,
        )
    found = meshcast.counters() - before
    seen = everywhere({pair: (each.messages, each.bytes) for pair, each in found.pairs.items()})
    total = sum(each.bytes_received for each in everywhere(found.calls["reshard_local"]))
    assert total == 4 * 300_000 * 2 + 4 * 300_000 + 4 * (200_000 + 200_000)
    pairs = 0
    for rank, of_rank in enumerate(seen):
        for (sender, receiver), value in of_rank.items():
            assert rank in (sender, receiver)
            assert seen[sender][sender, receiver] == seen[receiver][sender, receiver] == value
            pairs += 1
    assert pairs >= 8


def stats_say_the_same(context) -> None:
    rows(context)
    before = meshcast.counters()
    handle = rows(context, async_op=True)
    handle.wait()
    handle.wait()
    found = (meshcast.counters() - before).calls["reshard"]
    stats = handle.stats
    assert (found.calls, found.bytes_sent, found.bytes_received) == (
        1,
        stats.bytes_sent,
        stats.bytes_received,
    )
    assert found.seconds == pytest.approx(stats.seconds)
    assert found.bound == pytest.approx(stats.bound)


def waits_are_those_of_the_program(context) -> None:
    """Ranks 1 and 2 wait for rank 0, which is late; and what is done between call and wait() is no wait."""
    rows(context)
    context.wait_for_all("rows")
    before = meshcast.counters()
    if context.rank == 0:
        time.sleep(0.4)
    rows(context)
    found = (meshcast.counters() - before).calls["reshard"]
    if context.rank > 0:
        assert found.waited > 0.3
        assert (meshcast.counters() - before).pairs[0, context.rank].waited == pytest.approx(found.waited)
    before = meshcast.counters()
    context.wait_for_all("late")
    handle = rows(context, async_op=True)
    if context.rank > 0:
        time.sleep(0.3)
    else:
        time.sleep(0.15)
    begin = time.perf_counter()
    handle.wait()
    waited = time.perf_counter() - begin
    assert (meshcast.counters() - before).calls["reshard"].waited <= waited


def backwards_and_repeats(context) -> None:
    """Backward calls have a name of their own, and the short cut of a Resharder counts like other calls."""
    x = sharded(torch.ones(12, 7), quiet_mesh(A), [Replicate()], context.rank)
    if x is not None:
        x.requires_grad_()
    before = meshcast.counters()
    y = meshcast.reshard(x, quiet_mesh(B), [Shard(0)])
    meshcast.backward(*([] if context.rank == 0 else [y.to_local().sum()]))
    context.wait_for_all("backward")  # those that only send do not wait
    limit = time.monotonic() + 20.0
    while "reshard backward" not in (meshcast.counters() - before).calls:
        assert time.monotonic() < limit, "the backward was not counted"
        time.sleep(0.01)
    back = (meshcast.counters() - before).calls["reshard backward"]
    half = 6 * 7 * 4
    assert (back.bytes_received, back.bytes_sent) == ((2 * half, 0) if context.rank == 0 else (0, half))
    specs = [
        meshcast.TensorSpec((12, 7), torch.float32, quiet_mesh(ranks), [placement])
        for ranks, placement in ((A, Replicate()), (B, Shard(0)))
    ]
    resharder = resharder_between(*specs, reuse_output=True)
    before = meshcast.counters()
    for _ in range(5):
        resharder.run(None if x is None else x.detach())
    name = next(op for op, each in (meshcast.counters() - before).calls.items() if each.calls == 5)
    found = (meshcast.counters() - before).calls[name]
    assert (found.bytes_sent, found.bytes_received) == (
        (10 * half, 0) if context.rank == 0 else (0, 5 * half)
    )
    assert found.waited > 0
    del resharder
    gc.collect()
    assert (meshcast.counters() - before).calls[name] == found


def failures_are_counted(context) -> None:
    group = dist.new_group([0, 1, 2])
    rows(context, group=group)
    before = meshcast.counters()
    if context.rank == 1:
        with pytest.raises(meshcast.MeshcastError):
            rows(context, group=group, timeout=0.5)
        found = (meshcast.counters() - before).calls["reshard"]
        assert (found.calls, found.failed) == (0, 1)
        assert (meshcast.counters() - before).pairs[0, 1].failed == 1
    context.wait_for_all("failed")


def retries_are_counted(context) -> None:
    """Rank 1 is through with a call that rank 2 refuses, and in the next one when it hears of it. Rank 0 is
    not: in shared memory a call ends when its messages have been read."""
    shape = (12, 7)
    for number, reuse in enumerate((False, True)):
        group = dist.new_group([0, 1, 2])
        specs = [
            meshcast.TensorSpec(shape, torch.float32, quiet_mesh(ranks), [placement])
            for ranks, placement in ((A, Replicate()), (B, Shard(0)))
        ]
        resharder = resharder_between(*specs, group, reuse_output=reuse)
        x = sharded(torch.ones(shape), quiet_mesh(A), [Replicate()], context.rank)
        for _ in range(3):
            resharder.run(x)
        context.wait_for_all(f"known {number}")
        before = meshcast.counters()
        if context.rank == 2:
            time.sleep(0.5)
            with pytest.raises(meshcast.LayoutError):
                resharder.run(torch.ones(2))
        elif context.rank == 0:
            with pytest.raises(meshcast.MeshcastError):
                resharder.run(x)
        else:
            resharder.run(x)
        resharder.run(x)
        found = meshcast.counters() - before
        retries = {op: each.retries for op, each in found.calls.items() if each.retries}
        assert list(retries.values()) == ([1] if context.rank == 1 else []), (retries, reuse)


def threads_wait_for_one_handle(context) -> None:
    before = meshcast.counters()
    handles = [rows(context, async_op=True) for _ in range(8)]
    threads = [threading.Thread(target=lambda: [handle.wait() for handle in handles]) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (meshcast.counters() - before).calls["reshard"].calls == 8


def profiled(context) -> None:
    rows(context)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        rows(context)
    names = {event.name for event in profile.events()}
    moved = "sends 336 B, receives 0 B" if context.rank == 0 else "sends 0 B, receives 168 B"
    assert f"meshcast::reshard {moved}" in names


def nothing_is_kept_for_the_count(context) -> None:
    """Neither what was waited for nor, once somebody has looked, what arrived without a wait."""
    for waits in (True, False):
        handle = rows(context, async_op=True)
        if waits:
            handle.wait()
        context.wait_for_all(f"moved {waits}")
        while not handle.is_completed():
            time.sleep(0.001)
        kept = weakref.ref(handle._result._local_tensor)
        del handle
        if not waits:
            meshcast.counters()
        context.wait_until_freed(kept, f"the result, waits {waits}")


CASES = [
    nothing_is_kept_for_the_count,
    bytes_of_both_types,
    both_ends_of_a_pair_agree,
    stats_say_the_same,
    waits_are_those_of_the_program,
    backwards_and_repeats,
    failures_are_counted,
    threads_wait_for_one_handle,
    profiled,
]
IN_SHARED_MEMORY = [retries_are_counted]
if os.environ["MESHCAST_SHM"] == "1":
    CASES += IN_SHARED_MEMORY
