"""reshard_local, handles, transfers and the life of groups, in four processes; run over gloo and over the
backend "meshcast"."""

from __future__ import annotations

import gc
import time
import weakref
from datetime import timedelta

import meshcast
import torch
import torch.distributed as dist
from meshcast.groups.parent import parent_group
from meshcast.transfers.transfer import PersistentTransfer
from multiproc.meshes import quiet_mesh, sharded, spread
from multiproc.own_threads import left_running
from torch.distributed.tensor import DTensor, Replicate, Shard

GROUP_TIMEOUT = 30.0
LEAVE_UP = True  # the last case ends the groups
A, B = [0, 1], [1, 2, 3]
FULL = torch.arange(42.0).reshape(6, 7)
ROWS = {0: slice(0, 3), 1: slice(3, 6)}  # Shard(0) over A
COLUMNS = {1: slice(0, 3), 2: slice(3, 6), 3: slice(6, 7)}  # Shard(1) over B


def layouts() -> tuple[meshcast.Layout, meshcast.Layout]:
    return meshcast.Layout(A, [Shard(0)]), meshcast.Layout(B, [Shard(1)])


def shard_of_a(rank: int) -> torch.Tensor | None:
    return FULL[ROWS[rank]].clone() if rank in A else None


def local(context) -> None:
    """Plain tensors: into given storage, strided on both sides, and into storage that the call allocates."""
    src, dst = layouts()
    for strided in (False, True):
        source = shard_of_a(context.rank)
        target = (
            torch.zeros(6, COLUMNS[context.rank].stop - COLUMNS[context.rank].start)
            if context.rank in B
            else None
        )
        if strided:
            source, target = (None if t is None else spread(t) for t in (source, target))
        out = meshcast.reshard_local(source, src, target, dst, shape=(6, 7), dtype=torch.float32)
        assert out is target
        assert target is None or torch.equal(target, FULL[:, COLUMNS[context.rank]])
    handle = meshcast.reshard_local(
        shard_of_a(context.rank),
        src,
        None,
        dst,
        shape=(6, 7),
        dtype=torch.float32,
        async_op=True,
        timeout=timedelta(seconds=20),
    )
    out = handle.wait()
    assert (out is None) == (context.rank not in B)
    assert out is None or torch.equal(out, FULL[:, COLUMNS[context.rank]])
    wrong = torch.zeros(1) if context.rank in A else None
    try:
        meshcast.reshard_local(wrong, src, None, dst, shape=(6, 7), dtype=torch.float32, group=_spare())
    except meshcast.MeshcastError as error:
        assert context.rank not in A or (isinstance(error, ValueError) and "(3, 7)" in str(error))
    else:
        raise AssertionError("a shard of the wrong shape was taken")


def repeated(context) -> None:
    """Many calls on known plans, interleaved, each with its own values: none may see the values of
    another."""
    src, dst = layouts()
    back = meshcast.Layout(A, [Shard(0)])
    for step in range(60):
        source = None if context.rank not in A else shard_of_a(context.rank) + step
        first = meshcast.reshard_local(
            source, src, None, dst, shape=(6, 7), dtype=torch.float32, async_op=True
        )
        second = meshcast.reshard_local(
            None if source is None else source * -1,
            src,
            None,
            back,
            shape=(6, 7),
            dtype=torch.float32,
            async_op=True,
        )
        if context.rank in A:
            assert torch.equal(second.wait(), -(FULL[ROWS[context.rank]] + step))
        if context.rank in B:
            assert torch.equal(first.wait(), FULL[:, COLUMNS[context.rank]] + step)
        first.wait()


def handles(context) -> None:
    """Polling, stats, and futures that work before and after the end."""
    x = sharded(FULL, quiet_mesh(A), [Shard(0)], context.rank)
    handle = meshcast.reshard(x, quiet_mesh(B), [Replicate()], async_op=True)
    future = handle.get_future()
    result = handle.wait()
    assert handle.is_completed()
    assert isinstance(result, DTensor)
    assert future.wait() is result
    assert handle.get_future().wait() is result
    assert handle.wait() is result
    stats = handle.stats
    assert stats.seconds > 0
    assert stats.ratio > 0
    needed = {0: 0, 1: 84, 2: 168, 3: 168}[context.rank]  # bytes of FULL that the rank did not hold
    assert stats.bytes_received == needed, stats
    assert stats.bytes == stats.bytes_sent + stats.bytes_received


def source_changed(context) -> None:
    """Changing a source before wait() is found out, through the DTensor and through its local tensor."""
    for change in ("dtensor", "local"):
        x = sharded(FULL, quiet_mesh(A), [Shard(0)], context.rank)
        handle = meshcast.reshard(x, quiet_mesh(B), [Shard(0)], async_op=True)
        # Only after everybody has all of it: the test is about the detection, not about torn values.
        while not handle.is_completed():
            time.sleep(0.001)
        context.wait_for_all(f"{change} arrived")
        if context.rank != 0:
            handle.wait()
            continue
        (x if change == "dtensor" else x.to_local()).add_(1)
        try:
            handle.wait()
        except meshcast.MeshcastError as error:
            assert "changed in place" in str(error)
        else:
            raise AssertionError(f"the change through the {change} was not found")


