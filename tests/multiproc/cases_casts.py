"""Calls between GPUs that change the dtype, over fake GPUs (fake_rounds.py): what is left to the transfer
and what to torch, on which side the transfer casts, and that the numbers are those of the CPU's path. Five
processes."""

from __future__ import annotations

import itertools

import meshcast
import torch
from meshcast.errors import PlanMismatchError
from meshcast.resharding.compile_op import new_token, register_call
from multiproc.fake_gpu import held, mesh_on
from multiproc.fake_rounds import Dispatched, Start, fake_rounds
from multiproc.floats import BF16, E4M3, E5M2, F16, F32, FORMATS, numbers, same
from multiproc.meshes import resharder_between
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

GROUP_TIMEOUT = 60.0
CASE_LIMIT = 100.0

SOURCE, DESTINATION = [0, 1, 2], [4, 2, 3, 1]  # ranks 1 and 2 are in both: local copies too


def on_both(context, full, placements, call, ranks=SOURCE):
    """What call(x, mesh of the destination) gives between meshes on GPUs and between meshes on CPUs."""
    results = []
    for device in ("cuda", "cpu"):
        x = held(full, mesh_on(device, ranks), placements, context.rank)
        results.append(call(x, mesh_on(device, DESTINATION)))
    return results


def wire_of(source: torch.dtype, destination: torch.dtype) -> torch.dtype:
    return source if destination.itemsize > source.itemsize else destination


def touches(start: Start, x: DTensor, y: DTensor) -> bool:
    """Whether the transfer read and wrote the tensors of the caller, and no others."""
    return all(
        given is None or given.data_ptr() == tensor._local_tensor.data_ptr()
        for given, tensor in ((start.sources[0], x), (start.destinations[0], y))
    )


def every_pair_of_floats_is_cast_within_the_transfer(context) -> None:
    for number, (source, destination) in enumerate(itertools.permutations(FORMATS, 2)):
        full = numbers((11, 7), source, number)
        with fake_rounds() as gpu:
            x = held(full, mesh_on("cuda", SOURCE), [Shard(0)], context.rank)
            y = meshcast.reshard(x, mesh_on("cuda", DESTINATION), [Shard(1)], dtype=destination)
            if context.rank == 0 or context.rank in DESTINATION:
                (start,) = gpu.starts
                assert start.types == [(source, wire_of(source, destination), destination)]
                assert touches(start, x, y)
        here = held(full, mesh_on("cpu", SOURCE), [Shard(0)], context.rank)
        expected = meshcast.reshard(here, mesh_on("cpu", DESTINATION), [Shard(1)], dtype=destination)
        assert same(y._local_tensor, expected._local_tensor), (source, destination)
        whole = held(full.to(destination), mesh_on("cpu", DESTINATION), [Shard(1)], context.rank)
        if context.rank in DESTINATION:
            assert same(y._local_tensor, whole._local_tensor), (source, destination)


def other_types_are_left_to_torch(context) -> None:
    pairs = [
        (torch.float64, F32),
        (F32, torch.float64),
        (torch.int32, F32),
        (BF16, torch.int64),
        (F32, torch.complex64),
        (torch.uint8, torch.int8),
    ]
    for source, destination in pairs:
        full = (torch.arange(60) % 100).reshape(12, 5).to(source)
        with fake_rounds() as gpu:

            def call(x, mesh, destination=destination):
                return meshcast.reshard(x, mesh, [Shard(1)], dtype=destination)

            y, expected = on_both(context, full, [Shard(0)], call)
            assert same(y._local_tensor, expected._local_tensor)
            assert all(start.types == [] for start in gpu.starts)
            for start in gpu.starts:
                for given in (*start.sources, *start.destinations):
                    assert given is None or given.dtype == wire_of(source, destination)


def sums_are_cast_where_they_arrive(context) -> None:
    """In the type of the source, as on the CPU; a float16 that becomes bfloat16 there is torch's."""
    full = torch.arange(-40, 37).reshape(11, 7)
    for source, destination in itertools.permutations((F32, BF16, F16), 2):
        for op in ("sum", "avg", "max"):
            with fake_rounds() as gpu:

                def call(x, mesh, destination=destination):
                    x._local_tensor.mul_(context.rank + 1)
                    return meshcast.reshard(x, mesh, [Shard(1)], dtype=destination)

                y, expected = on_both(context, full.to(source), [Partial(op)], call)
                assert same(y._local_tensor, expected._local_tensor), (source, destination, op)
                types = [] if (source, destination) == (F16, BF16) else [(source, source, destination)]
                assert all(start.types == types for start in gpu.starts)
                assert bool(gpu.starts) == (context.rank in {*SOURCE, *DESTINATION})


