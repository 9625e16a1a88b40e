"""reshard to another dtype between GPUs against torch's own conversion on the host. DEVICE=cpu runs the same
cases where there is no GPU, which checks the cases."""

from __future__ import annotations

import itertools
import math

import meshcast
import torch
from multiproc.devices import GPU, given, mesh_on, use_a_gpu
from multiproc.floats import BF16, E4M3, E5M2, F16, F32, FORMATS, numbers, same
from multiproc.meshes import resharder_between
from multiproc.oracle import coordinates, cut
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

GROUP_TIMEOUT = 120.0


def both_meshes(context) -> tuple[DeviceMesh, DeviceMesh]:
    """Those that have most ranks in common: what is copied on a rank is cast as well."""
    ranks = list(range(context.world))
    return mesh_on(GPU, ranks, context.rank), mesh_on(
        GPU, ranks[::-1][: max(1, len(ranks) - 1)], context.rank
    )


def check(
    result: DTensor, full: torch.Tensor, mesh: DeviceMesh, placements: list[Placement], rank: int
) -> None:
    place = coordinates(mesh.mesh).get(rank)
    if place is not None:
        local = result.to_local()
        assert local.device.type == mesh.device_type
        found, expected = local.cpu(), cut(full, mesh.mesh.shape, place, placements)
        assert same(found, expected), (full.dtype, found, expected)


def every_pair_of_floats(context) -> None:
    """Rows to columns, strided sources, whole tensors: packed, unpacked, forwarded and copied locally."""
    use_a_gpu(context.rank)
    src, dst = both_meshes(context)
    ways = [([Shard(0)], [Shard(1)]), ([Shard(1)], [Replicate()]), ([Replicate()], [Shard(0)])]
    for number, (source, destination) in enumerate(itertools.permutations(FORMATS, 2)):
        forth, back = ways[number % 3]
        full = numbers((53, 38 + number), source, number)
        x = given(full, src, forth, context.rank)
        if number % 2:
            spread = x._local_tensor.new_zeros((*x._local_tensor.shape, 2))
            spread[..., 1] = x._local_tensor
            x = DTensor(spread[..., 1], x._spec, requires_grad=False)
        check(
            meshcast.reshard(x, dst, back, dtype=destination), full.to(destination), dst, back, context.rank
        )


def every_number_of_a_narrow_format(context) -> None:
    use_a_gpu(context.rank)
    src, dst = both_meshes(context)
    for source, bits in ((BF16, torch.int16), (F16, torch.int16), (E4M3, torch.uint8), (E5M2, torch.uint8)):
        size = 1 << (8 * bits.itemsize)
        full = torch.arange(size).to(bits).view(source).reshape(16, -1)
        for destination in FORMATS:
            x = given(full, src, [Shard(0)], context.rank)
            y = meshcast.reshard(x, dst, [Shard(1)], dtype=destination)
            check(y, full.to(destination), dst, [Shard(1)], context.rank)


def other_types(context) -> None:
    use_a_gpu(context.rank)
    src, dst = both_meshes(context)
    for source, destination in ((torch.float64, BF16), (F32, torch.float64), (torch.int32, F16)):
        full = (torch.arange(21 * 8).reshape(21, 8) * 37 % 1000).to(source)
        x = given(full, src, [Shard(0)], context.rank)
        y = meshcast.reshard(x, dst, [Shard(1)], dtype=destination)
        check(y, full.to(destination), dst, [Shard(1)], context.rank)


def sums_are_cast_where_they_arrive(context) -> None:
    """Added up in the type of the source; small numbers, which every order adds up alike."""
    use_a_gpu(context.rank)
    src, dst = both_meshes(context)
    full = (torch.arange(19 * 6) % 17 - 8).reshape(19, 6)
    summed = full * sum(range(1, context.world + 1))
    for source, destination in itertools.permutations((F32, BF16, F16), 2):
        scale = {F32: 1 + 2**-14, F16: 1 + 2**-2, BF16: 1.0}[source]  # more digits than the narrower type has
        mine = (full * (context.rank + 1) * scale).to(source).to(GPU)
        x = DTensor.from_local(mine, src, [Partial("sum")], run_check=False)
        y = meshcast.reshard(x, dst, [Shard(0)], dtype=destination)
        check(y, (summed * scale).to(source).to(destination), dst, [Shard(0)], context.rank)


