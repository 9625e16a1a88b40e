"""Gradients of reshard: the reverse transfer, and the tokens that keep reverse transfers in one order on all
ranks.

Ranks relay for each other, so two ranks that run the backward of two reshards in opposite order can wait for
each other for ever. Each differentiable call therefore takes a hidden token and returns the next one. One
chain of tokens runs through all calls of this process, whatever their group: the calls have one order on all
ranks, so the autograd engine runs their backward in exactly the reverse of it, on every rank. Chains per
group would leave the order between groups to the engine, and ranks in both could still wait for each other.

A chain ends when the first of its backwards runs; the next call starts a new one, so that no graph outlives
its step. Calls under no_grad, or of values without gradient, take no part.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import LayoutError, MeshcastError
from ..transfers.medium import settled
from .memory import as_dtensor

if TYPE_CHECKING:
    from ..transfers.transfer import Call, CallNumber
    from .compiled import Compiled, TensorMove

__all__ = ["backward", "differentiable_call", "start"]


class _Chain:
    """Calls that one backward pass visits, in call order; the last token leads to all of them."""

    def __init__(self) -> None:
        self.calls: list[_Visit] = []
        self.token = torch.zeros((), requires_grad=True)


_lock = threading.Lock()
_current: _Chain | None = None  # takes further calls
_retained: _Chain | None = (
    None  # ended by meshcast.backward(retain_graph=True), can be run again until the next call
)


class _Visit:
    """One differentiable reshard on this rank."""

    def __init__(self, compiled: Compiled, timeout: float, chain: _Chain | None, driven: bool) -> None:
        self.compiled = compiled
        self.timeout = timeout
        self.driven = driven
        self.chain = chain  # None on a rank of neither mesh
        self.position = len(chain.calls) if chain is not None else 0
        self.launch: Call | None = None
        self.number: CallNumber | None = None

    def check_order(self, grad_token: torch.Tensor | None) -> None:
        """The engine reaches the last call first, and every other one through the token of its successor."""
        chain = self.chain
        if chain is None or grad_token is not None or self.position == len(chain.calls) - 1:
            return
        later = chain.calls[self.position + 1 :]
        error = MeshcastError(
            f"backward reached reshard {self.position + 1} of {len(chain.calls)} without {len(later)} later "
            "ones: the roots of this "
            "backward do not use their results. Ranks that differ here would wait for each other for ever; "
            "call "
            "meshcast.backward(*losses) once, with all losses of the step, on every rank.",
            op="reshard backward",
        )
        for call in (self, *later):
            call.refuse_reverse(error)
        raise error

    def refuse_reverse(self, error: Exception) -> None:
        """Lets the other ranks of this call's backward raise at once."""
        if self.compiled.transfer is not None and self.number is not None:
            self.compiled.transfer.reject_reverse(self.number, error, self.timeout)

    def destination_gradient(self, move: TensorMove, grad: Any) -> torch.Tensor | None:
        """This rank's shard of the incoming gradient, in the agreed layout; zeros where the value was not
        used."""
        gradient, spec = move.gradient, move.spec
        assert gradient is not None
        if gradient.destination_shape is None:
            return None
        if grad is None:
            return torch.zeros(gradient.destination_shape, dtype=gradient.ends.source, device=move.device)
        if not isinstance(grad, DTensor) or grad.device_mesh != spec.mesh:
            raise LayoutError(
                f"reshard backward: expected a DTensor gradient on {spec.mesh}, found {type(grad).__name__}"
            )
        if grad.placements != gradient.destination_placements:
            grad = grad.redistribute(spec.mesh, gradient.destination_placements)
        local = settled(grad._local_tensor)
        if tuple(local.shape) != gradient.destination_shape:
            raise LayoutError(
                "reshard backward: the gradient's shard does not fit its layout: expected "
                f"{gradient.destination_shape}, found "
                f"{tuple(local.shape)}"
            )
        return local.to(gradient.ends.source)

    def reverse(self, grads: Sequence[Any]) -> list[DTensor]:
        """Runs the reverse transfer of all differentiable moves; waits only where this rank needs a
        result."""
        compiled = self.compiled
        moves = [compiled.moves[i] for i in compiled.differentiable]
        incoming: list[torch.Tensor | None] = []
        for move in moves:
            gradient = move.gradient
            assert gradient is not None
            shape = gradient.source_shape
            incoming.append(
                None
                if shape is None
                else torch.empty(shape, dtype=gradient.ends.destination, device=move.source_device)
            )
        if compiled.transfer is not None:
            assert self.number is not None
            try:
                outgoing = [
                    self.destination_gradient(move, grads[i])
                    for move, i in zip(moves, compiled.differentiable, strict=True)
                ]
            except Exception as error:
                self.refuse_reverse(error)
                raise
            waits = any(local is not None for local in incoming)
            if not waits:
                # Sent when this has returned, while autograd may keep the same memory as somebody's .grad.
                outgoing = [
                    local.clone() if local is not None and _shares(local, grads[i]) else local
                    for local, i in zip(outgoing, compiled.differentiable, strict=True)
                ]
            launch = compiled.transfer.launch_reverse(
                self.number, outgoing, incoming, self.timeout, driven=waits
            )
            if waits:
                launch.wait()
        return [_gradient(move, local) for move, local in zip(moves, incoming, strict=True)]


