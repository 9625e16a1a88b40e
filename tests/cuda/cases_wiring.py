"""What else moves tensors between GPUs: plain tensors, state dicts, compiled functions. One rank for each."""

from __future__ import annotations

import meshcast
import torch
from multiproc.devices import GPU, check, given, mesh_on, use_a_gpu
from multiproc.oracle import coordinates, cut, unique_fill
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 120.0


def plain_tensors(context) -> None:
    """Given, allocated and in place; a tensor elsewhere is refused."""
    use_a_gpu(context.rank)
    ranks = list(range(context.world))
    rows, columns = meshcast.Layout(ranks, [Shard(0)]), meshcast.Layout(ranks, [Shard(1)])
    full = unique_fill((9, 14), torch.float32, 1)
    mine = cut(full, (context.world,), (context.rank,), [Shard(0)]).to(GPU)
    expected = cut(full, (context.world,), (context.rank,), [Shard(1)])
    options = {"shape": (9, 14), "dtype": torch.float32, "device": GPU}
    for out in (None, torch.zeros_like(expected, device=GPU)):
        found = meshcast.reshard_local(mine, rows, out, columns, **options)
        assert found.device.type == GPU and (out is None or found is out)
        assert torch.equal(found.cpu(), expected)
    handle = meshcast.reshard_local(mine, rows, None, columns, async_op=True, **options)
    assert torch.equal(handle.wait().cpu(), expected)
    if GPU == "cuda":
        try:
            meshcast.reshard_local(mine.cpu(), rows, None, columns, **options)
        except meshcast.LayoutError as error:
            assert "on cuda, found" in str(error)
        else:
            raise AssertionError("a tensor on the CPU was taken for one on a GPU")


def state_dicts(context) -> None:
    """With versions and digests, in batches, into given tensors, cast on the way."""
    use_a_gpu(context.rank)
    everybody = list(range(context.world))
    mesh, other = mesh_on(GPU, everybody, context.rank), mesh_on(GPU, everybody[::-1], context.rank)
    fulls = {name: unique_fill((6 + i, 5), torch.float32, i) for i, name in enumerate("abc")}
    where = {name: (other, [Shard(1)]) for name in fulls}
    for version in (1, 2):
        state = {name: given(full, mesh, [Shard(0)], context.rank) for name, full in fulls.items()}
        out = {"a": given(torch.zeros(6, 5), other, [Shard(1)], context.rank)} if version == 2 else None
        moved = meshcast.reshard_state_dict(
            state, where, out, version=version, digest=True, max_bytes_in_flight=200 * version
        )
        for name, full in fulls.items():
            check(moved[name], full, other, [Shard(1)], context.rank)
    moved = meshcast.reshard_state_dict(state, where, dtype=torch.bfloat16)
    check(moved["c"], fulls["c"].to(torch.bfloat16), other, [Shard(1)], context.rank)


def compiled_functions(context) -> None:
    """With a gradient, in one graph, also between the host and GPUs."""
    use_a_gpu(context.rank)
    mesh, host = (DeviceMesh(device, list(range(context.world))) for device in (GPU, "cpu"))
    full = unique_fill((8, 6), torch.float32, 4)
    place = coordinates(mesh.mesh)[context.rank]
    for src, dst in ((mesh, mesh), (mesh, host), (host, mesh)):

        @torch.compile(fullgraph=True, backend="aot_eager")
        def doubled_columns(x, dst=dst):
            return meshcast.reshard(x * 2, dst, [Shard(1)]) + 1

        for _ in range(3):
            x = given(full, src, [Shard(0)], context.rank).requires_grad_()
            y = doubled_columns(x)
            check(y.detach(), 2 * full + 1, dst, [Shard(1)], context.rank)
            y.to_local().pow(2).sum().backward()
            expected = cut(4 * (2 * full + 1), mesh.mesh.shape, place, [Shard(0)])
            assert torch.equal(x.grad.to_local().cpu(), expected)


def compiled_without_gradient(context) -> None:
    use_a_gpu(context.rank)
    mesh = DeviceMesh(GPU, list(range(context.world)))
    full = unique_fill((10, 3), torch.float32, 6)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def whole(x):
        return meshcast.reshard(x, mesh, [Replicate()], dtype=torch.float64)

    with torch.no_grad():
        y = whole(given(full, mesh, [Shard(0)], context.rank))
        check(y, full.double(), mesh, [Replicate()], context.rank)


CASES = [plain_tensors, state_dicts, compiled_functions, compiled_without_gradient]
