"""Gradients through reshard, in four processes: values against autograd in one process, order tokens, and
what must raise."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref

import meshcast
import torch
import torch.distributed as dist
from meshcast.resharding import autograd
from multiproc.meshes import sharded
from multiproc.oracle import coordinates, cut
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

GROUP_TIMEOUT = 60.0
_meshes: list[DeviceMesh] = []


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """Ranks 0, 1 and ranks 1, 2, 3: overlapping, of different size. Built once, by all ranks."""
    if not _meshes:
        _meshes.extend([DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2, 3])])
    return _meshes[0], _meshes[1]


def leaf(full: torch.Tensor, mesh: DeviceMesh, placements, rank: int) -> DTensor:
    return sharded(full, mesh, placements, rank).detach().requires_grad_(True)


def check_gradient(x: DTensor, expected: torch.Tensor, mesh: DeviceMesh, rank: int, placements=None) -> None:
    placements = x.placements if placements is None else placements
    place = coordinates(mesh.mesh).get(rank)
    if place is not None:
        assert x.grad is not None
        assert tuple(x.grad.placements) == tuple(placements)
        torch.testing.assert_close(x.grad.to_local(), cut(expected, mesh.mesh.shape, place, placements))


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def against_one_process(context) -> None:
    """The gradient of a nonlinear loss behind a reshard equals that of the same loss in one process, for
    several layouts."""
    a, b = meshes()
    pairs = [
        ([Shard(0)], [Shard(1)]),
        ([Shard(1)], [Shard(1)]),
        ([Replicate()], [Shard(0)]),
        ([Shard(0)], [Replicate()]),
        ([Replicate()], [Replicate()]),
    ]
    for seed, (source, destination) in enumerate(pairs):
        full, weight = values(seed, 7, 5), values(100 + seed, 7, 5)
        single = full.clone().requires_grad_(True)
        ((single * weight).tanh() ** 2).sum().backward()
        x = leaf(full, a, source, context.rank)
        y = meshcast.reshard(x, b, destination)
        loss = ((y * sharded(weight, b, destination, context.rank)).tanh() ** 2).sum()
        loss.backward()
        check_gradient(x, single.grad, a, context.rank)


def gradient_layouts(context) -> None:
    """The incoming gradient may have another layout than the value: it is redistributed to grad_placements
    first."""
    a, b = meshes()
    full = values(3, 6, 6)
    single = full.clone().requires_grad_(True)
    (single @ single.detach().T).sum().backward()
    for grad_placements in (None, [Replicate()], [Shard(0)], [Shard(1)]):
        x = leaf(full, a, [Shard(0)], context.rank)
        y = meshcast.reshard(x, b, [Replicate()], grad_placements=grad_placements)
        # Shard(1) of the other factor makes the gradient of y Partial.
        (y @ sharded(full.T.contiguous(), b, [Shard(1)], context.rank)).sum().backward()
        check_gradient(x, single.grad, a, context.rank)


def partial_sources(context) -> None:
    """Partial('sum') passes the whole gradient to every summand, Partial('avg') one nth."""
    a, b = meshes()
    full = values(4, 4, 3)
    for op, scale in (("sum", 1.0), ("avg", 0.5)):
        local = full * (context.rank + 1) if context.rank in (0, 1) else torch.empty(0)
        x = DTensor.from_local(
            local, a, [Partial(op)], run_check=False, shape=full.shape, stride=full.stride()
        )
        x = x.detach().requires_grad_(True)
        y = meshcast.reshard(x, b, [Shard(0)])
        place = coordinates(b.mesh).get(context.rank)
        if place is not None:
            torch.testing.assert_close(y.to_local(), cut(full * 3 * scale, b.mesh.shape, place, [Shard(0)]))
        (y * 5).sum().backward()
        check_gradient(x, torch.full_like(full, 5 * scale), a, context.rank, [Replicate()])
    refused = DTensor.from_local(
        torch.empty(4, 3), a, [Partial("max")], run_check=False, shape=(4, 3), stride=(3, 1)
    )
    _raises(
        meshcast.LayoutError,
        "no gradient",
        lambda: meshcast.reshard(refused.detach().requires_grad_(True), b, [Shard(0)]),
    )


def spec_instead_of_shell(context) -> None:
    """A rank that knows only the spec gets a result with a graph as well."""
    a, b = meshes()
    full = values(5, 5, 2)
    inside = context.rank in (0, 1)
    x = (
        leaf(full, a, [Shard(0)], context.rank)
        if inside
        else meshcast.TensorSpec((5, 2), full.dtype, a, [Shard(0)], True)
    )
    y = meshcast.reshard(x, b, [Shard(0)])
    assert y.requires_grad
    (y * y).sum().backward()
    if inside:
        check_gradient(x, 2 * full, a, context.rank)


def cast(context) -> None:
    """A cast travels in the narrower type, both ways, and the gradient comes back in the source's."""
    a, b = meshes()
    full = values(6, 8, 3)
    for dtype in (torch.bfloat16, torch.float64):
        x = leaf(full, a, [Shard(0)], context.rank)
        y = meshcast.reshard(x, b, [Shard(1)], dtype=dtype)
        assert y.dtype == dtype
        place = coordinates(b.mesh).get(context.rank)
        if place is not None:
            assert torch.equal(y.to_local(), cut(full.to(dtype), b.mesh.shape, place, [Shard(1)]))
        (y * 2).sum().backward()
        check_gradient(x, torch.full_like(full, 2.0), a, context.rank)
    _raises(meshcast.LayoutError, "detach", lambda: meshcast.reshard(x, b, [Shard(0)], dtype=torch.int32))


