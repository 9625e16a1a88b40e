"""reshard_many, reshard_, Resharder and prepare, in five processes."""

from __future__ import annotations

import random
import warnings

import meshcast
import torch
import torch.distributed as dist
from meshcast.groups.parent import parent_group
from multiproc.meshes import quiet_mesh, resharder_between, sharded
from multiproc.oracle import coordinates, cut, unique_fill
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

GROUP_TIMEOUT = 30.0
A, B = [0, 1, 2], [2, 3, 4]  # source and destination: rank 2 is in both


def check(y: DTensor, full: torch.Tensor, rank: int) -> None:
    place = coordinates(y.device_mesh.mesh).get(rank)
    if place is None:
        assert y.to_local().numel() == 0
        assert y.ndim == full.ndim
    else:
        expected = cut(full, y.device_mesh.mesh.shape, place, y.placements)
        assert y.to_local().shape == expected.shape
        assert torch.equal(y.to_local(), expected)


def raises(kind: type[Exception], text: str, function) -> None:
    try:
        function()
    except kind as error:
        assert text in str(error), f"expected {text!r} in: {error}"
    else:
        raise AssertionError(f"no {kind.__name__}")


def batch(rank: int, seed: int):
    """Eleven tensors of different shapes (empty ones too), dtypes, source meshes and layouts."""
    rng = random.Random(seed)
    fulls, xs, placements = [], [], []
    for index in range(11):
        shape = [rng.randint(0 if index == 3 else 1, 9) for _ in range(rng.randint(1, 3))]
        dtype = rng.choice([torch.float32, torch.int64, torch.bfloat16, torch.bool])
        mesh = quiet_mesh(rng.choice([A, [0, 4], [1], [[0, 1], [2, 3]]]))
        where = [rng.choice([Replicate(), Shard(rng.randrange(len(shape)))]) for _ in range(mesh.ndim)]
        full = unique_fill(shape, dtype, seed + index)
        fulls.append(full)
        if index % 2 and rank not in coordinates(mesh.mesh):
            xs.append(meshcast.TensorSpec(shape, dtype, mesh, where))
        else:
            xs.append(sharded(full, mesh, where, rank, strided=bool(index % 3)))
        placements.append([rng.choice([Replicate(), Shard(rng.randrange(len(shape)))])])
    return fulls, xs, placements


def many(context) -> None:
    for seed in (1, 2, 3):
        fulls, xs, placements = batch(context.rank, seed)
        ys = meshcast.reshard_many(xs, quiet_mesh(B), placements)
        assert [tuple(y.placements) for y in ys] == [tuple(p) for p in placements]
        for y, full in zip(ys, fulls, strict=True):
            assert y.dtype == full.dtype
            check(y, full, context.rank)
        again = meshcast.reshard_many(xs, quiet_mesh(B), placements, async_op=True, dtype=torch.float64)
        for y, full in zip(again.wait(), fulls, strict=True):
            check(y, full.double(), context.rank)
        assert again.stats.bytes > 0


def many_refused(context) -> None:
    fulls, xs, placements = batch(context.rank, 1)
    raises(
        meshcast.LayoutError, "one for each", lambda: meshcast.reshard_many(xs, quiet_mesh(B), placements[1:])
    )
    raises(meshcast.LayoutError, "at least one", lambda: meshcast.reshard_many([], quiet_mesh(B), []))
    group = dist.new_group(list(range(context.world)))
    wrong = [*placements[:-1], [Shard(7)]] if context.rank == 3 else placements
    kind = meshcast.LayoutError if context.rank == 3 else meshcast.PlanMismatchError
    raises(kind, "Shard(7)", lambda: meshcast.reshard_many(xs, quiet_mesh(B), wrong, group=group))
    for y, full in zip(meshcast.reshard_many(xs, quiet_mesh(B), placements, group=group), fulls, strict=True):
        check(y, full, context.rank)


