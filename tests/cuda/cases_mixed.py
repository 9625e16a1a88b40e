"""reshard between meshes on CPUs and on GPUs, through pinned memory. The ranks share the GPUs there are;
DEVICE=cpu runs the same cases where there is none, which checks the cases."""

from __future__ import annotations

import random

import meshcast
import torch
from multiproc.cases_staged import positive
from multiproc.devices import GPU, check, given, mesh_on, use_a_gpu
from multiproc.meshes import resharder_between
from multiproc.oracle import unique_fill
from multiproc.random_layouts import draw
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 120.0
SEEDS = range(9000, 9048)
A, B = [0, 1, 2], [2, 3, 4]


def random_layouts(context) -> None:
    use_a_gpu(context.rank)
    for seed in SEEDS:
        problem = draw(seed, context.world)
        ndim = len(problem.shape)
        full = unique_fill(problem.shape, problem.dtype, problem.seed)
        kinds = (GPU, "cpu") if seed % 2 else ("cpu", GPU)
        src, dst = (
            mesh_on(kinds[0], problem.src_mesh, context.rank),
            mesh_on(kinds[1], problem.dst_mesh, context.rank),
        )
        forth, back = positive(problem.src_placements, ndim), positive(problem.dst_placements, ndim)
        try:
            y = meshcast.reshard(given(full, src, forth, context.rank), dst, back, strategy=problem.strategy)
            check(y, full, dst, back, context.rank)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {kinds}: {problem}") from error


def streams_are_followed(context) -> None:
    """Sources that a busy stream still makes, results that it still reads, and memory that is freed at once;
    waited for in another order on each rank."""
    use_a_gpu(context.rank)
    src, dst = mesh_on(GPU, A, context.rank), mesh_on("cpu", B, context.rank)
    streams = [torch.cuda.Stream() for _ in range(3)] if GPU == "cuda" else []
    rng = random.Random(context.rank)
    pending = []
    for number in range(24):
        full = unique_fill((200 + number, 701), torch.float32, number)
        if streams:
            torch.cuda.set_stream(streams[number % 3])
        forth = number % 2 == 0
        first, second = (src, dst) if forth else (dst, src)
        x = given(torch.zeros_like(full), first, [Shard(0)], context.rank)
        values = given(full, first, [Shard(0)], context.rank)
        if streams:
            torch.cuda._sleep(5_000_000)
        x._local_tensor.copy_(values._local_tensor)
        pending.append((meshcast.reshard(x, second, [Shard(1)], async_op=True), full, second))
        del x, values
        if number % 6 == 5:
            rng.shuffle(pending)
            for handle, expected, mesh in pending:
                check(handle.wait(), expected, mesh, [Shard(1)], context.rank)
            pending.clear()
    if streams:
        torch.cuda.set_stream(torch.cuda.default_stream())


def an_asynchronous_call_does_not_block(context) -> None:
    """The call returns while its stream still makes the source, and wait() while the copy still runs."""
    use_a_gpu(context.rank)
    src, dst = mesh_on(GPU, [0], context.rank), mesh_on("cpu", [1, 2, 3, 4], context.rank)
    full = unique_fill((64, 1024), torch.float32, 3)
    x = given(full, src, [Replicate()], context.rank)
    meshcast.reshard(x, dst, [Shard(0)])
    if GPU == "cuda" and context.rank == 0:
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)
    handle = meshcast.reshard(x, dst, [Shard(0)], async_op=True)
    if GPU == "cuda" and context.rank == 0:
        assert not torch.cuda.current_stream().query(), "the call waited for its stream"
    check(handle.wait(), full, dst, [Shard(0)], context.rank)


def a_result_is_read_before_it_is_overwritten(context) -> None:
    use_a_gpu(context.rank)
    src, dst = mesh_on("cpu", A, context.rank), mesh_on(GPU, B, context.rank)
    specs = [meshcast.TensorSpec((300, 500), torch.float32, mesh, [Shard(0)]) for mesh in (src, dst)]
    call = resharder_between(*specs, reuse_output=True)
    sums = []
    for step in range(8):
        full = torch.full((300, 500), float(step))
        y = call.run(given(full, src, [Shard(0)], context.rank))
        if GPU == "cuda" and context.rank in B:
            torch.cuda._sleep(20_000_000)
        sums.append(y._local_tensor.double().mean())
    for step, found in enumerate(sums if context.rank in B else []):
        assert found.item() == step


def gradients_come_back(context) -> None:
    use_a_gpu(context.rank)
    full, weight = unique_fill((7, 5), torch.float32, 5), unique_fill((7, 5), torch.float32, 6)
    for kinds in ((GPU, "cpu"), ("cpu", GPU)):
        src, dst = mesh_on(kinds[0], A, context.rank), mesh_on(kinds[1], B, context.rank)
        for dtype in (None, torch.bfloat16):
            x = given(full, src, [Shard(0)], context.rank).detach().requires_grad_()
            y = meshcast.reshard(x, dst, [Shard(1)], dtype=dtype)
            losses = []
            if context.rank in B:
                factor = given(weight, dst, [Shard(1)], context.rank).to_local()
                losses = [(y.to_local().float() * factor).sum()]
            meshcast.backward(*losses)
            if context.rank in A:
                expected = weight if dtype is None else weight.to(dtype).float()
                check(x.grad, expected, src, [Shard(0)], context.rank)


def a_state_dict_goes_to_the_host_and_back(context) -> None:
    use_a_gpu(context.rank)
    src, dst = mesh_on(GPU, A, context.rank), mesh_on("cpu", B, context.rank)
    full = unique_fill((11, 6), torch.float32, 8)
    for number, (first, second) in enumerate(((src, dst), (dst, src))):
        inside = context.rank in first.mesh
        state = {"w": given(full, first, [Shard(0)], context.rank)} if inside else None
        moved = meshcast.reshard_state_dict(state, {"w": (second, [Shard(1)])}, digest=bool(number))
        check(moved["w"], full, second, [Shard(1)], context.rank)


def a_capture_is_refused(context) -> None:
    if GPU == "cpu":
        return
    use_a_gpu(context.rank)
    src, dst = mesh_on(GPU, [0, 1, 2, 3, 4], context.rank), mesh_on("cpu", [0, 1, 2, 3, 4], context.rank)
    x = given(unique_fill((8, 4), torch.float32, 9), src, [Shard(0)], context.rank)
    meshcast.reshard(x, dst, [Replicate()])
    torch.cuda.synchronize()
    graph, found = torch.cuda.CUDAGraph(), ""
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda").add_(1)
        try:
            meshcast.reshard(x, dst, [Replicate()], async_op=True)
        except meshcast.LayoutError as error:
            found = str(error)
    assert "captured into a CUDA graph" in found


CASES = [
    random_layouts,
    streams_are_followed,
    an_asynchronous_call_does_not_block,
    a_result_is_read_before_it_is_overwritten,
    gradients_come_back,
    a_state_dict_goes_to_the_host_and_back,
    a_capture_is_refused,
]