def joint_loss(context) -> None:
    """Several results in one loss, one of them used twice, through plain backward."""
    a, b = meshes()
    full = values(7, 6, 4)
    single = full.clone().requires_grad_(True)
    (single**3 + single * single * 2).sum().backward()
    x = leaf(full, a, [Shard(0)], context.rank)
    first = meshcast.reshard(x, b, [Shard(0)])
    second = meshcast.reshard(x, b, [Shard(1)])
    loss = (first**3).sum() + (second * second).sum() + (second * second).sum()
    loss.backward()
    check_gradient(x, single.grad, a, context.rank)


def unused_on_one_side(context) -> None:
    """meshcast.backward visits results that this rank does not use; ranks use different ones here."""
    a, b = meshes()
    full = values(8, 6, 4)
    x = leaf(full, a, [Shard(0)], context.rank)
    there = meshcast.reshard(x, b, [Shard(0)])
    back = meshcast.reshard(there * 2, a, [Shard(0)])
    meshcast.reshard(x, b, [Replicate()])  # nobody uses it
    loss = (back**2).sum() if context.rank in (0, 1) else None
    meshcast.backward(loss)
    check_gradient(x, 8 * full, a, context.rank)
    meshcast.backward()  # nothing is left of the step
    check_gradient(x, 8 * full, a, context.rank)


def order_differs(context) -> None:
    """One rank runs two backwards where the others run one joint: it raises, and so does everybody who waits
    for it."""
    a, b = meshes()
    x = leaf(values(9, 6, 4), a, [Shard(1)], context.rank)
    first = meshcast.reshard(x, b, [Shard(0)], group=_spare_group(0))
    second = meshcast.reshard(x, b, [Replicate()], group=_spare_group(0), grad_placements=[Shard(0)])

    def separately() -> None:
        first.sum().backward()
        second.sum().backward()

    begin = time.monotonic()
    if context.rank == 3:
        _raises(meshcast.MeshcastError, "meshcast.backward", separately)
    elif context.rank in (0, 1):  # the source mesh: both need a part of the gradient from rank 3
        _raises(meshcast.MeshcastError, "rank 3", lambda: (first.sum() + second.sum()).backward())
    else:  # rank 2 only sends, so its backward may return before the others raise
        with contextlib.suppress(meshcast.MeshcastError):
            (first.sum() + second.sum()).backward()
    assert time.monotonic() - begin < GROUP_TIMEOUT
    context.wait_for_all("raised")
    for group in (_spare_group(0), None):  # it goes on, and so do others
        assert meshcast.reshard(x.detach(), b, [Shard(0)], group=group).shape == (6, 4)


def separate_losses(context) -> None:
    """The same two losses through meshcast.backward, in one call, on every rank."""
    a, b = meshes()
    x = leaf(values(10, 6, 4), a, [Shard(0)], context.rank)
    first, second = meshcast.reshard(x, b, [Shard(0)]), meshcast.reshard(x, b, [Shard(1)])
    losses = [first.sum(), (second * 2).sum()]
    meshcast.backward(*(reversed(losses) if context.rank % 2 else losses))
    check_gradient(x, torch.full((6, 4), 3.0), a, context.rank)


def retained(context) -> None:
    """retain_graph lets both kinds of backward run again; without it the next one raises. Ranks that only
    send run ahead of the one that is late."""
    a, b = meshes()
    x = leaf(values(11, 5, 3), a, [Shard(0)], context.rank)
    loss = (meshcast.reshard(x, b, [Shard(0)]) * 3).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    check_gradient(x, torch.full((5, 3), 6.0), a, context.rank)
    _raises(RuntimeError, "second time", loss.backward)
    x.grad = None
    loss = (meshcast.reshard(x, b, [Shard(0)]) * 3).sum()
    for again in range(4):
        if context.rank == 1:
            time.sleep(0.2)
        meshcast.backward(loss, retain_graph=again < 3)
    check_gradient(x, torch.full((5, 3), 12.0), a, context.rank)


def gradient_changed_after_backward(context) -> None:
    """A rank that only sends returns from its backward before the others have the gradient. Autograd may hand
    the same tensor to a parameter as its .grad, which the user is free to change at once."""
    a, b = meshes()
    full, weight = values(17, 9, 5), values(18, 9, 5)
    for plain in (True, False):
        x = leaf(full, a, [Shard(0)], context.rank)
        bias = leaf(torch.zeros(9, 5), b, [Shard(0)], context.rank)
        y = meshcast.reshard(x, b, [Shard(0)]) + bias
        loss = (y * sharded(weight, b, [Shard(0)], context.rank)).sum()
        if context.rank in (0, 1):
            time.sleep(0.2)
        if plain:
            loss.backward()
        else:
            meshcast.backward(loss)
        if bias.grad is not None:
            bias.grad.to_local().zero_()
        check_gradient(x, weight, a, context.rank)


