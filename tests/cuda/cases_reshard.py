"""reshard of tensors on GPUs against the oracle on the host. One rank for each GPU; DEVICE=cpu runs the same
cases where there is none, which checks the cases."""

from __future__ import annotations

import os
import tempfile
from unittest import mock

import meshcast
import torch
import torch.distributed as dist
from meshcast.base import settings
from meshcast.groups.parent import parent_group
from meshcast.topology import forget_figures
from multiproc.devices import GPU, check, given, use_a_gpu
from multiproc.meshes import resharder_between
from multiproc.oracle import coordinates, cut, unique_fill
from multiproc.random_layouts import Draw, draw
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

GROUP_TIMEOUT = 120.0
SEEDS = range(4000, 4040)


def mesh_of(ranks: object) -> DeviceMesh:
    return DeviceMesh(GPU, torch.tensor(ranks), _init_backend=False, _rank=dist.get_rank())


def positive(placements: list, ndim: int) -> list:
    return [Shard(p.dim % ndim) if type(p) is Shard else p for p in placements]


def problem_of(seed: int, world: int) -> tuple[Draw, torch.Tensor, list, list]:
    problem = draw(seed, world)
    ndim = len(problem.shape)
    full = unique_fill(problem.shape, problem.dtype, problem.seed)
    return problem, full, positive(problem.src_placements, ndim), positive(problem.dst_placements, ndim)


def random_layouts(context) -> None:
    use_a_gpu(context.rank)
    for seed in SEEDS:
        problem, full, src_placements, dst_placements = problem_of(seed, context.world)
        src, dst = mesh_of(problem.src_mesh), mesh_of(problem.dst_mesh)
        x = given(full, src, src_placements, context.rank)
        try:
            y = meshcast.reshard(x, dst, dst_placements, strategy=problem.strategy)
            check(y, full, dst, dst_placements, context.rank)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {problem}") from error


def several_in_flight_on_several_streams(context) -> None:
    """Sources are made on one stream, spoilt behind the wait, and freed at once."""
    use_a_gpu(context.rank)
    everybody = list(range(context.world))
    mesh = mesh_of(everybody)
    streams = [torch.cuda.Stream() for _ in range(3)] if GPU == "cuda" else []
    pending = []
    for number in range(24):
        full = unique_fill((29 + number, 17), torch.float32, number)
        if streams:
            torch.cuda.set_stream(streams[number % 3])
        x = given(full, mesh, [Shard(0)], context.rank)
        pending.append((meshcast.reshard(x, mesh, [Replicate()], async_op=True), full))
        del x
        if number % 4 == 3:
            for handle, expected in pending:
                check(handle.wait(), expected, mesh, [Replicate()], context.rank)
            pending.clear()
    if streams:
        torch.cuda.set_stream(torch.cuda.default_stream())


def gradients_come_back(context) -> None:
    use_a_gpu(context.rank)
    mesh = mesh_of(list(range(context.world)))
    full = unique_fill((13, 6), torch.float32, 5)
    x = given(full, mesh, [Shard(0)], context.rank).requires_grad_()
    y = meshcast.reshard(x, mesh, [Shard(1)])
    (local,) = torch.autograd.grad(y.to_local().pow(2).sum(), x, retain_graph=False)
    place = coordinates(mesh.mesh)[context.rank]
    expected = 2 * cut(full, mesh.mesh.shape, place, [Shard(0)])
    assert torch.equal(local.to_local().cpu(), expected)


def a_partial_source_is_reduced(context) -> None:
    use_a_gpu(context.rank)
    mesh = mesh_of(list(range(context.world)))
    full = unique_fill((11, 5), torch.int64, 7)
    mine = (full * (context.rank + 1)).to(GPU)
    x = DTensor.from_local(mine, mesh, [Partial("sum")], run_check=False)
    y = meshcast.reshard(x, mesh, [Replicate()])
    total = sum(range(1, context.world + 1))
    assert torch.equal(y.to_local().cpu(), full * total)


def a_capture_is_refused(context) -> None:
    if GPU == "cpu":
        return
    use_a_gpu(context.rank)
    mesh = mesh_of(list(range(context.world)))
    full = unique_fill((8, 4), torch.float32, 9)
    x = given(full, mesh, [Shard(0)], context.rank)
    resharder = resharder_between(x, meshcast.TensorSpec((8, 4), torch.float32, mesh, [Replicate()]))
    resharder.run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    found = ""
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda").add_(1)
        try:
            resharder.start(x)
        except meshcast.LayoutError as error:
            found = str(error)
    assert "captured into a CUDA graph" in found


def the_rates_between_gpus_are_measured(context) -> None:
    """All ranks get an equal topology, and a group that is made afterwards plans with what was kept."""
    use_a_gpu(context.rank)
    box = [tempfile.mkdtemp() if context.rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    with mock.patch.dict(os.environ, {settings.GPU_FIGURES.name: str(box[0])}):
        forget_figures()
        topology = meshcast.measure_topology(seconds=0.002, device=GPU)
        found: list = [None] * context.world
        dist.all_gather_object(found, topology.to_json())
        assert len(set(found)) == 1, found
        assert sorted(rank for host in topology.hosts for rank in host.ranks) == list(range(context.world))
        group = parent_group(None, "test").twin("measured").private(range(context.world))
        group.connect(GROUP_TIMEOUT)
        kept = GPU == "cuda" and context.world > 1 and settings.gpu_machine() is not None
        assert (group.figures is not None) is kept
        if group.figures is not None:
            assert 1e6 < group.figures.local_rate < 1e14
            assert 0 <= group.figures.round_ns < 1e8
        dist.barrier()
    forget_figures()


CASES = [
    the_rates_between_gpus_are_measured,
    random_layouts,
    several_in_flight_on_several_streams,
    gradients_come_back,
    a_partial_source_is_reduced,
    a_capture_is_refused,
]
