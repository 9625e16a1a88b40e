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
from ..transfers.medium import fresh, settled
from .compiled import as_dtensor

if TYPE_CHECKING:
    from ..transfers.transfer import Call, CallNumber
    from .compiled import Compiled, TensorMove

__all__ = ["backward", "differentiable_call"]


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
    """One differentiable reshard on this rank. It leads to no graph: a chain and what its token leads to are
    freed at once when it ends, not by the garbage collector."""

    __slots__ = ("compiled", "driven", "number", "position", "timeout")

    def __init__(self, compiled: Compiled, timeout: float, position: int, driven: bool) -> None:
        self.compiled = compiled
        self.timeout = timeout
        self.position = position  # in its chain
        self.driven = driven
        self.number: CallNumber | None = None  # once it has begun; None on a rank of neither mesh

    def check_order(self, chain: _Chain, grad_token: torch.Tensor | None) -> None:
        """The engine reaches the last call first, and every other one through the token of its successor."""
        if grad_token is not None or self.position == len(chain.calls) - 1:
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
                None if shape is None else fresh(shape, gradient.ends.destination, move.source_device)
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
                # Sent when this has returned, while autograd may keep the same memory as a .grad.
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
    """token, visit, chain, *xs -> next token, call, *ys"""

    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, visit: _Visit, chain: _Chain | None, *xs: Any
    ) -> tuple[Any, ...]:
        ctx.visit, ctx.chain = visit, chain
        ctx.has_input = [isinstance(x, DTensor) for x in xs]
        ctx.set_materialize_grads(False)
        # Saved so that a second backward without retain_graph also raises here, on every rank.
        ctx.save_for_backward(token)
        compiled = visit.compiled
        ys, call = compiled.begin(xs, visit.timeout, driven=visit.driven)
        if call is not None:
            visit.number = call.number
        if len(compiled.differentiable) < len(ys):
            carried = set(compiled.differentiable)
            ctx.mark_non_differentiable(*(y for i, y in enumerate(ys) if i not in carried))
        return token.detach(), call, *ys

    @staticmethod
    def backward(ctx: Any, grad_token: torch.Tensor | None, _: None, *grads: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise MeshcastError(
                "reshard has no second derivative: create_graph=True is not supported", op="reshard backward"
            )
        (token,) = ctx.saved_tensors
        visit: _Visit = ctx.visit
        if ctx.chain is not None:
            visit.check_order(ctx.chain, grad_token)
            _end(ctx.chain)
        grad_xs: list[Any] = [None] * len(ctx.has_input)
        if visit.number is None or not visit.number.failed:  # else there was no value: no gradient either
            reached = zip(visit.compiled.differentiable, visit.reverse(grads), strict=True)
            for index, grad_x in reached:
                if ctx.has_input[index]:
                    grad_xs[index] = grad_x
        return torch.zeros_like(token), None, None, *grad_xs


def _apply(token: torch.Tensor, visit: _Visit, chain: _Chain | None, xs: Sequence[Any]) -> tuple[Any, ...]:
    if torch._C._are_functorch_transforms_active():
        return _Reshard.apply(token, visit, chain, *xs)
    # The same without a check for what a transform of torch.func has left behind, which is no DTensor. The
    # check costs 2 us.
    return super(torch.autograd.Function, _Reshard).apply(token, visit, chain, *xs)


def differentiable_call(
    compiled: Compiled, xs: Sequence[Any], timeout: float, *, driven: bool
) -> tuple[list[DTensor], Call | None]:
    """Begins a call whose results carry the graph; an x is a DTensor where this rank has one. driven: the
    caller waits at once."""
    global _current, _retained
    if compiled.transfer is None:
        alone = _Visit(compiled, timeout, 0, driven)
        _, _, *ys = _apply(torch.zeros((), requires_grad=True), alone, None, xs)
        return ys, None
    with _lock:
        chain = _current if _current is not None else _Chain()
        visit = _Visit(compiled, timeout, len(chain.calls), driven)
        chain.token, call, *ys = _apply(chain.token, visit, chain, xs)
        chain.calls.append(visit)
        if _retained is not None:
            _retained.token = torch.zeros(())  # its calls refer to the chain: only this breaks the circle
        _current, _retained = chain, None
    return ys, call


def backward(*roots: torch.Tensor | None, retain_graph: bool = False) -> None:
    """Runs autograd over the local losses and over every reshard since the last backward, in the same way on
    every rank.

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
        if chain is not None:
            _end(chain)
    if retain_graph and chain is not None:
        with _lock:
            if _current is None:
                chain.token = token
                _retained = chain


def _end(chain: _Chain) -> None:
    """The chain takes no further calls and releases the graph."""
    global _current, _retained
    with _lock:
        if _current is chain:
            _current = None
        if _retained is chain:
            _retained = None
    chain.token = torch.zeros(())