def no_second_derivative(context) -> None:
    a, b = meshes()
    x = leaf(values(12, 5, 3), a, [Shard(0)], context.rank)
    loss = (meshcast.reshard(x, b, [Shard(0)]) ** 2).sum()
    _raises(meshcast.MeshcastError, "create_graph", lambda: loss.backward(create_graph=True))


def without_gradient(context) -> None:
    """no_grad and values without gradient take no part in the chain."""
    a, b = meshes()
    x = leaf(values(13, 5, 3), a, [Shard(0)], context.rank)
    with torch.no_grad():
        assert not meshcast.reshard(x, b, [Shard(0)]).requires_grad
    assert not meshcast.reshard(x.detach(), b, [Shard(0)]).requires_grad
    meshcast.backward()


def graphs_are_freed(context) -> None:
    """The chain keeps nothing of a finished step alive, and of a retained one only until the next call."""
    a, b = meshes()
    alive: list[weakref.ref] = []
    x = leaf(values(14, 5, 3), a, [Shard(0)], context.rank)

    def step(retain_graph: bool) -> None:
        y = meshcast.reshard(x, b, [Shard(0)])
        again = meshcast.reshard(y * y, a, [Shard(0)])  # y is saved by the product, which hangs on the chain
        alive.append(weakref.ref(y))
        meshcast.backward((again * again).sum(), retain_graph=retain_graph)

    step(False)
    gc.collect()
    assert alive[0]() is None
    step(True)
    gc.collect()
    assert alive[1]() is not None  # it could be run again: the test sees what it looks for
    step(False)
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


def chains_are_freed_at_once(context) -> None:
    """Without the garbage collector, which may not come for thousands of steps."""
    a, b = meshes()
    x = leaf(values(14, 5, 3), a, [Shard(0)], context.rank)

    def visits() -> int:
        return sum(isinstance(each, autograd._Visit) for each in gc.get_objects())

    meshcast.backward()
    gc.collect()
    before = visits()
    gc.disable()
    try:
        y = meshcast.reshard(x, b, [Shard(0)])
        again = meshcast.reshard(y * y, a, [Shard(0)])
        assert visits() == before + 2  # the test sees what it looks for
        meshcast.backward((again * again).sum())
        del y, again
        assert visits() == before
    finally:
        gc.enable()


def several_groups(context) -> None:
    """Reshards of different private groups in one loss: the chain orders their backwards across groups."""
    a, b = meshes()
    full = values(15, 6, 6)
    x = leaf(full, a, [Shard(0)], context.rank)
    pair = DeviceMesh("cpu", torch.tensor([2, 3]), _init_backend=False, _rank=context.rank)
    there = meshcast.reshard(x, b, [Shard(0)])
    loss = (there * 2).sum()
    if context.rank in (1, 2, 3):  # the ranks of b and of the pair; rank 0 may skip this call
        narrow = meshcast.reshard(there * 3, pair, [Shard(1)])
        loss = loss + DTensor.from_local((narrow.to_local() ** 2).sum(), b, [Partial()], run_check=False)
    meshcast.backward(loss)
    check_gradient(x, 2 + 18 * full, a, context.rank)


def asynchronous(context) -> None:
    """Handles in flight carry gradients as well; waiting out of order changes nothing."""
    a, b = meshes()
    full = values(16, 6, 4)
    x = leaf(full, a, [Shard(0)], context.rank)
    handles = [meshcast.reshard(x * k, b, [Shard(k % 2)], async_op=True) for k in (1, 2, 3)]
    results = [handle.wait() for handle in reversed(handles)]
    sum(((result * result).sum() for result in results), torch.zeros(())).backward()
    check_gradient(x, 28 * full, a, context.rank)


_spare: dict[int, dist.ProcessGroup] = {}


def _spare_group(index: int) -> dist.ProcessGroup:
    """A group whose private groups may be broken without harm to other cases."""
    if index not in _spare:
        _spare[index] = dist.new_group(list(range(dist.get_world_size())))
    return _spare[index]


def _raises(kind: type[BaseException], text: str, function) -> None:
    try:
        function()
    except kind as error:
        assert text in str(error), f"expected {text!r} in: {error}"
    else:
        raise AssertionError(f"no {kind.__name__}")


CASES = [
    against_one_process,
    gradient_layouts,
    partial_sources,
    spec_instead_of_shell,
    cast,
    joint_loss,
    unused_on_one_side,
    separate_losses,
    retained,
    gradient_changed_after_backward,
    no_second_derivative,
    without_gradient,
    graphs_are_freed,
    chains_are_freed_at_once,
    several_groups,
    asynchronous,
    order_differs,
]
