"""reshard and reshard_state_dict where ranks are lost: those make no call, in a group that still has them or
in one without. Ranks 0 to 3 held, rank 4 joins."""

from __future__ import annotations

import meshcast
import torch
import torch.distributed as dist
from meshcast import LayoutError, MeshcastError, PlanMismatchError
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import coordinates, cut, unique_fill
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

GROUP_TIMEOUT = 30.0
REPLICAS, TWO = [[0, 1], [2, 3]], [Replicate(), Shard(0)]
_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def group_of(ranks: list[int]) -> dist.ProcessGroup:
    """Made by all ranks at once."""
    key = tuple(ranks)
    if key not in _groups:
        _groups[key] = dist.new_group(ranks)
    return _groups[key]


def raised(kind: type[Exception], text: str, function) -> Exception:
    try:
        function()
    except kind as error:
        assert text in str(error), f"expected {text!r} in: {error}"
        return error
    raise AssertionError(f"no {kind.__name__}")


def check(result: torch.Tensor, full: torch.Tensor, mesh, placements, rank: int) -> None:
    place = coordinates(mesh.mesh).get(rank)
    if place is not None:
        expected = cut(full, mesh.mesh.shape, place, placements)
        assert result.to_local().dtype == full.dtype
        assert torch.equal(result.to_local(), expected)


def replicas_take_the_place_of_lost_ranks(context) -> None:
    """Shapes with even, uneven and empty shards; sources and destinations of several kinds."""
    old, new = quiet_mesh(REPLICAS), quiet_mesh([4, 2, 0])
    strided = [_StridedShard(0, split_factor=2), Replicate()]
    for lost in ([3], [0, 3], [1]):
        alive = quiet_mesh([rank for rank in range(5) if rank not in lost])
        for seed, (shape, source) in enumerate(
            [
                ((7, 3), TWO),
                ((1, 4), TWO),
                ((2,), TWO),
                ((), [Replicate()] * 2),
                ((8, 2), strided),
                ((0, 2), TWO),
            ]
        ):
            for dtype in (torch.float32, torch.bfloat16):
                if context.rank in lost:
                    continue
                full = unique_fill(shape, dtype, seed + 1)
                x = meshcast.TensorSpec(shape, dtype, old, source)
                if context.rank < 4:
                    x = sharded(full, old, source, context.rank)
                where = [(alive, [Replicate()])]
                where += [(alive, [Shard(len(shape) - 1)])] if shape else []
                if 0 not in lost:
                    where += [(new, [Shard(0) if shape else Replicate()])]
                for mesh, placements in where:
                    check(
                        meshcast.reshard(x, mesh, placements, lost=lost), full, mesh, placements, context.rank
                    )


def a_group_without_them(context) -> None:
    group = group_of([0, 1, 2, 4])
    if context.rank == 3:
        return
    old, new = quiet_mesh(REPLICAS), quiet_mesh([0, 1, 2, 4])
    full = unique_fill((9, 2), torch.float32, 1)
    x = sharded(full, old, TWO, context.rank)
    for _ in range(2):
        y = meshcast.reshard(x, new, [Shard(0)], group=group, lost=[3])
        check(y, full, new, [Shard(0)], context.rank)
    raised(
        LayoutError,
        "ranks [3] are not in process group",
        lambda: meshcast.reshard(x, new, [Shard(0)], group=group),
    )


def many_tensors_and_in_the_background(context) -> None:
    if context.rank == 1:
        return
    mesh = quiet_mesh([0, 2, 3])
    fulls = [unique_fill((5, 3), torch.float32, 1), unique_fill((6,), torch.bfloat16, 2)]
    placements = [[Shard(1)], [Replicate()]]
    xs = [sharded(full, quiet_mesh(REPLICAS), TWO, context.rank) for full in fulls]
    results = meshcast.reshard_many(xs, mesh, placements, lost=iter([1]))
    handle = meshcast.reshard_many(xs, mesh, placements, lost=(1,), async_op=True)
    for found in (results, handle.wait()):
        for y, full, where in zip(found, fulls, placements, strict=True):
            check(y, full, mesh, where, context.rank)
    single = meshcast.reshard(xs[0], mesh, [Shard(0)], lost={1}, async_op=True).wait()
    check(single, fulls[0], mesh, [Shard(0)], context.rank)


