"""Calls between CPUs and GPUs that fail: what is refused, and what the other ranks hear of it. Five processes
with fake GPUs."""

from __future__ import annotations

import contextlib
import functools
import time
from unittest import mock

import meshcast
import torch
import torch.distributed as dist
from meshcast.errors import AbortedError, DeadlineExceededError, LayoutError, MeshcastError, PlanMismatchError
from meshcast.groups.parent import parent_group
from meshcast.transfers import medium as medium_module
from multiproc.cases_shared_memory import environment
from multiproc.fake_gpu import FakeGpu, check, fake_gpu, held, mesh_on
from multiproc.meshes import resharder_between
from multiproc.oracle import unique_fill
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 60.0
HERE, THERE = [0, 1, 2], [2, 3, 4]
FULL = unique_fill((7, 5), torch.float32, 1)


def call(context, group: dist.ProcessGroup, there: str = "cuda", **options):
    """From the GPUs to the CPUs. Every rank of these needs something from each of those."""
    src, dst = mesh_on(there, THERE), mesh_on("cpu", HERE)
    x = held(FULL, src, [Shard(0)], context.rank)
    return meshcast.reshard(x, dst, [Shard(1)], group=group, **options)


def works(context, gpu: FakeGpu, group: dist.ProcessGroup) -> None:
    check(gpu, call(context, group), FULL, mesh_on("cpu", HERE), [Shard(1)])


def error_of(run) -> MeshcastError:
    begin = time.monotonic()
    try:
        run()
    except MeshcastError as error:
        assert time.monotonic() - begin < GROUP_TIMEOUT / 2, "the error came late"
        return error
    raise AssertionError("nothing was raised")


def a_copy_that_fails_is_told(context) -> None:
    """While the ranks agree: the group lives on."""
    for async_op in (False, True):
        group = dist.new_group()
        with fake_gpu(1) as gpu:
            if context.rank == 3:
                gpu.failure = "CUDA error: out of memory"

            def run(group=group, async_op=async_op) -> None:
                result = call(context, group, async_op=async_op)
                if async_op:
                    result.wait()

            error = error_of(run)
            assert "bytes could not be brought to pinned host memory: CUDA error: out of memory" in str(error)
            assert type(error) is (MeshcastError if context.rank == 3 else PlanMismatchError)
            assert context.rank == 3 or error.peer == 3
            works(context, gpu, group)


def a_rank_that_is_through_with_a_refused_call_is_not_a_call_ahead(context) -> None:
    """Rank 4 sends, and needs nothing from the one that refuses. Its next call, from or onto its GPU, was
    begun before it heard of the refusal; it begins once more, with the others."""
    full = unique_fill((300, 300), torch.float32, 1)  # in messages that end when their receiver has them
    src, dst = mesh_on("cuda", THERE), mesh_on("cpu", HERE)
    x, y = (held(full, mesh, [Shard(0)], context.rank) for mesh in (src, dst))
    for variables in ({}, {"MESHCAST_SHM": "0"}, {"MESHCAST_SHM": "0", "MESHCAST_TRANSPORT": "gloo"}):
        group = dist.new_group()
        with fake_gpu(2) as gpu, environment(**variables):
            forth = functools.partial(meshcast.reshard, x, dst, [Shard(1)], group=group)
            back = functools.partial(meshcast.reshard, y, src, [Shard(1)], group=group)
            for following, mesh in ((forth, dst), (back, src)):
                check(gpu, forth(), full, dst, [Shard(1)])
                check(gpu, back(), full, src, [Shard(1)])
                if context.rank == 3:
                    gpu.failure = "CUDA error: out of memory"
                if context.rank == 4:
                    with contextlib.suppress(PlanMismatchError):  # where it comes late
                        forth()
                else:
                    assert "CUDA error: out of memory" in str(error_of(forth))
                check(gpu, following(), full, mesh, [Shard(1)])


def a_copy_that_fails_backwards_is_told(context) -> None:
    group = dist.new_group()
    src, dst = mesh_on("cpu", HERE), mesh_on("cuda", THERE)
    with fake_gpu(2) as gpu:
        x = held(FULL, src, [Shard(0)], context.rank).requires_grad_()
        y = meshcast.reshard(x, dst, [Shard(1)], group=group)
        losses = [y.sum()] if y._local_tensor.numel() else []
        if context.rank == 4:
            gpu.failure = "CUDA error: an illegal address"
        if context.rank == 3:  # it only sends
            meshcast.backward(*losses)
        else:
            assert "CUDA error: an illegal address" in str(error_of(lambda: meshcast.backward(*losses)))


def a_copy_that_fails_after_the_transfer_is_raised(context) -> None:
    """The others have what they need."""
    group = dist.new_group()
    src, dst = mesh_on("cpu", HERE), mesh_on("cuda", THERE)
    with fake_gpu(3) as gpu:
        x = held(FULL, src, [Shard(0)], context.rank)
        handle = meshcast.reshard(x, dst, [Shard(1)], group=group, async_op=True)
        if context.rank == 3:
            gpu.failure = "CUDA error: unspecified launch failure"
            for _ in range(2):
                error = error_of(handle.wait)
                assert "copying what arrived onto the GPU failed: CUDA error: unspecified" in str(error)
            assert handle.is_completed()
        else:
            check(gpu, handle.wait(), FULL, dst, [Shard(1)])
        works(context, gpu, group)


