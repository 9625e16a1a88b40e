"""Slices of one mesh, by name and flattened, as source and destination: eight ranks in a mesh of 2 x 2 x 2,
one outside."""

from __future__ import annotations

import time

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast.errors import LayoutError, PlanMismatchError
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import coordinates, cut, unique_fill
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

GROUP_TIMEOUT = 30.0
WHOLE = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
OUTSIDE = 8
_made: dict = {}


FLAT = {
    "dp_cp": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "dp_tp": [[0, 1, 4, 5], [2, 3, 6, 7]],
}


def root() -> DeviceMesh:
    """Made by all ranks, since it makes process groups. torch slices and flattens no mesh on a rank outside,
    which has to make these groups nevertheless."""
    if "root" not in _made:
        mesh = _made["root"] = DeviceMesh("cpu", WHOLE, mesh_dim_names=("dp", "cp", "tp"))
        for name, slices in FLAT.items():
            if dist.get_rank() == OUTSIDE:
                for ranks in slices:
                    dist.new_group(ranks)
                _made[name] = None
            else:
                _made[name] = mesh[tuple(name.split("_"))]._flatten(name)
    return _made["root"]


def flat(name: str) -> DeviceMesh:
    root()
    return _made[name]


def filled(dtype=torch.float32, seed: int = 1, rows: int = 5) -> torch.Tensor:
    return unique_fill((rows, 3), dtype, seed)


def check(found: DTensor, full: torch.Tensor, placements, rank: int) -> None:
    mesh = found.device_mesh
    place = coordinates(mesh.mesh).get(rank)
    if place is not None:
        expected = cut(full, mesh.mesh.shape, place, placements)
        assert found.dtype == full.dtype
        assert torch.equal(found.to_local(), expected), (found.to_local(), expected)


def spec(full: torch.Tensor, ranks, placements) -> meshcast.TensorSpec:
    return meshcast.TensorSpec(full.shape, full.dtype, quiet_mesh(ranks), placements)


def a_flattened_source(context) -> None:
    """To a rank outside of the mesh, and to meshes that overlap with it in part. Every form of a spec says
    the same, whose ranks hold the same."""
    rank = context.rank
    for dtype, rows in ((torch.float32, 5), (torch.bfloat16, 3), (torch.float32, 1)):  # uneven, empty shares
        full = filled(dtype, rows=rows)
        for name, columns in FLAT.items():
            forms = [
                spec(full, columns, [Replicate(), Shard(0)]),
                spec(full, columns[::-1], [Replicate(), Shard(0)]),
                spec(full, torch.tensor(columns).T.tolist(), [Shard(0), Replicate()]),
            ]
            mesh = flat(name)
            for where in ([OUTSIDE], [7, OUTSIDE], [OUTSIDE, 5, 2]):
                for form in forms:
                    x = form if rank == OUTSIDE else sharded(full, mesh, [Shard(0)], rank)
                    placements = [Shard(0)]
                    check(meshcast.reshard(x, quiet_mesh(where), placements), full, placements, rank)


def a_mesh_inside_across_slices(context) -> None:
    """The destination lies inside of the mesh, on ranks of several slices: each of them holds a copy."""
    rank, full = context.rank, filled()
    if rank == OUTSIDE:
        return
    for where in ([1, 2, 4], [3, 4]):
        x = sharded(full, flat("dp_cp"), [Shard(0)], rank)
        check(meshcast.reshard(x, quiet_mesh(where), [Shard(1)]), full, [Shard(1)], rank)
        x = sharded(full, root()["tp"], [Shard(1)], rank)
        check(meshcast.reshard(x, quiet_mesh(where), [Shard(0)]), full, [Shard(0)], rank)