def a_batch_has_types_of_its_own_for_each_tensor(context) -> None:
    sources = (F32, BF16, torch.float64, BF16, E5M2)
    fulls = [numbers((4 + i, 6), dtype, i) for i, dtype in enumerate(sources)]
    results = {}
    with fake_rounds() as gpu:
        for device in ("cuda", "cpu"):
            src, dst = mesh_on(device, SOURCE), mesh_on(device, DESTINATION)
            xs = [held(full, src, [Shard(0)], context.rank) for full in fulls]
            results[device] = meshcast.reshard_many(xs, dst, [[Shard(1)]] * 5, dtype=BF16)
        for start in gpu.starts:
            assert start.types == [
                (F32, BF16, BF16),
                (BF16, BF16, BF16),
                (BF16, BF16, BF16),
                (BF16, BF16, BF16),
                (E5M2, E5M2, BF16),
            ]
            assert start.descriptor.endswith(
                "on cuda; casts float32 to bfloat16 as bfloat16: tensors 0; "
                "casts float8_e5m2 to bfloat16 as float8_e5m2: tensors 4"
            ), start.descriptor
        assert bool(gpu.starts)
    for y, expected in zip(results["cuda"], results["cpu"], strict=True):
        assert same(y._local_tensor, expected._local_tensor)


def state_dicts_are_cast_on_the_way(context) -> None:
    """Also under a digest, which then holds what arrived against what torch makes of the source."""
    fulls = {"a": numbers((9, 5), F32, 1), "b": numbers((7, 4), BF16, 2), "n": torch.arange(12)}
    versions = itertools.count(1)
    for digest in (False, True):
        moved = {}
        with fake_rounds() as gpu:
            for device in ("cuda", "cpu"):
                src, dst = mesh_on(device, SOURCE), mesh_on(device, DESTINATION)
                state = {
                    name: held(full, src, [Shard(0)], context.rank)
                    for name, full in fulls.items()
                    if context.rank in SOURCE
                }
                where = {name: (dst, [Replicate()]) for name in fulls}
                for _ in range(2):
                    version = next(versions)
                    moved[device] = meshcast.reshard_state_dict(
                        state, where, version=version if state else None, digest=digest, dtype=F16
                    )
            types = [(F32, F16, F16), (BF16, F16, F16), (torch.int64,) * 3]
            casting = [start for start in gpu.starts if start.types]
            assert all(start.types == types for start in casting)
            assert len(casting) == 2
        for name in fulls:
            assert same(moved["cuda"][name]._local_tensor, moved["cpu"][name]._local_tensor), name
            if context.rank in DESTINATION:
                expected = fulls[name].to(F16) if fulls[name].is_floating_point() else fulls[name]
                assert same(moved["cuda"][name]._local_tensor, expected)


def gradients_come_back_in_the_type_of_the_source(context) -> None:
    """Cast within the backward transfer, but where they are scaled after it."""
    full = torch.arange(-30, 25).reshape(11, 5)
    for source, destination in ((F32, BF16), (BF16, F32), (F16, BF16), (BF16, F16)):
        for placement in (Shard(0), Partial("sum"), Partial("avg")):
            grads = []
            with fake_rounds() as gpu:
                for device in ("cuda", "cpu"):
                    src, dst = mesh_on(device, SOURCE), mesh_on(device, DESTINATION)
                    x = held(full.to(source), src, [placement], context.rank).requires_grad_()
                    y = meshcast.reshard(x, dst, [Shard(1)], dtype=destination)
                    inside = context.rank in DESTINATION
                    meshcast.backward((y.float() * 1.2345).pow(2).sum() if inside else None)
                    if context.rank in SOURCE:
                        assert x.grad.dtype == source
                        grads.append(x.grad._local_tensor)
                wire = min(destination, source, key=lambda dtype: dtype.itemsize)
                types = [(destination, wire, source)]
                if placement == Partial("avg") or (destination, source) == (F16, BF16):
                    types = []
                found = [start.types for start in gpu.starts if start.reverse]
                assert found == [types] * len(found), (source, destination, placement, found)
                assert bool(found) == (context.rank in {*SOURCE, *DESTINATION})
            assert len(grads) != 2 or same(*grads)