def transfers(context) -> None:
    """Two tensors at once in a lane of their own, started many times; the plan can be read."""
    src, dst = layouts()
    transfer = PersistentTransfer(
        parent_group(None, "edge"),
        [((6, 7), torch.float32, src, dst), ((5,), torch.int64, src, meshcast.Layout(B, [Replicate()]))],
        "edge",
        lane=7,
    )
    transfer.agree_ahead()
    assert {t.nbytes for t in transfer.plan.tasks}
    vector = torch.arange(5)
    for step in range(5):
        sources = [None, None]
        if context.rank in A:
            sources = [
                shard_of_a(context.rank) + step,
                vector[:3].clone() if context.rank == 0 else vector[3:].clone(),
            ]
        targets: list[torch.Tensor | None] = [None, None]
        if context.rank in B:
            targets = [torch.zeros_like(FULL[:, COLUMNS[context.rank]]), torch.zeros(5, dtype=torch.int64)]
        transfer.start(sources, targets).wait()
        if context.rank in B:
            assert torch.equal(targets[0], FULL[:, COLUMNS[context.rank]] + step)
            assert torch.equal(targets[1], vector)
    transfer.close()
    try:
        transfer.start([None, None], [None, None])
    except meshcast.MeshcastError:
        pass
    else:
        raise AssertionError("a closed transfer was started")


def cyclic_first_use(context) -> None:
    """Overlapping groups that ranks meet in different orders, all in flight: 0-1 and 1-2 and 2-0, each rank
    starting elsewhere."""
    pairs = [(0, 1), (1, 2), (2, 0)]
    group = _spare_of([0, 1, 2])
    if context.rank == 3:
        return
    started = {}
    for offset in range(3):
        source, target = pairs[(context.rank + offset) % 3]
        if context.rank not in (source, target):
            continue
        value = torch.full((4,), float(source)) if context.rank == source else None
        started[source, target] = meshcast.reshard_local(
            value,
            meshcast.Layout([source], [Replicate()]),
            None,
            meshcast.Layout([target], [Replicate()]),
            shape=(4,),
            dtype=torch.float32,
            group=group,
            async_op=True,
        )
    for (source, target), handle in started.items():
        out = handle.wait()
        assert context.rank != target or torch.equal(out, torch.full((4,), float(source)))


def abort_wakes_everybody(context) -> None:
    """Transfer.abort on one rank ends the waits of all, with its reason."""
    src, dst = layouts()
    group = _spare()
    transfer = PersistentTransfer(parent_group(group, "reshard"), [((6, 7), torch.float32, src, dst)])
    transfer.agree_ahead()
    target = torch.zeros_like(FULL[:, COLUMNS[context.rank]]) if context.rank in B else None
    assert transfer.plan.tasks
    if context.rank == 0:  # holds what all of B wait for, and does not start
        time.sleep(0.3)
        transfer.abort("the loss is not finite")
        return
    begin = time.monotonic()
    try:
        transfer.start([shard_of_a(context.rank)], [target], timeout=20).wait()
    except meshcast.MeshcastError as error:
        assert "not finite" in str(error), error
    else:
        raise AssertionError("the aborted call returned")
    assert time.monotonic() - begin < 10


def born_again(context) -> None:
    """A process group that was destroyed takes its private groups along; the next one works. Nothing is left
    running."""
    x = sharded(FULL, quiet_mesh(A), [Shard(0)], context.rank)
    meshcast.reshard(x, quiet_mesh(B), [Shard(0)])
    backend = dist.get_backend()
    for life in range(2):
        context.wait_for_all(f"{life} used")
        begin = time.monotonic()
        private = [weakref.ref(group) for group in parent_group(None, "test")._groups.values()]
        assert private
        dist.destroy_process_group()
        gc.collect()
        assert time.monotonic() - begin < 5
        assert [group() for group in private] == [None] * len(private), "private groups outlive their parent"
        try:
            meshcast.reshard(x, quiet_mesh_offline(), [Shard(0)])
        except meshcast.MeshcastError as error:
            assert "init_process_group" in str(error)
        else:
            raise AssertionError("a reshard without process group")
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"life {life}", context.store),
            rank=context.rank,
            world_size=context.world,
        )
        result = meshcast.reshard(x * (life + 2), quiet_mesh(B), [Shard(0)]).to_local()
        if context.rank in B:
            assert torch.equal(result, FULL[2 * context.rank - 2 : 2 * context.rank] * (life + 2))
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    assert left_running() == []


def quiet_mesh_offline():
    """A mesh made while no process group exists."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.tensor(B), _init_backend=False, _rank=0)


_groups: list[dist.ProcessGroup] = []


def _spare() -> dist.ProcessGroup:
    """A new group of all ranks, that a case may break."""
    return _spare_of(list(range(dist.get_world_size())))


def _spare_of(ranks: list[int]) -> dist.ProcessGroup:
    _groups.append(dist.new_group(ranks))
    return _groups[-1]


CASES = [
    local,
    repeated,
    handles,
    source_changed,
    transfers,
    cyclic_first_use,
    abort_wakes_everybody,
    born_again,
]