def a_flattened_destination(context) -> None:
    """From a rank outside, from meshes that overlap in part, and from the whole mesh."""
    rank = context.rank
    for dtype in (torch.float32, torch.bfloat16):
        full = filled(dtype)
        for holders in ([OUTSIDE], [OUTSIDE, 0, 5], [6, 3]):
            outside = quiet_mesh(FLAT["dp_cp"]), [Replicate(), Shard(0)]
            where = outside if rank == OUTSIDE else (flat("dp_cp"), [Shard(0)])
            if OUTSIDE in holders or rank != OUTSIDE:
                x = spec(full, holders, [Shard(0)])
                x = sharded(full, quiet_mesh(holders), [Shard(0)], rank) if rank in holders else x
                found = meshcast.reshard(x, *where)
                assert found.device_mesh == where[0]
                check(found, full, where[1], rank)
        if rank != OUTSIDE:
            x = sharded(full, root(), [Shard(0), Replicate(), Shard(1)], rank)
            check(meshcast.reshard(x, flat("dp_tp"), [Shard(1)]), full, [Shard(1)], rank)


def slices_on_both_sides(context) -> None:
    rank, full = context.rank, filled()
    if rank == OUTSIDE:
        return
    mesh = root()
    names = [flat("dp_cp"), flat("dp_tp"), mesh["tp"], mesh["dp"], mesh["cp", "tp"], mesh["dp", "cp"], mesh]
    for source in names:
        for destination in names:
            there = [Shard(0), *[Replicate()] * (source.ndim - 1)]
            back = [*[Replicate()] * (destination.ndim - 1), Shard(1)]
            x = sharded(full, source, there, rank)
            found = meshcast.reshard(x, destination, back)
            assert found.device_mesh == destination
            check(found, full, back, rank)


def a_call_inside_one_slice(context) -> None:
    """Slices that hold other values, as parameters that are cut by hand along "tp": each moves its own. So do
    slices that lie in one slice of what is flattened."""
    rank = context.rank
    if rank == OUTSIDE:
        return
    own = filled(seed=1 + rank % 2)
    for destination in (flat("dp_cp"), root()["dp"], root()["dp", "cp"], root()["cp"]):
        x = sharded(own, flat("dp_cp"), [Shard(0)], rank)
        placements = [Shard(1), *[Replicate()] * (destination.ndim - 1)]
        check(meshcast.reshard(x, destination, placements), own, placements, rank)


def a_gradient(context) -> None:
    """Copies get the whole gradient each, as those of Replicate do."""
    rank, full = context.rank, filled()
    weight = torch.arange(15.0).reshape(5, 3)
    x = spec(full, FLAT["dp_cp"], [Replicate(), Shard(0)])
    if rank == OUTSIDE:
        x = meshcast.TensorSpec(full.shape, full.dtype, x.mesh, x.placements, requires_grad=True)
    else:
        x = sharded(full, flat("dp_cp"), [Shard(0)], rank).requires_grad_(True)
    y = meshcast.reshard(x, quiet_mesh([3, OUTSIDE]), [Replicate()])
    local = y.to_local()
    loss = (local * weight).sum() if local.numel() else local.sum()
    meshcast.backward(loss)
    if rank != OUTSIDE:
        assert x.grad.device_mesh == flat("dp_cp")
        check(x.grad, weight, [Shard(0)], rank)


def partial_values(context) -> None:
    """Reduced inside a slice: by the transfer, and, where an average of sums is asked for, before it."""
    rank = context.rank
    if rank == OUTSIDE:
        return
    mesh, at = root(), torch.tensor(WHOLE).eq(rank).nonzero()[0]
    x = DTensor.from_local(
        torch.full((2, 2), float(at[0] * 2 + at[1])), flat("dp_cp"), [Partial()], run_check=False
    )
    y = meshcast.reshard(x, quiet_mesh([1, 6]), [Shard(0)])
    assert rank not in (1, 6) or torch.equal(y.to_local(), torch.full((1, 2), 6.0))
    x = DTensor.from_local(
        torch.full((2, 2), float(at[0] * 2 + at[1])),
        mesh["dp", "cp"],
        [Partial("avg"), Partial("sum")],
        run_check=False,
    )
    y = meshcast.reshard(x, quiet_mesh([1, 6]), [Shard(0)])
    assert rank not in (1, 6) or torch.equal(y.to_local(), torch.full((1, 2), 3.0))


