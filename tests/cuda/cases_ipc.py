"""Ranks that are processes on one GPU, over CUDA IPC. DEVICE=cpu runs the same cases over the CPU path where
there is no GPU, which checks the cases."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import meshcast
import torch
from meshcast.errors import AbortedError, PeerLostError
from meshcast.groups.parent import parent_group
from meshcast.transfers.gpu import gpu_of
from multiproc.devices import GPU, check, given, use_a_gpu
from multiproc.meshes import resharder_between
from multiproc.oracle import unique_fill
from torch.distributed.tensor import Replicate, Shard

sys.path.append(str(Path(__file__).parent))
from cases_reshard import (
    a_partial_source_is_reduced,
    gradients_come_back,
    mesh_of,
    random_layouts,
    several_in_flight_on_several_streams,
    the_rates_between_gpus_are_measured,
)

GROUP_TIMEOUT = 120.0
VICTIM = int(os.environ.get("VICTIM", "-1"))  # the rank that is killed in the last case; -1: none


def the_transport_is_cuda_ipc(context) -> None:
    use_a_gpu(context.rank)
    everybody = list(range(context.world))
    mesh = mesh_of(everybody)
    full = unique_fill((9, 4), torch.float32, 1)
    y = meshcast.reshard(given(full, mesh, [Shard(0)], context.rank), mesh, [Replicate()])
    check(y, full, mesh, [Replicate()], context.rank)
    if GPU == "cuda":
        gpu = gpu_of(parent_group(None, "test").private(everybody))
        assert gpu is not None and gpu.transport == "cuda_ipc"


def a_cached_reshard_of_64_kib(context) -> None:
    """The same tensors again and again, with other values each time."""
    use_a_gpu(context.rank)
    mesh = mesh_of(list(range(context.world)))
    full = unique_fill((64, 256), torch.float32, 3)
    x = given(full, mesh, [Shard(0)], context.rank)
    resharder = resharder_between(x, meshcast.TensorSpec(full.shape, full.dtype, mesh, [Shard(1)]))
    for number in range(300):
        y = resharder.run(x)
        if number % 50 == 0:
            check(y, full + number, mesh, [Shard(1)], context.rank)
        x.to_local().add_(1)


def memory_is_freed_and_comes_back(context) -> None:
    """Tensors of all sizes go at once, also back to the GPU, and others come at their addresses."""
    use_a_gpu(context.rank)
    mesh = mesh_of(list(range(context.world)))
    rng = random.Random(11)
    pending = []
    for number in range(120):
        rows = rng.choice([3, 40, 700, 9000])
        full = unique_fill((rows, 257), torch.float32, number)
        x = given(full, mesh, [Shard(0)], context.rank)
        pending.append((meshcast.reshard(x, mesh, [Shard(1)], async_op=True), full))
        del x
        if number % 3 == 2:
            for handle, expected in pending:
                check(handle.wait(), expected, mesh, [Shard(1)], context.rank)
            pending.clear()
        if GPU == "cuda" and number % 9 == 8:
            torch.cuda.empty_cache()


def a_call_comes_before_the_others_do(context) -> None:
    """No call blocks for another's: the last rank makes its own when those of all others have returned."""
    use_a_gpu(context.rank)
    mesh = mesh_of(list(range(context.world)))
    full = unique_fill((512, 64), torch.float32, 5)
    x = given(full, mesh, [Shard(0)], context.rank)
    meshcast.reshard(x, mesh, [Shard(1)])  # known from here on
    last = context.world - 1
    if context.rank == last:
        context.wait_for_all("called", list(range(last)))
    handle = meshcast.reshard(x, mesh, [Shard(1)], async_op=True)
    if context.rank != last:
        context.say("called")
    check(handle.wait(), full, mesh, [Shard(1)], context.rank)


def a_rank_that_is_killed_is_named(context) -> None:
    if VICTIM < 0:
        return
    use_a_gpu(context.rank)
    mesh = mesh_of(list(range(context.world)))
    full = unique_fill((4096, 64), torch.float32, 7)
    x = given(full, mesh, [Shard(0)], context.rank)
    begin = time.monotonic()
    try:
        for number in range(100_000):
            if context.rank == VICTIM and number == 40:
                os.kill(os.getpid(), signal.SIGKILL)
            meshcast.reshard(x, mesh, [Shard(1)], timeout=20.0)
            if GPU == "cuda" and number % 10 == 9:
                torch.cuda.synchronize()
    except (PeerLostError, AbortedError) as error:
        assert time.monotonic() - begin < 60
        assert f"rank {VICTIM}" in str(error), error
        if isinstance(error, PeerLostError):
            assert error.peer == VICTIM, error
    else:
        raise AssertionError("went on without a rank")


CASES = [
    the_transport_is_cuda_ipc,
    the_rates_between_gpus_are_measured,
    random_layouts,
    several_in_flight_on_several_streams,
    gradients_come_back,
    a_partial_source_is_reduced,
    a_cached_reshard_of_64_kib,
    memory_is_freed_and_comes_back,
    a_call_comes_before_the_others_do,
    a_rank_that_is_killed_is_named,
]
