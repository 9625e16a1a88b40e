"""reshard under torch.compile, and the operator behind it, in three processes. The compiler is that of the
environment variable COMPILER."""

from __future__ import annotations

import contextlib
import os

import meshcast
import torch
from meshcast.resharding.compile_op import new_token, register_call
from meshcast.transfers.transfer import PersistentTransfer, PlanOptions
from multiproc.meshes import sharded
from multiproc.oracle import coordinates, cut
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

GROUP_TIMEOUT = 100.0  # compiling takes the ranks unequal time
COMPILER = os.environ["COMPILER"]
A, B = [0, 1], [1, 2]
FULL = torch.arange(24.0).reshape(6, 4)
_meshes: list[DeviceMesh] = []
_kept: list = []


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    if not _meshes:
        _meshes.extend([DeviceMesh("cpu", A), DeviceMesh("cpu", B)])
        _meshes.extend([DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [[0], [1], [2]])])
    return _meshes[0], _meshes[1]


def leaf(rank: int) -> DTensor:
    return sharded(FULL, meshes()[0], [Shard(0)], rank).detach().requires_grad_(True)


@contextlib.contextmanager
def counted():
    """Counts the transfers that this rank starts: [forward, backward]."""
    counts = [0, 0]
    forward, reverse = PersistentTransfer.launch, PersistentTransfer.launch_reverse

    def launch(self, *arguments, **options):
        counts[0] += 1
        return forward(self, *arguments, **options)

    def launch_reverse(self, *arguments, **options):
        counts[1] += 1
        return reverse(self, *arguments, **options)

    PersistentTransfer.launch, PersistentTransfer.launch_reverse = launch, launch_reverse
    try:
        yield counts
    finally:
        PersistentTransfer.launch, PersistentTransfer.launch_reverse = forward, reverse


def operator_call() -> int:
    """A number for torch.ops.meshcast.reshard: FULL from A by rows to B by columns, with gradient."""
    from meshcast.groups.parent import parent_group
    from meshcast.resharding.compiled import ReshardGoal, compile_call

    a, b = meshes()
    parent = parent_group(None, "test")
    spec = meshcast.TensorSpec((6, 4), torch.float32, a, [Shard(0)], True)
    goal = ReshardGoal(b, (Shard(1),))
    compiled = compile_call(parent, [spec], [goal], "reshard", PlanOptions(), spec_inside=True)
    _kept.append(compiled)
    return register_call(compiled, 60.0)


def local_source(rank: int) -> torch.Tensor:
    return FULL[3 * rank : 3 * rank + 3].clone() if rank in A else torch.empty(0, 0)


def local_result(rank: int) -> torch.Tensor:
    return FULL[:, 2 * rank - 2 : 2 * rank] if rank in B else torch.empty(0, 0)


def operator_checks(context) -> None:
    """torch's own checks: schema, fake tensors, autograd, tracing."""
    call = operator_call()
    for requires_grad in (False, True):
        local = local_source(context.rank).requires_grad_(requires_grad)
        checks = torch.library.opcheck(torch.ops.meshcast.reshard.default, (local, new_token(), call))
        assert set(checks.values()) == {"SUCCESS"}, checks
    y = torch.ops.meshcast.reshard(local, new_token(), call)
    assert torch.equal(y, local_result(context.rank))


def no_such_call(context) -> None:  # noqa: ARG001
    try:
        torch.ops.meshcast.reshard(torch.zeros(3), new_token(), 12345)
    except meshcast.LayoutError as error:
        assert "12345" in str(error)
    else:
        raise AssertionError("an unknown call ran")


def equal_calls(context) -> None:
    """Two equal calls of the operator and one whose result nobody uses: three transfers, two backwards, on
    every rank, also where the result or the gradient is empty."""
    call = operator_call()

    def step(local: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        first = torch.ops.meshcast.reshard(local, token, call)
        second = torch.ops.meshcast.reshard(local, token, call)
        torch.ops.meshcast.reshard(local * 2, token, call)
        return (first * first).sum() + (second * second).sum()

    compiled = torch.compile(step, fullgraph=True, backend=COMPILER)
    token = new_token()
    for _ in range(2):
        local = local_source(context.rank).requires_grad_(True)
        with counted() as counts:
            loss = compiled(local, token)
            loss.backward()
        assert counts == [3, 2], counts
        assert torch.allclose(loss, 2 * (local_result(context.rank) ** 2).sum())
        assert torch.equal(local.grad, 4 * local)
    with torch.no_grad(), counted() as counts:
        compiled(local, token)
    assert counts == [3, 0], counts


def whole_graph(context) -> None:
    """meshcast.reshard inside a compiled function, there and back, between meshes of different shape."""
    meshes()
    line, column = _meshes[2:]

    def step(x: DTensor) -> DTensor:
        y = meshcast.reshard(x * 2, column, [Shard(1), Shard(0)])
        z = meshcast.reshard(y * y, line, [Shard(0)], dtype=torch.float64)
        return z + 1

    compiled = torch.compile(step, fullgraph=True, backend=COMPILER)
    part = FULL[2 * context.rank : 2 * context.rank + 2]
    for _ in range(2):
        x = sharded(FULL, line, [Shard(0)], context.rank).detach().requires_grad_(True)
        with counted() as counts:
            z = compiled(x)
            z.sum().backward()
        assert counts == [2, 2], counts
        assert z.dtype == torch.float64
        assert torch.equal(z.to_local(), (4 * part * part + 1).double())
        assert torch.allclose(x.grad.to_local(), 8 * part)


def shells_with_gradient(context) -> None:
    """Refused while tracing, on every rank, since nothing would lead to the backward on some."""
    _, b = meshes()
    compiled = torch.compile(lambda x: meshcast.reshard(x, b, [Shard(1)]), fullgraph=True, backend=COMPILER)
    try:
        compiled(leaf(context.rank))
    except Exception as error:
        assert "the same ranks" in str(error), error
    else:
        raise AssertionError("it was traced")


def without_gradient(context) -> None:
    """A result that nobody uses; a Partial source; a value without gradient."""
    a, b = meshes()

    def step(x: DTensor, pending: DTensor) -> DTensor:
        meshcast.reshard(x, b, [Shard(0)])
        return meshcast.reshard(pending, b, [Shard(0)])

    local = FULL.clone() if context.rank in A else torch.empty(0, 0)
    pending = DTensor.from_local(
        local, a, [Partial()], run_check=False, shape=FULL.shape, stride=FULL.stride()
    )
    with counted() as counts:
        y = torch.compile(step, fullgraph=True, backend=COMPILER)(leaf(context.rank).detach(), pending)
    assert counts == [2, 0], counts
    place = coordinates(b.mesh).get(context.rank)
    if place is not None:
        assert torch.equal(y.to_local(), cut(2 * FULL, b.mesh.shape, place, [Shard(0)]))


CASES = [operator_checks, no_such_call, equal_calls, whole_graph, shells_with_gradient, without_gradient]