def a_cached_resharder_makes_no_tensor(context) -> None:
    src, dst = mesh_on("cuda", SOURCE), mesh_on("cuda", DESTINATION)
    for source, destination in ((F32, BF16), (E4M3, F16), (F16, BF16)):
        specs = [
            meshcast.TensorSpec((11, 8), dtype, mesh, [Shard(dim)])
            for dtype, mesh, dim in ((source, src, 0), (destination, dst, 1))
        ]
        with fake_rounds() as gpu, torch.no_grad():
            call = resharder_between(*specs, reuse_output=True)
            for step in range(4):
                full = numbers((11, 8), source, step)
                x = held(full, src, [Shard(0)], context.rank)
                with Dispatched() as seen:
                    y = call.run(x)
                assert step == 0 or seen.names == [], seen.names
                whole = held(full.to(destination), dst, [Shard(1)], context.rank)
                if context.rank in DESTINATION:
                    assert same(y._local_tensor, whole._local_tensor)
            assert all(touches(start, x, y) for start in gpu.starts[-1:])
            back = call.reverse()
            back.run(y)
            for start in gpu.starts[-1:]:
                left_to_torch = (destination, source) == (F16, BF16)
                expected = [(destination, wire_of(destination, source), source)]
                assert start.types == ([] if left_to_torch else expected)


def results_over_their_own_source(context) -> None:
    """A narrower result in the memory of its source: that is copied first."""
    src = mesh_on("cuda", SOURCE)
    full = numbers((12, 6), F32, 4)
    with fake_rounds() as gpu:
        x = held(full, src, [Shard(0)], context.rank)
        expected = held(full.to(BF16), src, [Shard(0)], context.rank)._local_tensor
        if context.rank in SOURCE:
            memory = x._local_tensor.view(BF16).flatten()[:24].view(4, 6)
            out = DTensor(
                memory, held(full.to(BF16), src, [Shard(0)], context.rank)._spec, requires_grad=False
            )
            meshcast.reshard_(out, x)
            assert same(out._local_tensor, expected)
            (start,) = gpu.starts
            assert start.types == [(F32, BF16, BF16)]
            assert start.sources[0].data_ptr() != start.destinations[0].data_ptr()


def the_operator_casts_within_the_transfer(context) -> None:
    """torch.ops.meshcast.reshard, as compiled functions call it, there and back."""
    ranks = list(range(context.world))
    full = torch.arange(1, 36).reshape(7, 5).float()
    with fake_rounds() as gpu:
        src, dst = mesh_on("cuda", ranks), mesh_on("cuda", ranks[::-1])
        specs = [
            meshcast.TensorSpec((7, 5), dtype, mesh, [Shard(dim)], True)
            for dtype, mesh, dim in ((F32, src, 0), (BF16, dst, 1))
        ]
        compiled = resharder_between(*specs)._compiled
        x = held(full, src, [Shard(0)], context.rank)._local_tensor.requires_grad_()
        y = torch.ops.meshcast.reshard(x, new_token(), register_call(compiled, 30.0))
        assert same(y.detach(), held(full.to(BF16), dst, [Shard(1)], context.rank)._local_tensor)
        (grad,) = torch.autograd.grad((y.float() * 3).sum(), x)
        assert grad.dtype == F32 and torch.equal(grad, torch.full_like(x, 3))
        assert gpu.last().types == [(F32, BF16, BF16)]
        assert gpu.last(reverse=True).types == [(BF16, BF16, F32)]
        assert gpu.last().sources[0] is None or gpu.last().sources[0].data_ptr() == x.data_ptr()


def ranks_that_cast_otherwise_are_found(context) -> None:
    """Before a byte moves, on all of them, also where what travels is the same; the group lives on."""
    ranks = list(range(context.world))
    full = numbers((9, 4), BF16, 6)
    with fake_rounds() as gpu:
        mesh = mesh_on("cuda", ranks)
        x = held(full, mesh, [Shard(0)], context.rank)
        dtype = F32 if context.rank == 3 else None
        try:
            meshcast.reshard(x, mesh, [Replicate()], dtype=dtype)
        except PlanMismatchError as error:
            assert "casts bfloat16 to float32 as bfloat16" in str(error), error
        else:
            raise AssertionError("ranks that cast otherwise agreed")
        assert not gpu.starts
        y = meshcast.reshard(x, mesh, [Replicate()], dtype=F32)
        assert same(y._local_tensor, full.float())


CASES = [
    every_pair_of_floats_is_cast_within_the_transfer,
    other_types_are_left_to_torch,
    sums_are_cast_where_they_arrive,
    a_batch_has_types_of_its_own_for_each_tensor,
    state_dicts_are_cast_on_the_way,
    gradients_come_back_in_the_type_of_the_source,
    a_cached_resharder_makes_no_tensor,
    results_over_their_own_source,
    the_operator_casts_within_the_transfer,
    ranks_that_cast_otherwise_are_found,
]