def _shares(local: torch.Tensor, grad: Any) -> bool:
    if not isinstance(grad, DTensor):
        return False
    return local.untyped_storage().data_ptr() == settled(grad._local_tensor).untyped_storage().data_ptr()


def _gradient(move: TensorMove, local: torch.Tensor | None) -> DTensor:
    gradient = move.gradient
    assert gradient is not None
    if local is None:
        return as_dtensor(move.shell(gradient.dtype, move.source_device), gradient.spec)
    if gradient.scale != 1.0:
        local.mul_(gradient.scale)
    return as_dtensor(local.to(gradient.dtype), gradient.spec)


class _Reshard(torch.autograd.Function):
    """token, call, *xs -> next token, *ys"""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, call: _Visit, *xs: DTensor | None) -> tuple[Any, ...]:
        ctx.call = call
        ctx.has_input = [x is not None for x in xs]
        ctx.set_materialize_grads(False)
        # Saved so that a second backward without retain_graph raises here as well, alike on every rank.
        ctx.save_for_backward(token)
        ys, call.launch = call.compiled.begin(xs, call.timeout, driven=call.driven)
        call.number = None if call.launch is None else call.launch.number
        carried = set(call.compiled.differentiable)
        if len(carried) < len(ys):
            ctx.mark_non_differentiable(*(y for i, y in enumerate(ys) if i not in carried))
        return torch.zeros(()), *ys

    @staticmethod
    def backward(ctx: Any, grad_token: torch.Tensor | None, *grads: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise MeshcastError(
                "reshard has no second derivative: create_graph=True is not supported", op="reshard backward"
            )
        (token,) = ctx.saved_tensors
        call: _Visit = ctx.call
        call.check_order(grad_token)
        _end(call.chain)
        grad_xs: list[Any] = [None] * len(ctx.has_input)
        if call.launch is None or call.launch.error is None:  # else there was no value: no gradient either
            for index, grad_x in zip(call.compiled.differentiable, call.reverse(grads), strict=True):
                if ctx.has_input[index]:
                    grad_xs[index] = grad_x
        return torch.zeros_like(token), None, *grad_xs


def differentiable_call(
    compiled: Compiled, xs: Sequence[DTensor | None], timeout: float, *, driven: bool
) -> tuple[list[DTensor], Call | None]:
    """Begins a call whose results carry the graph; an x is None on ranks that know only its spec. driven: the
    caller waits at once."""
    global _current, _retained
    if compiled.transfer is None:
        alone = _Visit(compiled, timeout, None, driven)
        _, *ys = _Reshard.apply(torch.zeros((), requires_grad=True), alone, *xs)
        return ys, None
    with _lock:
        chain = _current if _current is not None else _Chain()
        call = _Visit(compiled, timeout, chain, driven)
        token, *ys = _Reshard.apply(chain.token, call, *xs)
        chain.token = token
        chain.calls.append(call)
        if _retained is not None:
            _retained.token = torch.zeros(())  # its calls refer to the chain: only this breaks the circle
        _current, _retained = chain, None
    return ys, call.launch


def backward(*roots: torch.Tensor | None, retain_graph: bool = False) -> None:
    """Runs autograd over the local losses and over every reshard since the last backward, on every rank
    alike.

    Every rank of all meshes involved calls it once per step. Each reshard of the step runs its reverse
    exactly once, in reverse call order, with zeros for results that no root uses here.

    Args:
        roots: this rank's losses (scalars), any number, also none; None and values without gradient are
            passed over.
        retain_graph: keep the graph, so that it can be called again for the same reshards.

    Raises what torch.autograd.backward raises, and the typed errors of the reverse transfers.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        source, target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        w = distribute_tensor(torch.ones(4, 2), source, [Shard(0)]).requires_grad_()
        y = meshcast.reshard(w, target, [Replicate()])
        meshcast.backward((3 * y.to_local()).sum())  # on all ranks; those of `source` add nothing
        assert bool((w.grad.to_local() == 3).all())
    """
    global _retained
    tensors = [root for root in roots if isinstance(root, torch.Tensor) and root.requires_grad]
    gradients: list[torch.Tensor | None] = [None] * len(tensors)
    with _lock:
        chain = _current if _current is not None else _retained
    if chain is not None:
        token = chain.token
        tensors.append(token)
        gradients.append(torch.zeros_like(token))
    if not tensors:
        return
    try:
        torch.autograd.backward(tensors, gradients, retain_graph=retain_graph)
    finally:
        _end(chain)
    if retain_graph and chain is not None:
        with _lock:
            if _current is None:
                chain.token = token
                _retained = chain


def _end(chain: _Chain | None) -> None:
    """The chain takes no further calls and lets go of the graph."""
    global _current, _retained
    if chain is None:
        return
    with _lock:
        if _current is chain:
            _current = None
        if _retained is chain:
            _retained = None
    chain.token = torch.zeros(())


def start(
    compiled: Compiled,
    xs: Sequence[DTensor | None],
    limit: float,
    outs: Sequence[DTensor | None] | None = None,
    *,
    driven: bool,
) -> tuple[list[DTensor], Call | None]:
    """Starts a compiled call, with autograd where it was compiled for it. driven: who calls waits at once."""
    if compiled.differentiable and outs is None:
        return differentiable_call(compiled, xs, limit, driven=driven)
    return compiled.begin(xs, limit, outs, driven=driven)