def what_lives_nowhere_is_listed(context) -> None:
    """The same error on all ranks, and the group goes on."""
    if context.rank in (1, 2):
        return
    old, new = quiet_mesh([0, 1, 2, 3]), quiet_mesh([0, 4, 3])
    full = unique_fill((7, 2), torch.float32, 1)
    x = sharded(full, old, [Shard(0)], context.rank)
    error = raised(
        LayoutError,
        "2 boxes are on no live rank: 'x' [2:4, 0:2] of rank 1; 'x' [4:6, 0:2] of rank 2",
        lambda: meshcast.reshard(x, new, [Shard(0)], lost=[1, 2]),
    )
    assert error.gone == (("x", ((2, 4), (0, 2)), (1,)), ("x", ((4, 6), (0, 2)), (2,)))
    twice = sharded(full, quiet_mesh([[0, 1], [3, 2]]), TWO, context.rank)
    xs = [sharded(full, quiet_mesh([0, 3]), [Shard(0)], context.rank), twice]
    error = raised(
        LayoutError,
        "1 box is on no live rank: 'xs[1]' [4:7, 0:2] of ranks 1, 2.",
        lambda: meshcast.reshard_many(xs, new, [[Shard(0)]] * 2, lost=[1, 2]),
    )
    assert error.gone == (("xs[1]", ((4, 7), (0, 2)), (1, 2)),)
    z = meshcast.reshard(xs[0], new, [Shard(1)])
    check(z, full, new, [Shard(1)], context.rank)


def an_empty_tensor_of_lost_ranks_alone(context) -> None:
    if context.rank in (1, 2):
        return
    new = quiet_mesh([0, 4, 3])
    spec = meshcast.TensorSpec((0, 3), torch.float32, quiet_mesh([1, 2]), [Shard(0)])
    found = meshcast.reshard(spec, new, [Shard(1)], lost=[1, 2])
    assert found.shape == (0, 3)
    assert found.to_local().shape == (0, 1)


def arguments_that_are_wrong(context) -> None:
    """On all ranks alike."""
    if context.rank == 3:
        return
    old, new = quiet_mesh(REPLICAS), quiet_mesh([0, 1, 2, 4])
    full = unique_fill((4, 2), torch.float32, 1)
    x = sharded(full, old, TWO, context.rank)

    def call(lost, to=new, x=x):
        return lambda: meshcast.reshard(x, to, [Shard(0)], lost=lost)

    raised(LayoutError, "lost= names rank 9", call([3, 9]))
    raised(LayoutError, "lost= names ranks 9, 11", call([3, 9, 11]))
    raised(LayoutError, "rank 3 is lost, and yet in the destination", call([3], quiet_mesh([0, 1, 2, 3, 4])))
    raised(LayoutError, "expected a sequence", call(3))
    raised(LayoutError, "expected an integer", call(["3"]))
    pending = DTensor.from_local(torch.ones(4, 2), old, [Partial(), Replicate()], run_check=False)
    raised(LayoutError, "holds Partial", call([3], x=pending))
    needs = sharded(full, old, TWO, context.rank).requires_grad_()
    raised(LayoutError, "torch.no_grad()", call([3], x=needs))
    with torch.no_grad():
        check(call([3], x=needs)(), full, new, [Shard(0)], context.rank)
    check(call([3])(), full, new, [Shard(0)], context.rank)


def one_rank_is_wrong(context) -> None:
    """What one rank refuses, the others hear of."""
    if context.rank == 3:
        return
    new = quiet_mesh([0, 1, 2, 4])
    full = unique_fill((4, 2), torch.float32, 1)
    x = sharded(full, quiet_mesh(REPLICAS), TWO, context.rank)
    for bad in ([3.5], None, [3, 1]):
        lost = bad if context.rank == 1 else [3]
        kind = LayoutError if context.rank == 1 else PlanMismatchError
        raised(kind, "lost", lambda lost=lost: meshcast.reshard(x, new, [Shard(0)], lost=lost))
        check(meshcast.reshard(x, new, [Shard(0)], lost=[3]), full, new, [Shard(0)], context.rank)


def state_of(context, fulls, mesh, placements) -> dict:
    if context.rank == 4:
        return {}
    state = {name: sharded(full, mesh, placements, context.rank) for name, full in fulls.items()}
    return state | {"copy": torch.arange(5.0), "step": 12, "group": {"lr": 0.1, "betas": (0.9, 0.99)}}


def state_of_replicas(context) -> None:
    """In the default group, which has the lost rank, and in one without it; also in the background."""
    fulls = {"a": unique_fill((7, 3), torch.float32, 1), "b": unique_fill((5,), torch.bfloat16, 2)}
    without = group_of([0, 1, 2, 4])
    if context.rank == 3:
        return
    mesh = quiet_mesh([0, 1, 2, 4])
    where = {"a": (mesh, [Shard(1)]), "b": (mesh, [Shard(0)]), "copy": (mesh, [Replicate()])}
    state = state_of(context, fulls, quiet_mesh(REPLICAS), TWO)
    for group in (None, without):
        for options in ({}, {"digest": True}, {"async_op": True}, {"max_bytes_in_flight": 30}):
            found = meshcast.reshard_state_dict(state, where, lost=[3], group=group, **options)
            found = found.wait() if "async_op" in options else found
            assert list(found) == ["a", "b", "copy", "step", "group"]
            for name, full in fulls.items():
                check(found[name], full, mesh, where[name][1], context.rank)
            assert torch.equal(found["copy"].to_local(), torch.arange(5.0))
            assert (found["step"], found["group"]["betas"]) == (12, (0.9, 0.99))