def a_gpu_that_stalls_runs_into_the_limit(context) -> None:
    """It names itself, and ends the group; others go on."""
    for async_op in (False, True):
        group, other = dist.new_group(), dist.new_group()
        with fake_gpu(4) as gpu:
            works(context, gpu, group)
            gpu.stalled = context.rank == 4
            limit = 1.0 if context.rank == 4 else 20.0

            def run(group=group, async_op=async_op, limit=limit) -> None:
                result = call(context, group, timeout=limit, async_op=async_op)
                if async_op:
                    result.wait()

            if context.rank == 3:  # it only sends
                with contextlib.suppress(AbortedError):
                    run()
            else:
                error = error_of(run)
                assert "reshard on rank 4: the GPU had not copied the source to the host" in str(error), error
                assert isinstance(error, DeadlineExceededError if context.rank == 4 else AbortedError), error
            gpu.stalled = False
            works(context, gpu, other)


def a_call_given_up_while_the_gpu_is_busy_ends(context) -> None:
    group = dist.new_group()
    with fake_gpu(5) as gpu:
        works(context, gpu, group)
        dist.barrier()
        gpu.stalled = context.rank == 3
        handle = call(context, group, async_op=True)
        if context.rank == 0:
            ranks = sorted({*HERE, *THERE})
            parent_group(group, "test").private(ranks).abort("the job is over")
        if context.rank == 4:  # it only sends
            with contextlib.suppress(AbortedError):
                handle.wait()
        else:
            assert "the job is over" in str(error_of(handle.wait))
        gpu.stalled = False


def a_capture_is_refused(context) -> None:
    group = dist.new_group()
    with fake_gpu(6) as gpu:
        gpu.captures = context.rank == 2
        error = error_of(lambda: call(context, group))
        assert "captured into a CUDA graph" in str(error)
        assert isinstance(error, LayoutError if context.rank == 2 else PlanMismatchError), error
        gpu.captures = False
        works(context, gpu, group)


def meshes_on_other_devices_are_told_apart(context) -> None:
    """A rank whose mesh is on the CPU, where that of the others is on GPUs."""
    group = dist.new_group()
    with fake_gpu(7) as gpu:
        error = error_of(lambda: call(context, group, "cpu" if context.rank == 3 else "cuda"))
        assert isinstance(error, PlanMismatchError) and "from cuda to cpu" in str(error), error
        works(context, gpu, group)


def a_rank_without_gpu_is_named(context) -> None:
    """One of several: all hear of it, also in a call of weights."""
    group = dist.new_group()
    reason = "torch sees no GPU here" if context.rank == 3 else ""
    src, dst = mesh_on("cpu", HERE), mesh_on("cuda", THERE)
    x = held(FULL, src, [Shard(0)], context.rank)
    with fake_gpu(8), mock.patch.object(medium_module, "gpu_obstacle", return_value=reason):
        error = error_of(lambda: meshcast.reshard(x, dst, [Shard(1)], group=group))
        assert "one of the meshes is on cuda, but torch sees no GPU here" in str(error)
        assert isinstance(error, LayoutError if reason else PlanMismatchError)
        weights, where = {"x": x} if context.rank in HERE else None, {"x": (dst, [Shard(1)])}
        error = error_of(lambda: meshcast.reshard_state_dict(weights, where, group=group))
        assert isinstance(error, LayoutError) and error.peer == 3
        assert "'x' is to be on cuda on rank 3, but there torch sees no GPU here" in str(error)
    with fake_gpu(8) as gpu:
        works(context, gpu, group)


def a_rank_on_the_host_needs_no_gpu(context) -> None:
    """In calls, by a Resharder, of weights, back and forth."""
    group = dist.new_group()
    reason = "torch sees no GPU here" if context.rank < 2 else ""
    src, dst = mesh_on("cpu", HERE), mesh_on("cuda", THERE)
    with fake_gpu(10) as gpu, mock.patch.object(medium_module, "gpu_obstacle", return_value=reason):
        works(context, gpu, group)
        x = held(FULL, src, [Shard(0)], context.rank)
        spec = meshcast.TensorSpec(FULL.shape, FULL.dtype, dst, [Shard(1)])
        check(gpu, resharder_between(x, spec, group).run(x), FULL, dst, [Shard(1)])
        weights = {"x": x} if context.rank in HERE else None
        moved = meshcast.reshard_state_dict(weights, {"x": (dst, [Shard(1)])}, group=group)
        check(gpu, moved["x"], FULL, dst, [Shard(1)])


def unlike_sources_go_in_separate_calls(context) -> None:
    here, there, dst = mesh_on("cpu", HERE), mesh_on("cuda", THERE), mesh_on("cpu", [0, 1, 2, 3, 4])
    with fake_gpu(9) as gpu:
        xs = [held(FULL, mesh, [Shard(0)], context.rank) for mesh in (here, there)]
        error = error_of(lambda: meshcast.reshard_many(xs, dst, [[Replicate()]] * 2))
        assert isinstance(error, LayoutError) and "move them in separate calls" in str(error)
        for x in xs:
            check(gpu, meshcast.reshard(x, dst, [Replicate()]), FULL, dst, [Replicate()])


CASES = [
    a_copy_that_fails_is_told,
    a_rank_that_is_through_with_a_refused_call_is_not_a_call_ahead,
    a_copy_that_fails_backwards_is_told,
    a_copy_that_fails_after_the_transfer_is_raised,
    a_gpu_that_stalls_runs_into_the_limit,
    a_call_given_up_while_the_gpu_is_busy_ends,
    a_capture_is_refused,
    meshes_on_other_devices_are_told_apart,
    a_rank_without_gpu_is_named,
    a_rank_on_the_host_needs_no_gpu,
    unlike_sources_go_in_separate_calls,
]
