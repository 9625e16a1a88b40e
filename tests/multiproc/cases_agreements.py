"""What ranks remember of their agreements stays alike, whatever one of them refuses, drops or does later
than the others. Three processes."""

from __future__ import annotations

import gc
import time

import meshcast
import torch
from meshcast.groups import private
from meshcast.groups.parent import parent_group
from multiproc.meshes import resharder_between, sharded
from multiproc.oracle import coordinates, cut, unique_fill
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

GROUP_TIMEOUT = 40.0
private.KEPT_AGREEMENTS = 2
_meshes: list[DeviceMesh] = []


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """Ranks 0, 1 and ranks 1, 2."""
    if not _meshes:
        _meshes.extend([DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])])
    return _meshes[0], _meshes[1]


def source(rows: int, seed: int, rank: int) -> tuple[torch.Tensor, DTensor]:
    full = unique_fill((rows, 3), torch.float32, seed)
    return full, sharded(full, meshes()[0], [Shard(0)], rank)


def check(result: DTensor, full: torch.Tensor, rank: int) -> None:
    place = coordinates(meshes()[1].mesh).get(rank)
    if place is not None:
        expected = cut(full, meshes()[1].mesh.shape, place, [Replicate()])
        assert torch.equal(result.to_local(), expected)


def call(rows: int, seed: int, rank: int) -> None:
    """One reshard of a kind of its own for each number of rows."""
    full, x = source(rows, seed, rank)
    check(meshcast.reshard(x, meshes()[1], [Replicate()]), full, rank)


def slots_become(wanted: int) -> bool:
    """Returns whether so many slots are taken before the limit: the thread that ended the last call may still
    hold what was agreed on as `wait` returns."""
    core = parent_group(None, "test").private([0, 1, 2]).core
    limit = time.monotonic() + GROUP_TIMEOUT
    while core.slots_taken != wanted and time.monotonic() < limit:
        time.sleep(0.001)
    return core.slots_taken == wanted


def refused_calls_leave_no_trace(context) -> None:
    """A call that one rank refuses is new to the others, who must not remember it, nor forget another for
    it: else they would agree anew on a kind that this rank knows, and wait for it for ever."""
    call(4, 1, context.rank)
    call(5, 2, context.rank)
    for rows in (6, 7):
        _, x = source(rows, 3, context.rank)
        try:
            if context.rank == 0:
                meshcast.reshard(x, meshes()[1], [Shard(9)])
            else:
                meshcast.reshard(x, meshes()[1], [Replicate()])
        except meshcast.MeshcastError as error:
            wanted = meshcast.LayoutError if context.rank == 0 else meshcast.PlanMismatchError
            assert isinstance(error, wanted), error
        else:
            raise AssertionError("no error")
    for turn in range(3):
        for rows in (4, 5, 8, 4, 9):
            call(rows, 10 * turn + rows, context.rank)
    assert slots_become(2 if context.rank == 0 else 0)


def slots_of_dropped_resharders_return(context) -> None:
    a, b = meshes()
    full, x = source(11, 5, context.rank)
    before = 2 if context.rank == 0 else 0  # of the two that `private.KEPT_AGREEMENTS` keeps
    assert slots_become(before)
    for _ in range(3):
        resharder = resharder_between(
            meshcast.TensorSpec(full.shape, full.dtype, a, [Shard(0)]),
            meshcast.TensorSpec(full.shape, full.dtype, b, [Replicate()]),
        )
        check(resharder.run(x if context.rank in (0, 1) else None), full, context.rank)
        assert slots_become(before + (context.rank == 0))
        del resharder
        gc.collect()
        assert slots_become(before)


def next_call_after_a_disagreement(context) -> None:
    """It is queued before the ranks find out that they disagree; how far each is with that must not
    matter."""
    _, b = meshes()
    first, x = source(12, 6, context.rank)
    other, y = source(13, 7, context.rank)
    handles = [meshcast.reshard(y if context.rank == 2 else x, b, [Replicate()], async_op=True)]
    if context.rank == 1:
        time.sleep(0.2)
    handles += [meshcast.reshard(x, b, [Replicate()], async_op=True) for _ in range(2)]
    handles += [meshcast.reshard(y, b, [Replicate()], async_op=True)]
    try:
        handles[0].wait()
    except meshcast.PlanMismatchError:
        pass
    else:
        raise AssertionError("no PlanMismatchError")
    for handle, full in zip(handles[1:], (first, first, other), strict=True):
        check(handle.wait(), full, context.rank)


def one_rank_far_ahead(context) -> None:
    """Ranks that start 100 calls of two kinds before another starts any; then the other way round."""
    _, b = meshes()
    for late in (2, 0, 1):
        given = [source(14 + number % 2, number, context.rank) for number in range(100)]
        if context.rank == late:
            time.sleep(0.3)
        handles = [meshcast.reshard(x, b, [Replicate()], async_op=True) for _, x in given]
        for (full, _), handle in reversed(list(zip(given, handles, strict=True))):
            check(handle.wait(), full, context.rank)


CASES = [
    refused_calls_leave_no_trace,
    slots_of_dropped_resharders_return,
    next_call_after_a_disagreement,
    one_rank_far_ahead,
]