def state_that_lives_nowhere(context) -> None:
    """All that is gone, of all tensors, in one error; of a map, what it needs."""
    fulls = {"a": unique_fill((7, 3), torch.float32, 1), "b": unique_fill((4,), torch.bfloat16, 2)}
    if context.rank == 3:
        return
    mesh = quiet_mesh([0, 1, 2, 4])
    where = {"a": (mesh, [Shard(1)]), "b": (mesh, [Shard(0)]), "copy": (mesh, [Replicate()])}
    state = state_of(context, fulls, quiet_mesh([0, 1, 2, 3]), [Shard(0)])
    out = {"a": sharded(torch.zeros(7, 3), mesh, [Shard(1)], context.rank)}
    error = raised(
        LayoutError,
        "2 boxes are on no live rank: 'a' [6:7, 0:3] of rank 3; 'b' [3:4] of rank 3",
        lambda: meshcast.reshard_state_dict(state, where, out, lost=[3]),
    )
    assert error.gone == (("a", ((6, 7), (0, 3)), (3,)), ("b", ((3, 4),), (3,)))
    assert not out["a"].to_local().any()
    halves = {"first": meshcast.Layout([4], [Replicate()]), "second": meshcast.Layout([0], [Replicate()])}
    split = meshcast.TensorMap("a", ("first", "second"), dim=0, sizes=(5, 2))
    state = {"a": state["a"]} if state else None
    error = raised(
        LayoutError,
        "[6:7, 0:3]",
        lambda: meshcast.reshard_state_dict(state, halves, maps=split, lost=[3]),
    )
    found = meshcast.reshard_state_dict(state, halves, maps=split, lost=[3], only=["first"])
    assert context.rank != 4 or torch.equal(found["first"], fulls["a"][:5])


def state_with_wrong_ranks(context) -> None:
    fulls = {"a": unique_fill((4, 3), torch.float32, 1)}
    without = group_of([0, 1, 2, 4])
    if context.rank == 3:
        return
    mesh = quiet_mesh([0, 1, 2, 4])
    where = {"a": (mesh, [Shard(1)]), "copy": (mesh, [Replicate()])}
    state = state_of(context, fulls, quiet_mesh(REPLICAS), TWO)

    def call(lost, where=where):
        return lambda: meshcast.reshard_state_dict(state, where, lost=lost, group=without)

    raised(LayoutError, "lost= names [7]", call([3, 7]))
    both = {"a": (quiet_mesh([0, 1, 3]), [Shard(1)]), "copy": (mesh, [Replicate()])}
    raised(LayoutError, "rank 3 is lost, and yet in the destination of 'a'", call([3], both))
    raised(PlanMismatchError, "the options are", call([3] if context.rank else [3, 7]))
    kind = LayoutError if context.rank == 2 else PlanMismatchError
    raised(kind, "rank 2", call([3, 2] if context.rank == 2 else [3]))
    raised(kind, "lost", call(3.5 if context.rank == 2 else [3]))
    found = call([3])()
    check(found["a"], fulls["a"], mesh, [Shard(1)], context.rank)


def copies_that_differ(context) -> None:
    """Digests compare what is left of replicas, though the layout lists boxes by then."""
    if context.rank == 3:
        return
    mesh = quiet_mesh([0, 1, 2, 4])
    full = unique_fill((4, 3), torch.float32, 1)
    state = {"a": sharded(full, quiet_mesh(REPLICAS), TWO, context.rank)} if context.rank < 3 else None
    where = {"a": (mesh, [Shard(1)])}
    meshcast.reshard_state_dict(state, where, lost=[3], digest=True)
    if context.rank == 2:
        state["a"].to_local()[0, 0] = 99.0
    text = "the replicas of 'a' on ranks 0 and 2 differ"
    raised(MeshcastError, text, lambda: meshcast.reshard_state_dict(state, where, lost=[3], digest=True))


CASES = [
    replicas_take_the_place_of_lost_ranks,
    a_group_without_them,
    many_tensors_and_in_the_background,
    what_lives_nowhere_is_listed,
    an_empty_tensor_of_lost_ranks_alone,
    arguments_that_are_wrong,
    one_rank_is_wrong,
    state_of_replicas,
    state_that_lives_nowhere,
    state_with_wrong_ranks,
    copies_that_differ,
]