def many_gradients(context) -> None:
    """Only some of a batch need a gradient; one result is not used, another used twice."""
    a, b = meshes()
    fulls = [torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    xs = [
        sharded(full, a, [Shard(i % 2)], context.rank).detach().requires_grad_(i != 1)
        for i, full in enumerate(fulls)
    ]
    plain, second, third, _ = meshcast.reshard_many(
        xs, b, [[Shard(0)], [Replicate()], [Shard(1)], [Shard(0)]]
    )
    assert [y.requires_grad for y in (plain, second, third)] == [True, False, True]
    meshcast.backward((plain * plain).sum() + (third * 3).sum() + (third * third).sum())
    for x, gradient in zip(xs, [2 * fulls[0], None, 3 + 2 * fulls[2], torch.zeros(6, 4)], strict=True):
        if gradient is None:
            assert x.grad is None
        elif context.rank in A:
            assert torch.allclose(
                x.grad.to_local(), cut(gradient, (3,), (A.index(context.rank),), x.placements)
            )


_meshes: list[DeviceMesh] = []


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    if not _meshes:
        _meshes.extend([DeviceMesh("cpu", A), DeviceMesh("cpu", B)])
    return _meshes[0], _meshes[1]


def into_storage(context) -> None:
    """reshard_ fills the storage given, strided or not, casts, and lets autograd know."""
    full = unique_fill((7, 5), torch.float32, 1)
    for strided, dtype in (
        (False, torch.float32),
        (True, torch.float32),
        (True, torch.bfloat16),
        (False, torch.float64),
    ):
        x = sharded(full, quiet_mesh(A), [Shard(0)], context.rank)
        out = sharded(
            torch.zeros(7, 5, dtype=dtype), quiet_mesh(B), [Shard(1)], context.rank, strided=strided
        )
        memory, version, local_version = out.to_local().data_ptr(), out._version, out._local_tensor._version
        assert meshcast.reshard_(out, x) is out
        check(out, full.to(dtype), context.rank)
        assert out.to_local().data_ptr() == memory
        if context.rank in B:
            assert out._version > version
            assert out._local_tensor._version > local_version
    spec = meshcast.TensorSpec((7, 5), torch.float32, quiet_mesh(B), [Shard(1)])
    out = (
        spec if context.rank not in B else sharded(torch.zeros(7, 5), quiet_mesh(B), [Shard(1)], context.rank)
    )
    handle = meshcast.reshard_(out, x, async_op=True)
    assert handle.wait() is out
    if context.rank in B:
        check(out, full, context.rank)


def saved_values(context) -> None:
    """A graph that saved the value which reshard_ overwrites must not go on with the new one."""
    x = sharded(torch.ones(6, 3), quiet_mesh(A), [Shard(0)], context.rank)
    out = sharded(torch.zeros(6, 3), quiet_mesh(B), [Shard(0)], context.rank)
    local = out._local_tensor
    weight = torch.ones_like(local, requires_grad=True)
    product = (weight * local).sum()
    meshcast.reshard_(out, x)
    if context.rank in B:
        raises(RuntimeError, "modified by an inplace operation", product.backward)
    leaf = sharded(torch.zeros(6, 3), quiet_mesh(B), [Shard(0)], context.rank).requires_grad_(True)
    raises(meshcast.LayoutError, "no_grad", lambda: meshcast.reshard_(leaf, x, group=fresh(context)))
    with torch.no_grad():
        meshcast.reshard_(leaf, x)
    check(leaf, torch.ones(6, 3), context.rank)


def fresh(context) -> dist.ProcessGroup:
    return dist.new_group(list(range(context.world)))


def aliases(context) -> None:
    """Source and output in one storage: overlapping shards, and rows that move within the same memory."""
    mesh = quiet_mesh([0, 1, 2, 3, 4])
    full = unique_fill((5, 5), torch.int64, 3)
    for step in range(10):
        storage = torch.zeros(8, dtype=torch.int64)
        x_local, out_local = storage[:5].view(1, 5), storage[2:7].view(5, 1)
        x_local.copy_(full[context.rank : context.rank + 1] + step)
        x = DTensor.from_local(x_local, mesh, [Shard(0)], run_check=False)
        out = DTensor.from_local(out_local, mesh, [Shard(1)], run_check=False)
        if step % 2:
            meshcast.reshard_(out, x, async_op=True).wait()
        else:
            meshcast.reshard_(out, x)
        check(out, full + step, context.rank)
        x_local.copy_(full[context.rank : context.rank + 1] + step)
        rows, columns = (meshcast.Layout(mesh, [Shard(dim)]) for dim in (0, 1))
        meshcast.reshard_local(x_local, rows, out_local, columns, shape=(5, 5), dtype=torch.int64)
        check(out, full + step, context.rank)
    square = sharded(full, mesh, [Shard(0)], context.rank)
    meshcast.reshard_(square, square)  # onto itself
    check(square, full, context.rank)
    expanded = torch.zeros(1, 1, dtype=torch.int64).expand(5, 1)
    out = DTensor.from_local(expanded, mesh, [Shard(1)], run_check=False)
    raises(meshcast.LayoutError, "one address", lambda: meshcast.reshard_(out, square, group=fresh(context)))
    wrong = sharded(torch.zeros(5, 6, dtype=torch.int64), mesh, [Shard(1)], context.rank)
    raises(meshcast.LayoutError, "(5, 6)", lambda: meshcast.reshard_(wrong, square, group=fresh(context)))


def resharder(context) -> None:
    """Many runs of two Resharders, interleaved, there and back; with new results, into storage, and with one
    result that every run overwrites."""
    a, b = quiet_mesh(A), quiet_mesh(B)
    full = unique_fill((9, 4), torch.float32, 5)
    there = resharder_between(
        meshcast.TensorSpec((9, 4), torch.float32, a, [Shard(0)]),
        meshcast.TensorSpec((9, 4), torch.bfloat16, b, [Shard(-1)]),
    )
    reusing = resharder_between(
        sharded(full, a, [Shard(0)], context.rank),
        meshcast.TensorSpec((9, 4), torch.float32, b, [Replicate()]),
        reuse_output=True,
    )
    back = there.reverse()
    assert there.reverse() is back
    kept = None
    for step in range(20):
        x = sharded(full + step, a, [Shard(0)], context.rank) if context.rank in A else None
        first = there.start(x)
        second = reusing.run(x)
        assert kept is None or second is kept
        kept = second
        y = first.wait()
        check(y, (full + step).bfloat16(), context.rank)
        check(second, full + step, context.rank)
        check(back.run(y), (full + step).bfloat16().float(), context.rank)
        out = sharded(torch.zeros(9, 4, dtype=torch.bfloat16), b, [Shard(1)], context.rank)
        assert there.run(x, out=out) is out
        check(out, (full + step).bfloat16(), context.rank)
    assert there.plan.makespan >= there.plan.lower_bound > 0
    raises(meshcast.LayoutError, "spec", lambda: wrong_source(context, a, b))


def wrong_source(context, a, b) -> None:
    """Every rank passes something else than it said, in a group of its own."""
    call = resharder_between(
        meshcast.TensorSpec((9, 4), torch.float32, a, [Shard(0)]),
        meshcast.TensorSpec((9, 4), torch.float32, b, [Shard(0)]),
        fresh(context),
    )
    call.run(sharded(torch.zeros(9, 5), a, [Shard(0)], context.rank))


def resharder_refuses(context) -> None:
    """One rank's source does not fit: it says so, and the others raise as well instead of waiting."""
    a, b = quiet_mesh(A), quiet_mesh(B)
    specs = [meshcast.TensorSpec((9, 4), torch.float32, mesh, [Shard(0)]) for mesh in (a, b)]
    call = resharder_between(*specs, fresh(context))
    x = sharded(torch.zeros(9, 4, dtype=torch.float32), a, [Shard(0)], context.rank)
    if context.rank == 1:
        raises(meshcast.LayoutError, "float64", lambda: call.run(x.double()))
    else:
        raises(meshcast.PlanMismatchError, "rank 1", lambda: call.run(x))
    check(call.run(x), torch.zeros(9, 4), context.rank)
    tracked = x.detach().requires_grad_(True)
    raises(
        meshcast.LayoutError, "requires_grad", lambda: resharder_between(*specs, fresh(context)).run(tracked)
    )


def the_old_form_of_a_resharder(context) -> None:
    """Resharder(src_spec, dst_spec) warns, and is the same otherwise."""
    a, b = quiet_mesh(A), quiet_mesh(B)
    specs = [meshcast.TensorSpec((9, 4), torch.float32, mesh, [Shard(0)]) for mesh in (a, b)]
    x = sharded(torch.ones(9, 4), a, [Shard(0)], context.rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calls = [
            meshcast.Resharder(*specs, fresh(context)),
            meshcast.Resharder(src_spec=specs[0], dst_spec=specs[1], group=fresh(context)),
        ]
        wrong = meshcast.TensorSpec((4, 9), torch.float32, b, [Shard(0)])
        raises(meshcast.LayoutError, "(9, 4)", lambda: meshcast.Resharder(specs[0], wrong))
    assert [each.category for each in caught] == [DeprecationWarning] * 3, caught
    assert all(each.filename == __file__ for each in caught), caught
    for call in calls:
        check(call.run(x), torch.ones(9, 4), context.rank)


def objects_say_what_they_are(context) -> None:
    a, b = quiet_mesh(A), quiet_mesh(B)
    spec = meshcast.TensorSpec((9, 4), torch.float32, a, [Shard(0)])
    call = meshcast.Resharder(spec, b, [Replicate()], group=fresh(context))
    layouts = meshcast.Layout(A, [Shard(0)]), meshcast.Layout(B, [Replicate()])
    assert repr(call) == f"<Resharder of float32 (9, 4), {layouts[0]} to {layouts[1]}>", call
    handle = call.start(sharded(torch.ones(9, 4), a, [Shard(0)], context.rank))
    handle.wait()
    assert repr(handle) == "<Handle of Resharder, completed>", handle
    state = meshcast.StateResharder({"x": (b, [Replicate()])}, group=fresh(context))
    assert repr(state) == "<StateResharder of 1 name>", state


def resharder_gradient(context) -> None:
    a, b = meshes()
    full = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    source = meshcast.TensorSpec((5, 4), torch.float32, a, [Shard(0)], requires_grad=True)
    call = resharder_between(source, meshcast.TensorSpec((5, 4), torch.float32, b, [Shard(1)]))
    x = sharded(full, a, [Shard(0)], context.rank).detach().requires_grad_(True)
    y = call.run(x)
    meshcast.backward((y * y).sum())
    if context.rank in A:
        assert torch.allclose(x.grad.to_local(), 2 * x.detach().to_local())
    with torch.no_grad():
        assert not call.run(x).requires_grad


def prepared(context) -> None:
    """prepare connects the very group that a later call uses; ranks outside may skip it."""
    group = fresh(context)
    ranks = [0, 2, 3]
    if context.rank in ranks:
        meshcast.prepare([quiet_mesh([0, 3]), quiet_mesh([2])], group=group)
        meshcast.prepare(ranks, group=group)
        private = parent_group(group, "test")._groups[tuple(ranks)]
        assert private.core is not None
        full = unique_fill((4,), torch.float32, 1)
        y = meshcast.reshard(
            sharded(full, quiet_mesh([0, 3]), [Shard(0)], context.rank),
            quiet_mesh([2]),
            [Shard(0)],
            group=group,
        )
        assert list(parent_group(group, "test")._groups) == [tuple(ranks)]
        check(y, full, context.rank)
    raises(meshcast.LayoutError, "not in process group", lambda: meshcast.prepare([0, 77], group=group))
    raises(meshcast.LayoutError, "no ranks", lambda: meshcast.prepare([], group=group))
    late = fresh(context)
    if context.rank in (0, 1):  # rank 2 never comes
        raises(
            meshcast.DeadlineExceededError,
            "[2]",
            lambda: meshcast.prepare([0, 1, 2], group=late, timeout=1.0),
        )


def redistribute(context) -> None:
    """DTensor.redistribute crosses meshes once it is enabled, with gradients, and not before or after."""
    a, b = meshes()
    full = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    x = sharded(full, a, [Shard(0)], context.rank).detach().requires_grad_(True)
    raises(NotImplementedError, "Cross device mesh", lambda: x.redistribute(b, [Shard(1)]))
    meshcast.enable_dtensor_redistribute()
    meshcast.enable_dtensor_redistribute()  # once is enough, twice no harm
    try:
        y = x.redistribute(b, [Shard(1)])
        check(y.detach(), full, context.rank)
        meshcast.backward((y * y).sum())
        if context.rank in A:
            assert torch.allclose(x.grad.to_local(), 2 * x.detach().to_local())
            check(x.detach().redistribute(a, [Replicate()]), full, context.rank)  # torch's own
        check(
            x.detach().redistribute(b, [Shard(0)], forward_dtype=torch.float64), full.double(), context.rank
        )
    finally:
        meshcast.enable_dtensor_redistribute(False)
    raises(NotImplementedError, "Cross device mesh", lambda: x.redistribute(b, [Shard(1)]))


CASES = [
    redistribute,
    many,
    many_refused,
    many_gradients,
    into_storage,
    saved_values,
    aliases,
    resharder,
    resharder_refuses,
    the_old_form_of_a_resharder,
    objects_say_what_they_are,
    resharder_gradient,
    prepared,
]