def a_refusal(context) -> None:
    """One rank's wrong argument is known at once to all slices."""
    rank, full = context.rank, filled()
    x = spec(full, FLAT["dp_cp"], [Replicate(), Shard(0)])
    x = x if rank == OUTSIDE else sharded(full, flat("dp_cp"), [Shard(0)], rank)
    begin = time.monotonic()
    with pytest.raises((LayoutError, PlanMismatchError)):
        meshcast.reshard(x, quiet_mesh([2, OUTSIDE]), [Shard(5 if rank == 1 else 0)])
    with pytest.raises((LayoutError, PlanMismatchError)):
        meshcast.reshard(x, quiet_mesh([2, OUTSIDE]), ["none" if rank == 4 else Shard(0)])
    elapsed = time.monotonic() - begin
    assert elapsed < GROUP_TIMEOUT / 2, elapsed
    check(meshcast.reshard(x, quiet_mesh([2, OUTSIDE]), [Shard(0)]), full, [Shard(0)], rank)


def with_digests(context) -> None:
    """All slices of a mesh are in the call, its ranks of no slice of the other mesh too, and all of them see
    a change in flight; what lies inside of one slice stays a call of that one."""
    rank, full = context.rank, filled()
    source, there = spec(full, FLAT["dp_cp"], [Replicate(), Shard(0)]), quiet_mesh([OUTSIDE, 5, 2])
    x = source if rank == OUTSIDE else sharded(full, flat("dp_cp"), [Shard(0)], rank)
    for async_op in (False, True):
        found = meshcast.reshard(x, there, [Shard(0)], digest=True, async_op=async_op)
        check(found.wait() if async_op else found, full, [Shard(0)], rank)
    outside = quiet_mesh(FLAT["dp_tp"]), [Replicate(), Shard(0)]
    y = (
        sharded(full, quiet_mesh([OUTSIDE]), [Shard(0)], rank)
        if rank == OUTSIDE
        else spec(full, [OUTSIDE], [Shard(0)])
    )
    found = meshcast.reshard(y, *(outside if rank == OUTSIDE else (flat("dp_tp"), [Shard(0)])), digest=True)
    check(found, full, [Replicate(), Shard(0)] if rank == OUTSIDE else [Shard(0)], rank)

    handle = meshcast.reshard(x, there, [Shard(0)], digest=True, async_op=True, copy=True)
    if rank != OUTSIDE:
        x.to_local().data.add_(1)  # the copy is what travels
    check(handle.wait(), full, [Shard(0)], rank)

    if rank != OUTSIDE:
        own = filled(seed=1 + rank % 2)  # slices with other values
        x = sharded(own, flat("dp_cp"), [Shard(0)], rank)
        check(meshcast.reshard(x, root()["dp"], [Shard(1)], digest=True), own, [Shard(1)], rank)
    dist.barrier()  # ranks that differ in what they call meet again


def as_a_state_dict(context) -> None:
    """The same meshes, by name."""
    rank, full = context.rank, filled(torch.bfloat16)
    names = [] if rank == OUTSIDE else [flat("dp_cp"), root()["tp"], root()["cp", "tp"], flat("dp_tp")]
    state = {
        str(i): sharded(full, mesh, [Shard(0), *[Replicate()] * (mesh.ndim - 1)], rank)
        for i, mesh in enumerate(names)
    }
    for turn in range(5):
        if turn == 4:
            where = dict.fromkeys(map(str, range(4)), (quiet_mesh([OUTSIDE, 5, 2]), [Shard(0)]))
        elif rank == OUTSIDE:
            where = {}
        else:
            each = [*names[turn:], *names[:turn]]
            where = {
                str(i): (mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(1)]) for i, mesh in enumerate(each)
            }
        found = meshcast.reshard_state_dict(state or None, where, digest=turn % 2 == 0)
        for name, (_, placements) in where.items():
            check(found[name], full, placements, rank)


CASES = [
    a_flattened_source,
    a_mesh_inside_across_slices,
    a_flattened_destination,
    slices_on_both_sides,
    a_call_inside_one_slice,
    a_gradient,
    partial_values,
    a_refusal,
    with_digests,
    as_a_state_dict,
]
