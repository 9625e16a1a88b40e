"""Tensors that torch only notes to be conjugated or negated, whose memory holds something else; and dtypes of
which ranks disagree. In three processes."""

from __future__ import annotations

import meshcast
import torch
import torch.distributed as dist
from multiproc.meshes import quiet_mesh, resharder_between
from multiproc.oracle import coordinates, cut
from torch.distributed.tensor import DTensor, Replicate, Shard

GROUP_TIMEOUT = 30.0
A, B = [0, 1], [1, 2]


def full(kind: str) -> torch.Tensor:
    """Lazily conjugated or negated, 5 x 3."""
    base = torch.complex(torch.arange(15.0), torch.arange(100.0, 115.0)).reshape(5, 3)
    lazy = base.conj() if kind == "conj" else base.conj().imag
    assert lazy.is_conj() if kind == "conj" else lazy.is_neg()
    return lazy


def source(whole: torch.Tensor, rank: int) -> DTensor:
    """Rows over A. The shard is a view of the whole, lazy as that."""
    rows = {0: slice(0, 3), 1: slice(3, 5)}.get(rank, slice(0, 0))
    return DTensor.from_local(
        whole[rows], quiet_mesh(A), [Shard(0)], run_check=False, shape=whole.shape, stride=(3, 1)
    )


def expected(whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Columns over B."""
    return cut(whole.resolve_conj().resolve_neg(), (2,), coordinates(quiet_mesh(B).mesh)[rank], [Shard(1)])


def check(y: DTensor | torch.Tensor | None, whole: torch.Tensor, rank: int) -> None:
    if rank in B:
        local = y.to_local() if isinstance(y, DTensor) else y
        assert torch.equal(local, expected(whole, rank))


def sources(context) -> None:
    """By every kind of call; a cast resolves the note on its own."""
    for kind in ("conj", "neg"):
        whole = full(kind)
        x = source(whole, context.rank)
        check(meshcast.reshard(x, quiet_mesh(B), [Shard(1)]), whole, context.rank)
        wide = torch.complex128 if kind == "conj" else torch.float64
        check(meshcast.reshard(x, quiet_mesh(B), [Shard(1)], dtype=wide), whole.to(wide), context.rank)
        call = resharder_between(x, meshcast.TensorSpec((5, 3), whole.dtype, quiet_mesh(B), [Shard(1)]))
        for _ in range(2):
            check(call.run(x), whole, context.rank)
        local = meshcast.reshard_local(
            x.to_local() if context.rank in A else None,
            meshcast.Layout(A, [Shard(0)]),
            None,
            meshcast.Layout(B, [Shard(1)]),
            shape=(5, 3),
            dtype=whole.dtype,
        )
        check(local, whole, context.rank)
        state = {"w": x}
        out = meshcast.reshard_state_dict(state, {"w": (quiet_mesh(B), [Shard(1)])}, digest=True)
        check(out["w"], whole, context.rank)


def gradients(context) -> None:
    """The gradient of y.conj() comes lazily conjugated to the backward transfer."""
    values = full("conj").resolve_conj()
    x = source(values, context.rank).detach().requires_grad_()
    y = meshcast.reshard(x, quiet_mesh(B), [Shard(1)])
    weights = torch.complex(torch.arange(15.0), -torch.arange(30.0, 45.0)).reshape(5, 3)
    lazy = []
    y.register_hook(lambda grad: lazy.append(grad.to_local().is_conj()))
    if context.rank in B:
        local = y.to_local()
        mine = cut(weights, (2,), coordinates(quiet_mesh(B).mesh)[context.rank], [Shard(1)])
        meshcast.backward((local.conj() * mine).real.sum())
        assert lazy == [True]
    else:
        meshcast.backward(y.to_local().real.sum())
    if context.rank in A:
        other = values.clone().requires_grad_()
        (other.conj() * weights).real.sum().backward()
        assert torch.equal(x.grad.to_local().resolve_conj(), source(other.grad, context.rank).to_local())


def destinations_refused(context) -> None:
    """Before a byte moves, on all ranks; the group goes on."""
    group = dist.new_group([0, 1, 2])
    whole = full("conj").resolve_conj()
    target = torch.zeros_like(expected(whole, context.rank)) if context.rank in B else None
    layouts = meshcast.Layout(A, [Shard(0)]), meshcast.Layout(B, [Shard(1)])
    x = source(whole, context.rank)
    mine = x.to_local() if context.rank in A else None
    lazy = target.conj() if context.rank == 2 else target
    kind, text = (
        (meshcast.LayoutError, "conjugates") if context.rank == 2 else (meshcast.PlanMismatchError, "rank 2")
    )
    call = {"shape": (5, 3), "dtype": whole.dtype, "group": group}
    try:
        meshcast.reshard_local(mine, layouts[0], lazy, layouts[1], **call)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}")
    assert target is None or not target.any()
    meshcast.reshard_local(mine, layouts[0], target, layouts[1], **call)
    check(target, whole, context.rank)


def dtypes_of_a_batch(context) -> None:
    """Of equal width, so that the plan is the same, and beyond the tensors that messages name."""
    group = dist.new_group([0, 1, 2])
    mesh = quiet_mesh(A)
    wholes = [torch.arange(15.0).reshape(5, 3) + index for index in range(5)]
    xs = [source(whole, context.rank) for whole in wholes]
    if context.rank == 2:
        xs[4] = meshcast.TensorSpec((5, 3), torch.int32, mesh, [Shard(0)])
    try:
        meshcast.reshard_many(xs, quiet_mesh(B), [[Shard(1)]] * 5, group=group)
    except meshcast.PlanMismatchError as error:
        assert "2 more tensors of float32" in str(error), error
        assert "2 more tensors of float32, int32" in str(error), error
    else:
        raise AssertionError("no PlanMismatchError")


def replicas(context) -> None:
    """A rank that is source and destination copies its own part."""
    whole = full("neg")
    x = DTensor.from_local(
        whole if context.rank < 2 else whole[:0],
        quiet_mesh(A),
        [Replicate()],
        run_check=False,
        shape=(5, 3),
        stride=(3, 1),
    )
    check(meshcast.reshard(x, quiet_mesh(B), [Shard(1)]), whole, context.rank)


CASES = [sources, gradients, destinations_refused, dtypes_of_a_batch, replicas]
