"""torch.ops.meshcast.reshard: the operator behind meshcast.reshard under torch.compile.

    reshard(Tensor local, Tensor(a!) token, int call) -> Tensor

While torch.compile traces meshcast.reshard, the graph gets this operator and the number of a call that was
compiled during the tracing.

local: this rank's shard of the source, or any tensor outside its mesh; the result: this rank's shard
under the destination, or an empty one, on the GPU or CPU of its mesh. call: a number from register_call().
token: three int64 on the CPU, mutated: as a pure operator, the compiler would merge two equal calls and drop
one whose result is unused here but not on other ranks. The call leaves its own number in the token, by which
its backward finds its peers: so two equal backwards are not merged either.

The operator takes no part in the chain of order tokens (autograd.py): the compiled graph has one order.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from ..errors import Caller, LayoutError, MeshcastError
from ..transfers.handle import CallNumber
from ..transfers.medium import fresh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

    from .compiled import Compiled

__all__ = ["new_token", "register", "register_call", "traced_reshard"]

_library: torch.library.Library | None = None
# Slots of one call whose backwards may be to come. It has another one only after its group has forgotten it.
_SLOTS = 4


class _Registered:
    """A call that the operator runs. Its process group keeps `compiled` alive; limit: seconds.

    A graph holds numbers alone: so what was agreed on is kept here for backwards, by slot."""

    def __init__(self, compiled: weakref.ref[Compiled], limit: float) -> None:
        from ..groups.private import Cache  # by now it is loaded; `import meshcast` loads this module alone

        self.compiled, self.limit = compiled, limit
        self._agreed: Cache[int, tuple[Any, Any]] = Cache(_SLOTS)  # AgreedPlan, and the core it was made with

    def token(self, number: CallNumber) -> torch.Tensor:
        """The number of a call for its backward, if it has one."""
        slot = -1
        if number.agreed is not None:
            slot = number.agreed.slot
            self._agreed[slot] = number.agreed, number.core
        return torch.tensor([number.ordinal, number.run, slot])

    def number(self, token: torch.Tensor) -> CallNumber:
        ordinal, run, slot = token.tolist()
        return CallNumber(ordinal, run, *self._agreed.get(slot, (None, None)))


_calls: dict[int, _Registered] = {}
_numbers = itertools.count()


def register() -> None:
    """Defines the operators. At the import of meshcast; idempotent."""
    global _library
    if _library is not None:
        return
    library = torch.library.Library("meshcast", "DEF")
    outside_graphs = (torch.Tag.cudagraph_unsafe,)  # the compiler ends a CUDA graph before a reshard
    library.define("reshard(Tensor local, Tensor(a!) token, int call) -> Tensor", tags=outside_graphs)
    library.define(
        "reshard_backward(Tensor grad, Tensor(a!) number, int call) -> Tensor", tags=outside_graphs
    )
    library.define("reshard_number(Tensor token) -> Tensor")
    library.impl("reshard_number", torch.clone, "CPU")
    torch.library.register_fake("meshcast::reshard_number", torch.empty_like, lib=library)
    for device in ("CPU", "CUDA"):  # of any input: the token is always on the CPU
        library.impl("reshard", _run, device)
        library.impl("reshard_backward", _run_backward, device)
    library.impl("reshard", _autograd, "Autograd")
    torch.library.register_fake("meshcast::reshard", _fake, lib=library)
    torch.library.register_fake("meshcast::reshard_backward", _fake_backward, lib=library)
    _library = library


def register_call(compiled: Compiled, limit: float) -> int:
    """A number under which the operator runs `compiled`, for as long as that lives."""
    number = next(_numbers)
    _calls[number] = _Registered(weakref.ref(compiled, lambda _: _calls.pop(number, None)), limit)
    return number


def new_token() -> torch.Tensor:
    """A token for the operator. Calls that share one are never merged."""
    return torch.zeros(3, dtype=torch.int64, device="cpu")


def _called(call: int) -> tuple[Compiled, _Registered]:
    known = _calls.get(call)
    compiled = None if known is None else known.compiled()
    if known is None or compiled is None:
        raise LayoutError(
            f"torch.ops.meshcast.reshard: there is no call {call}, or its process group was destroyed; calls "
            "are numbered while torch.compile traces meshcast.reshard"
        )
    return compiled, known


def _run(local: torch.Tensor, token: torch.Tensor, call: int) -> torch.Tensor:
    compiled, known = _called(call)
    move = compiled.moves[0]
    out = _empty(move.local_shape, move.dtype, move.ndim, move.device)
    if compiled.transfer is None:
        return out
    source = move.outgoing(local) if move.is_holder else None
    target = None
    if move.local_shape is not None:
        kind = move.ends.destination
        target = out if kind == move.dtype else fresh(out.shape, kind, out.device)
    started = compiled.transfer.launch([source], [target], known.limit, driven=True)
    started.wait()
    if target is not None and target is not out:
        out.copy_(target)
    token.copy_(known.token(started.number))
    return out


def _run_backward(grad: torch.Tensor, number: torch.Tensor, call: int) -> torch.Tensor:
    compiled, known = _called(call)
    move = compiled.moves[0]
    gradient = move.gradient
    if gradient is None:
        raise MeshcastError("torch.ops.meshcast.reshard: the call was compiled without gradient")
    incoming = _empty(gradient.source_shape, gradient.ends.destination, move.ndim, move.source_device)
    if compiled.transfer is not None:
        outgoing = None if gradient.destination_shape is None else grad.to(gradient.ends.source)
        target = None if gradient.source_shape is None else incoming
        compiled.transfer.launch_reverse(
            known.number(number), [outgoing], [target], known.limit, driven=True
        ).wait()
    if gradient.scale != 1.0:
        incoming.mul_(gradient.scale)
    return incoming.to(gradient.dtype)


def _empty(shape: tuple[int, ...] | None, dtype: torch.dtype, ndim: int, device: str | None) -> torch.Tensor:
    return fresh((0,) * ndim if shape is None else shape, dtype, device)


def _fake(local: torch.Tensor, token: torch.Tensor, call: int) -> torch.Tensor:  # noqa: ARG001
    move = _called(call)[0].moves[0]
    shape = (0,) * move.ndim if move.local_shape is None else move.local_shape
    return local.new_empty(shape, dtype=move.dtype, device=move.device)


def _fake_backward(grad: torch.Tensor, number: torch.Tensor, call: int) -> torch.Tensor:  # noqa: ARG001
    move = _called(call)[0].moves[0]
    gradient = move.gradient
    assert gradient is not None
    shape = (0,) * move.ndim if gradient.source_shape is None else gradient.source_shape
    return grad.new_empty(shape, dtype=gradient.dtype, device=move.source_device)


class _CompiledReshard(torch.autograd.Function):
    # reshard_number is a clone that the compiler leaves alone: any other would be made in the backward, from
    # the token as the last call of the graph left it.
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, token: torch.Tensor, call: int) -> torch.Tensor:
        out = _below_autograd(local, token, call)
        ctx.call, ctx.shape, ctx.dtype = call, local.shape, local.dtype
        ctx.save_for_backward(torch.ops.meshcast.reshard_number(token))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (number,) = ctx.saved_tensors
        # Mutated, and a copy of its own: else inductor drops the call where this rank's gradient is empty.
        own = number.clone()
        gradient = torch.ops.meshcast.reshard_backward(grad.contiguous(), own, ctx.call)
        if gradient.shape != ctx.shape:  # a rank outside the source may have passed any tensor
            gradient = gradient.sum().to(ctx.dtype).expand(ctx.shape)
        return gradient, None, None


def _autograd(local: torch.Tensor, token: torch.Tensor, call: int) -> torch.Tensor:
    if torch.is_grad_enabled() and local.requires_grad:
        return _CompiledReshard.apply(local, token, call)
    return _below_autograd(local, token, call)


def _below_autograd(local: torch.Tensor, token: torch.Tensor, call: int) -> torch.Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.meshcast.reshard(local, token, call)


_token = new_token()  # an input of every graph; one for all traced calls keeps their order


def traced_reshard(
    x: Any,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    group: Any,
    dtype: torch.dtype | None,
    strategy: str,
    timeout: float | timedelta | None,
) -> DTensor:
    """The arguments of meshcast.reshard while it is traced; x is a DTensor on every rank."""
    from torch.distributed.tensor import DTensor  # not by `import meshcast`

    if not isinstance(x, DTensor):
        raise LayoutError("reshard under torch.compile: x must be a DTensor on every rank")
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    source = (tuple(x.shape), x.dtype, x.device_mesh, tuple(x.placements), needs_grad)
    call = _constant_call(source, (mesh, tuple(placements), dtype), group, strategy, timeout)
    local = torch.ops.meshcast.reshard(x.to_local(), _token, call)
    return DTensor.from_local(
        local, mesh, tuple(placements), run_check=False, shape=x.shape, stride=x.stride()
    )


def _constant_call(
    source: tuple[Any, ...],
    goal: tuple[Any, ...],
    group: Any,
    strategy: str,
    timeout: float | timedelta | None,
) -> int:
    """Number of the call. source, goal: fields of a TensorSpec and of a ReshardGoal."""
    from ..groups.parent import parent_group, seconds
    from ..spec import TensorSpec
    from ..transfers.transfer import PlanOptions
    from .compiled import ReshardGoal, compile_call

    spec, mesh = TensorSpec(*source), goal[0]
    if spec.requires_grad and set(spec.mesh.mesh.flatten().tolist()) != set(mesh.mesh.flatten().tolist()):
        # On a shell, torch traces operations as fresh empty tensors: nothing would lead to the backward
        # transfer there, and the other ranks would wait for it.
        raise LayoutError(
            "reshard under torch.compile: with a gradient, both meshes must have the same ranks; leave the "
            "call outside the compiled function, or run it under torch.no_grad()"
        )
    parent = parent_group(group, "reshard")
    limit = seconds(timeout, parent.timeout)
    known = parent.extras.setdefault("traced", {})
    key = (source, goal, strategy, limit)
    found = known.get(key)
    if found is None:
        options = PlanOptions(strategy)
        with Caller("reshard", parent.rank):
            compiled = compile_call(
                parent, [spec], [ReshardGoal(*goal)], "reshard", options, spec_inside=True
            )
        found = known[key] = (register_call(compiled, limit), compiled)
    return found[0]


# torch._dynamo.assume_constant_result, without the import of torch._dynamo: run while tracing, not traced.
_constant_call._dynamo_marked_constant = True  # type: ignore[attr-defined]