def a_batch_of_unlike_types(context) -> None:
    use_a_gpu(context.rank)
    src, dst = both_meshes(context)
    sources = (F32, BF16, torch.float64, F16, E4M3, E5M2)
    fulls = [numbers((17 + i, 10), dtype, i) for i, dtype in enumerate(sources)]
    xs = [given(full, src, [Shard(0)], context.rank) for full in fulls]
    for asynchronous in (False, True):
        found = meshcast.reshard_many(xs, dst, [[Shard(1)]] * len(xs), dtype=BF16, async_op=asynchronous)
        for y, full in zip(found.wait() if asynchronous else found, fulls, strict=True):
            check(y, full.to(BF16), dst, [Shard(1)], context.rank)


def state_dicts(context) -> None:
    """With a digest of what arrives against torch's conversion at the source."""
    use_a_gpu(context.rank)
    src, dst = both_meshes(context)
    fulls = {"a": numbers((33, 9), F32, 1), "b": numbers((8, 20), BF16, 2), "n": torch.arange(50)}
    state = {name: given(full, src, [Shard(0)], context.rank) for name, full in fulls.items()}
    where = {name: (dst, [Replicate()]) for name in fulls}
    for version, digest in ((1, False), (2, True)):
        moved = meshcast.reshard_state_dict(state, where, version=version, digest=digest, dtype=F16)
        for name, full in fulls.items():
            expected = full.to(F16) if full.is_floating_point() else full
            check(moved[name], expected, dst, [Replicate()], context.rank)


def gradients_have_the_type_of_the_source(context) -> None:
    use_a_gpu(context.rank)
    src, dst = both_meshes(context)
    full = (torch.arange(15 * 4) % 23 - 11).reshape(15, 4)
    for source, destination in ((F32, BF16), (BF16, F32), (F16, F32)):
        x = given(full.to(source), src, [Shard(0)], context.rank).requires_grad_()
        y = meshcast.reshard(x, dst, [Shard(1)], dtype=destination)
        inside = context.rank in dst.mesh
        meshcast.backward((y.to_local() * 3).float().pow(2).sum() if inside else None)
        check(x.grad, (18 * full).to(source), src, [Shard(0)], context.rank)


def a_cached_resharder_takes_no_memory(context) -> None:
    """Other values each time, in tensors of which a copy would show."""
    use_a_gpu(context.rank)
    src, dst = both_meshes(context)
    shape = (1024, 512)
    for source, destination in ((F32, BF16), (E5M2, F32)):
        specs = [
            meshcast.TensorSpec(shape, dtype, mesh, [Shard(dim)])
            for dtype, mesh, dim in ((source, src, 0), (destination, dst, 1))
        ]
        resharder = resharder_between(*specs, reuse_output=True)
        full = numbers(shape, source, 8)
        x = given(full, src, [Shard(0)], context.rank)
        with torch.no_grad():
            for number in range(20):
                if GPU == "cuda" and number == 4:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                y = resharder.run(x)
            if GPU == "cuda":
                torch.cuda.synchronize()
                taken = torch.cuda.max_memory_allocated() - before
                least = math.prod(shape) * min(source.itemsize, destination.itemsize) // context.world
                assert taken < least / 2, f"{taken} bytes were allocated meanwhile"
            check(y, full.to(destination), dst, [Shard(1)], context.rank)


CASES = [
    every_pair_of_floats,
    every_number_of_a_narrow_format,
    other_types,
    sums_are_cast_where_they_arrive,
    a_batch_of_unlike_types,
    state_dicts,
    gradients_have_the_type_of_the_source,
    a_cached_resharder_takes_no_memory,
]
