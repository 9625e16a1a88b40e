"""WeightSync and pipeline schedules in `with` statements; on four ranks."""

from __future__ import annotations

import meshcast
import torch
import torch.distributed as dist
from meshcast import pipelining
from multiproc.meshes import quiet_mesh, sharded
from torch.distributed.tensor import Shard

GROUP_TIMEOUT = 60.0


class OddError(Exception):
    pass


def raised(function) -> BaseException | None:
    try:
        function()
    except Exception as error:
        return error
    return None


def _sync(rank: int, buffers: int) -> meshcast.WeightSync:
    weights = None
    if rank in (0, 1):
        weights = {"w": sharded(torch.zeros(4, 2), quiet_mesh([0, 1]), [Shard(0)], rank)}
    where = {"w": (quiet_mesh([2, 3]), [Shard(1)])} if rank in (2, 3) else None
    return meshcast.WeightSync(weights, where, buffers=buffers)


def weight_sync_is_closed(context) -> None:
    for buffers in (2, 1):
        with _sync(context.rank, buffers) as sync:
            for version in (1, 2):
                if context.rank in (0, 1):
                    sync.push(version)
                else:
                    assert sync.pull(version) == version
        assert "closed" in repr(sync)
        error = raised(lambda: sync.push(3) if context.rank in (0, 1) else sync.pull(3))
        assert isinstance(error, meshcast.AbortedError), error
        assert context.rank in (0, 1) or sync.state.version == 2  # what was current can be used on


def an_error_in_the_block_ends_weight_sync_on_all_ranks(context) -> None:
    """Those that wait get the cause, long before their limit, and the error itself is what comes out."""
    for buffers in (2, 1):

        def block(buffers: int = buffers) -> None:
            with _sync(context.rank, buffers) as sync:
                if context.rank == 0:
                    raise OddError("the loss is NaN")
                error = raised(lambda: sync.push(1) if context.rank == 1 else sync.pull())
                assert isinstance(error, meshcast.AbortedError), error
                assert "rank 0 has left its block with OddError: the loss is NaN" in str(error), error

        error = raised(block)
        assert isinstance(error, OddError) == (context.rank == 0), error
        dist.barrier()


def _schedule(rank: int) -> pipelining.ScheduleGPipe:
    torch.manual_seed(rank)
    stage = pipelining.PipelineStage(
        torch.nn.Linear(3, 3), rank, 4, torch.device("cpu"), mesh=quiet_mesh([rank])
    )
    return pipelining.ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)


def _step(schedule: pipelining.ScheduleGPipe, rank: int) -> None:
    args = (torch.ones(4, 3),) if rank == 0 else ()
    schedule.step(*args, target=torch.zeros(4, 3) if rank == 3 else None)


def a_schedule_is_closed(context) -> None:
    with _schedule(context.rank) as schedule:
        _step(schedule, context.rank)
    error = raised(lambda: _step(schedule, context.rank))
    assert isinstance(error, meshcast.AbortedError), error
    assert "the schedule was closed" in str(error), error
    dist.barrier()


def an_error_in_the_block_ends_a_schedule_on_all_ranks(context) -> None:
    def block() -> None:
        with _schedule(context.rank) as schedule:
            _step(schedule, context.rank)
            if context.rank == 2:
                raise OddError("the disk is full")
            error = raised(lambda: _step(schedule, context.rank))
            assert isinstance(error, meshcast.AbortedError), error
            assert "the disk is full" in str(error) and "rank 2" in str(error), error

    error = raised(block)
    assert isinstance(error, OddError) == (context.rank == 2), error
    dist.barrier()


CASES = [
    weight_sync_is_closed,
    an_error_in_the_block_ends_weight_sync_on_all_ranks,
    a_schedule_is_closed,
    an_error_in_the_block_ends_a_schedule_on_all_ranks,
]
