"""Callbacks of futures, which start calls of their own and wait for them, take their time, raise, and end
their group: in three processes of one host, over the transport that the environment names."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from pathlib import Path

import meshcast
import numpy as np
import pytest
import torch
import torch.distributed as dist
from meshcast import Layout, MeshcastError
from multiproc.fake_gpu import check, fake_gpu, held, mesh_on
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import unique_fill
from torch.distributed.tensor import Shard

GROUP_TIMEOUT = 30.0
# A call that stands still ends at GROUP_TIMEOUT: what is past a tenth of that has not been held up by one.
SOON = GROUP_TIMEOUT
LARGE = 600_001  # rows: 4 MiB and more, uneven in every layout
MIDDLE = 60_001  # too large to be sent before it is asked for
SMALL = 11
RANKS = [0, 1, 2]


def start(
    context,
    group: dist.ProcessGroup | None,
    rows: int,
    dtype: torch.dtype = torch.float32,
    number: int = 0,
    timeout: float | None = None,
) -> meshcast.Handle[torch.Tensor | None]:
    """An asynchronous call: rows of ranks 0 and 1 become columns of 1 and 2. Each rank has less than all."""
    full = whole(rows, dtype, number)
    return meshcast.reshard_local(
        part(full, 0, context.rank),
        Layout([0, 1], [Shard(0)]),
        None,
        Layout([1, 2], [Shard(1)]),
        shape=full.shape,
        dtype=dtype,
        group=group,
        async_op=True,
        timeout=timeout,
    )


def part(full: torch.Tensor, dim: int, index: int) -> torch.Tensor | None:
    """The half with this index; None where there is none, or nothing of it."""
    parts = full.chunk(2, dim)
    return parts[index].clone() if 0 <= index < len(parts) else None


def whole(rows: int, dtype: torch.dtype, number: int) -> torch.Tensor:
    return ((torch.arange(rows * 3) + 7 * number) % 251).reshape(rows, 3).to(dtype)


def right(context, result: torch.Tensor | None, rows: int, dtype: torch.dtype, number: int = 0) -> bool:
    if context.rank == 0:
        return result is None or result.numel() == 0
    return result is not None and torch.equal(result, part(whole(rows, dtype, number), 1, context.rank - 1))


def call(
    context, group: dist.ProcessGroup, rows: int, dtype: torch.dtype = torch.float32, number: int = 0
) -> bool:
    """The same, synchronous. Whether its result is right."""
    return right(context, start(context, group, rows, dtype, number).wait(), rows, dtype, number)


def chained(context, name: str, callback, count: int = 1) -> list[torch.futures.Future]:
    """What then() made of as many calls, chained before any of them could end: each rank waits for data of
    the one before it or for room at the next, and they come in order. Rank 2, whose calls may end at once,
    chains nothing: torch would call back in the thread that chains."""
    if context.rank > 0:
        context.wait_for_all(f"{name} {context.rank - 1}", [context.rank - 1])
    handles = [start(context, None, MIDDLE, number=number) for number in range(count)]
    made = [handle.get_future().then(callback) for handle in handles] if context.rank < 2 else []
    context.wait_for_all(f"{name} {context.rank}", [context.rank])
    for number, handle in enumerate(handles):
        assert right(context, handle.wait(), MIDDLE, torch.float32, number)
    return made


def a_call_in_a_callback(context) -> None:
    """On a group that is up and on one that has yet to meet; the same group and another."""
    other = dist.new_group(RANKS)
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (LARGE, SMALL, 1):
            for inner in (None, other, dist.new_group(RANKS)):
                future = start(context, None, rows, dtype).get_future()
                done = future.then(lambda _, at=(inner, rows, dtype): call(context, at[0], at[1], at[2], 5))
                assert done.wait()
                assert right(context, future.value(), rows, dtype)


def a_callback_of_a_groups_first_call(context) -> None:
    """It is chained before the ranks have met: the thread that brings the group up must not run it."""
    for rows in (LARGE, SMALL):
        group = dist.new_group(RANKS)
        done = start(context, group, rows).get_future().then(lambda _, g=group, n=rows: call(context, g, n))
        assert done.wait()


def a_chain_of_three(context) -> None:
    for rows in (LARGE, SMALL):
        done = start(context, None, rows).get_future()
        for number in range(3):
            done = done.then(lambda _, n=rows, k=number: call(context, None, n, torch.float32, k))
        assert done.wait()
        # Each in the callback of the one before.

        def nested(_: object, depth: int = 3, n: int = rows) -> bool:
            handle = start(context, None, n, number=depth)
            inside = handle.get_future().then(lambda _: depth == 1 or nested(None, depth - 1, n))
            return inside.wait() and right(context, handle.wait(), n, torch.float32, depth)

        assert start(context, None, rows).get_future().then(nested).wait()


def two_groups_wait_for_each_other(context) -> None:
    one, two = dist.new_group(RANKS), dist.new_group(RANKS)
    for number in range(10):
        rows = LARGE if number % 3 == 0 else SMALL + number
        first, second = start(context, one, rows, number=1), start(context, two, rows, number=2)
        of_first = first.get_future().then(lambda _, n=rows: call(context, two, n, torch.float32, 3))
        of_second = second.get_future().then(lambda _, n=rows: call(context, one, n, torch.float32, 4))
        assert of_first.wait()
        assert of_second.wait()


def callbacks_end_while_calls_start(context) -> None:
    """A start may end runs that were under way."""
    inner = dist.new_group(RANKS)
    for number in range(60):
        done = start(context, None, SMALL).get_future().then(lambda _: call(context, inner, SMALL))
        more = [start(context, None, SMALL + k, number=k) for k in range(4)]
        assert done.wait()
        for k, handle in enumerate(more):
            assert right(context, handle.wait(), SMALL + k, torch.float32, k), number


def slow_callbacks_hold_up_nobody(context) -> None:
    """Sixteen at once, all inside before any goes on, while calls of this group and of others are made."""
    inside = threading.Barrier(17)
    let_go = threading.Event()

    def slow(_: object) -> bool:
        inside.wait(SOON)
        return let_go.wait(SOON)

    done = chained(context, "slow", slow, 16)
    if done:
        inside.wait(SOON)
    for rows in (SMALL, LARGE):
        assert call(context, None, rows)
        assert call(context, dist.new_group(RANKS), rows)
        assert start(context, None, rows).get_future().then(lambda _, n=rows: call(context, None, n)).wait()
    assert not any(each.done() for each in done)
    let_go.set()
    assert all(each.wait() for each in done)


def a_callback_that_raises(context) -> None:
    """The error is that of what then() made; neither the call nor any other hears of it."""
    future = start(context, None, SMALL).get_future()
    done = future.then(lambda _: 1 // 0)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        done.wait()
    assert right(context, future.wait(), SMALL, torch.float32)

    heard = threading.Event()

    def raises(_: object) -> None:
        heard.set()
        raise ValueError("of a callback")

    future = start(context, None, SMALL).get_future()
    future.add_done_callback(raises)
    future.wait()
    assert heard.wait(SOON)
    assert start(context, None, SMALL).get_future().then(lambda _: call(context, None, LARGE)).wait()


def no_callback_runs_on_a_thread_of_a_transport(context) -> None:
    names: set[str] = set()

    def note(_: object) -> None:
        names.add(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip())

    for number in range(40):
        future = start(context, None, LARGE if number % 10 == 0 else SMALL).get_future()
        future.then(note).wait()
    main = Path("/proc/self/comm").read_text().strip()
    assert names <= {main, "mc-callback"}, names


def what_a_callback_waits_for_fails(context) -> None:
    """A call that no other rank makes ends at its limit, in the callback that made it."""
    group = dist.new_group(RANKS)
    assert call(context, group, SMALL)

    def alone(_: object) -> str:
        try:
            start(context, group, SMALL, timeout=1.0).wait()
        except MeshcastError as error:
            return type(error).__name__
        return ""

    future = start(context, None, SMALL).get_future()
    if context.rank == 2:  # which nobody sends anything
        assert future.then(alone).wait() == "DeadlineExceededError"
    future.wait()
    context.wait_for_all("failed")
    assert call(context, None, LARGE)


def a_group_ends_in_a_callback(context) -> None:
    """Its own: nobody waits for the callback, so it may. Another group goes on."""
    for rows in (LARGE, SMALL):
        group = dist.new_group(RANKS)
        assert call(context, group, SMALL)

        def end(_: object, group: dist.ProcessGroup = group) -> bool:
            dist.destroy_process_group(group)
            return True

        assert start(context, group, rows).get_future().then(end).wait()
        assert group not in dist.distributed_c10d._world.pg_map
        assert call(context, None, rows)


def what_is_polled_is_freed(context) -> None:
    """The tensors of a call go with its end, whether anybody waits for it or looks at it alone."""
    for way in ("poll", "future"):
        group = dist.new_group(RANKS)
        assert call(context, group, SMALL)
        memory = np.ones((SMALL, 3), np.float32)  # which the tensor's storage owns
        source, seen = torch.from_numpy(memory), weakref.ref(memory)
        handle = meshcast.reshard_local(
            source if context.rank == 0 else None,
            Layout([0], [Shard(0)]),
            None,
            Layout([1, 2], [Shard(1)]),
            shape=source.shape,
            dtype=source.dtype,
            group=group,
            async_op=True,
        )
        if way == "future":
            handle.get_future().wait()
        limit = time.monotonic() + SOON
        while not handle.is_completed():
            assert time.monotonic() < limit
            time.sleep(0.001)
        del handle, source, memory
        while seen() is not None:
            gc.collect()
            assert time.monotonic() < limit, way
            time.sleep(0.001)


def staged_transfers_have_callbacks_too(context) -> None:
    """From CPUs to a GPU and back, where what arrives is copied once more."""
    here, there = mesh_on("cpu", [0, 1]), mesh_on("cuda", [1, 2])
    with fake_gpu(context.rank) as gpu:
        for number in range(4):
            full = unique_fill((7 + number, 5), torch.float32, number)
            src, dst = (here, there) if number % 2 else (there, here)
            source = held(full, src, [Shard(0)], context.rank)
            again = held(full, src, [Shard(0)], context.rank)
            future = meshcast.reshard(source, dst, [Shard(1)], async_op=True).get_future()
            done = future.then(lambda _, x=again, m=dst: meshcast.reshard(x, m, [Shard(1)]))
            check(gpu, done.wait(), full, dst, [Shard(1)])
            check(gpu, future.wait(), full, dst, [Shard(1)])


def a_state_has_callbacks_too(context) -> None:
    """One thread makes the asynchronous calls of a process group one after the other: a callback may wait for
    the next."""
    for number in range(3):
        full = unique_fill((7 + number, 4), torch.float32, number)
        held_here = {"w": sharded(full, quiet_mesh([0, 1]), [Shard(0)], context.rank)}
        where = {"w": (quiet_mesh([1, 2]), [Shard(1)])}
        state = held_here if context.rank < 2 else None

        def again(_: object, state=state, where=where):
            return meshcast.reshard_state_dict(state, where, async_op=True).wait()

        found = meshcast.reshard_state_dict(state, where, async_op=True).get_future().then(again).wait()
        if context.rank > 0:
            assert torch.equal(found["w"].to_local(), full.chunk(2, dim=1)[context.rank - 1])


def a_broadcast_has_callbacks_too(context) -> None:
    """Of backend "meshcast": large ones, which are multicasts. The first one waits for the ranks to meet."""
    group = dist.new_group(RANKS, backend="meshcast")
    for number in range(3):
        full = whole(LARGE + number, torch.float32, number)
        tensors = [full.clone() if context.rank == 1 else torch.zeros_like(full) for _ in range(3)]

        def again(_: object, group: dist.ProcessGroup = group, tensors=tensors) -> bool:
            dist.broadcast(tensors[1], 1, group=group)
            return call(context, None, SMALL)

        future = dist.broadcast(tensors[0], 1, group=group, async_op=True).get_future()
        assert future.then(again).wait()
        dist.broadcast(tensors[2], 1, group=group)
        assert all(torch.equal(each, full) for each in tensors)


def a_child_is_forked_while_callbacks_wait(context) -> None:
    """It has none of the threads, and ends as any other; the parent's callbacks go on."""
    let_go = threading.Event()
    entered = threading.Event()

    def waits(_: object) -> bool:
        entered.set()
        return let_go.wait(SOON)

    blocked = chained(context, "blocked", waits)
    assert not blocked or entered.wait(SOON)
    queued = start(context, None, LARGE).get_future().then(lambda _: call(context, None, SMALL))
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            gc.collect()  # frees what is not the child's to end
            status = 2 if any(each.done() for each in blocked) else 0
        os._exit(status)
    limit = time.monotonic() + SOON
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < limit
        time.sleep(0.005)
    assert ended[1] == 0
    assert queued.wait()
    let_go.set()
    assert all(each.wait() for each in blocked)


def a_process_ends_with_callbacks_pending(context) -> None:
    """They stand for longer than anybody waits: see check_ends()."""
    heard = threading.Event()

    def stands(_: object) -> None:
        heard.set()
        threading.Event().wait(10 * GROUP_TIMEOUT)

    assert not chained(context, "stands", stands, 3) or heard.wait(SOON)
    context.wait_for_all("pending")


CASES = [
    a_call_in_a_callback,
    a_callback_of_a_groups_first_call,
    a_chain_of_three,
    two_groups_wait_for_each_other,
    callbacks_end_while_calls_start,
    slow_callbacks_hold_up_nobody,
    a_callback_that_raises,
    no_callback_runs_on_a_thread_of_a_transport,
    what_a_callback_waits_for_fails,
    a_group_ends_in_a_callback,
    what_is_polled_is_freed,
    staged_transfers_have_callbacks_too,
    a_state_has_callbacks_too,
    a_broadcast_has_callbacks_too,
    a_child_is_forked_while_callbacks_wait,
    a_process_ends_with_callbacks_pending,
]
