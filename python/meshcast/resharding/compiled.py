"""A resharding call, checked and compiled once per kind of call: its moves (one per tensor), and the transfer
of them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from ..base import checks
from ..errors import LayoutError
from ..groups.parent import ParentGroup
from ..layout import Layout
from ..planning.plan import Problem
from ..spec import TensorSpec
from ..transfers.medium import (
    REDUCTIONS,
    Casts,
    DeviceTypes,
    Ends,
    device_types_of,
    ends_of,
    fresh,
    require_gpu,
    settled,
)
from ..transfers.transfer import Call, PersistentTransfer, PlanOptions, kept_transfer, ranks_of
from .memory import overlaps
from .meshes import Destination, Source, everywhere, living, positive_placements, slices_called

__all__ = [
    "Compiled",
    "ReshardGoal",
    "Reduction",
    "TensorMove",
    "as_dtensor",
    "check_reducible",
    "compile_call",
    "compile_move",
    "compiled_call",
    "copied",
    "destination_of",
    "places_called",
    "reduced_layout",
    "reduction_inside",
    "source_of",
    "tensor_spec",
    "wire_dtype",
]


def check_reducible(layout: Layout, dtype: torch.dtype) -> None:
    """Raises LayoutError where partial values of this type cannot be reduced. A Partial mesh dimension of one
    rank reduces nothing."""
    if not layout.has_partial:
        return
    for size, placement in zip(layout.mesh_shape, layout.placements, strict=True):
        if not isinstance(placement, Partial) or size == 1:
            continue
        if placement.reduce_op not in REDUCTIONS.get(dtype, ()):
            raise LayoutError(
                f"a source of dtype {dtype} cannot be reduced by Partial({placement.reduce_op!r})"
            )


def reduced_layout(layout: Layout) -> Layout:
    """The layout once partial values are reduced."""
    if not layout.has_partial:
        return layout
    ranks = torch.tensor(layout.ranks).reshape(layout.mesh_shape)
    return Layout(ranks, [Replicate() if isinstance(p, Partial) else p for p in layout.placements])


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """The DTensor of `spec` whose part on this rank is `local`; no gradients flow into it.

    `DTensor(...)` is the same, but its first call in a process imports torch._dynamo: 0.5 s and 29 MiB with
    torch 2.13, of no other use to a rank that only receives. The import is in `__init__`, which has work only
    inside torch.export."""
    if torch.compiler.is_exporting():
        return DTensor(local, spec, requires_grad=False)
    made: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return made


def copied(x: Any) -> Any:
    """A copy of a tensor, with a gradient where x has one and gradients are recorded; what is no tensor is
    returned as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.requires_grad and torch.is_grad_enabled():
        return x.clone()
    if not isinstance(x, DTensor):
        return x.detach().clone()
    return as_dtensor(x._local_tensor.detach().clone(), x._spec)


@dataclass(frozen=True)
class Reduction:
    """Reduces a Partial source inside its own mesh before it travels. gloo cannot average, so that is a sum
    and a division."""

    placements: tuple[Placement, ...]  # reduced
    pending: DTensorSpec  # the source, with averages as sums
    divisor: int

    def run(self, local: torch.Tensor) -> torch.Tensor:
        pending = as_dtensor(local, self.pending)
        reduced = settled(pending.redistribute(self.pending.mesh, self.placements)._local_tensor)
        if self.divisor == 1:
            return reduced
        return torch.div(
            reduced, self.divisor, rounding_mode=None if reduced.is_floating_point() else "trunc"
        )


def reduction_inside(
    mesh: DeviceMesh, layout: Layout, shape: tuple[int, ...], dtype: torch.dtype
) -> Reduction:
    """The reduction of a source of this layout, shape and dtype inside its own mesh."""
    sums: list[Placement] = []
    divisor = 1
    for size, placement in zip(layout.mesh_shape, layout.placements, strict=True):
        if isinstance(placement, Partial) and placement.reduce_op == "avg":
            sums.append(Partial("sum"))
            divisor *= size
        else:
            sums.append(placement)
    pending = tensor_spec(mesh, Layout(mesh, sums), shape, dtype)
    return Reduction(tuple(reduced_layout(layout).placements), pending, divisor)


def tensor_spec(mesh: DeviceMesh, layout: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> DTensorSpec:
    """The DTensorSpec of a contiguous global tensor."""
    stride = tuple(math.prod(max(size, 1) for size in shape[d + 1 :]) for d in range(len(shape)))
    return DTensorSpec(mesh, layout.placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


@dataclass(frozen=True)
class Gradient:
    """The move of the gradient back to the source. Shapes are this rank's shards, None outside the mesh."""

    problem: Problem  # in the narrower type of both gradients
    destination_placements: tuple[Placement, ...]
    destination_shape: tuple[int, ...] | None
    source_shape: tuple[int, ...] | None
    spec: DTensorSpec  # of the source's gradient
    dtype: torch.dtype  # of the source's gradient
    ends: Ends  # of the backward transfer
    scale: float


@dataclass(frozen=True)
class TensorMove:
    """One tensor of a call on this rank. problem: what travels; ends: what the transfer is given and fills,
    itself casting where they differ from that. spec, dtype: of the result; local_shape: of its part here,
    None outside its mesh. device_types: of source and result; devices: where this rank makes tensors there,
    "cuda" being the current GPU, None torch's default."""

    problem: Problem
    spec: DTensorSpec
    dtype: torch.dtype
    local_shape: tuple[int, ...] | None
    ends: Ends
    is_holder: bool
    reduction: Reduction | None
    gradient: Gradient | None
    device_types: DeviceTypes
    devices: tuple[str | None, str | None]

    @property
    def takes_part(self) -> bool:
        return self.is_holder or self.local_shape is not None

    @property
    def is_plain(self) -> bool:
        """True where its tensors, between CPUs, need nothing but to be moved."""
        cast = self.ends.destination != self.dtype
        return self.reduction is None and not cast and self.device_types == ("cpu", "cpu")

    @property
    def ndim(self) -> int:
        return len(self.problem.shape)

    @property
    def device(self) -> str | None:
        """The device on which results are made."""
        return self.devices[1]

    @property
    def source_device(self) -> str | None:
        """The device on which gradients of the source are made."""
        return self.devices[0]

    def shell(self, dtype: torch.dtype, device: str | None) -> torch.Tensor:
        """Local tensor of a rank outside the mesh: no elements, but the global number of dimensions, which
        gradients need."""
        return torch.zeros((0,) * self.ndim, dtype=dtype, device=device)

    def allocate(self) -> DTensor:
        """The result, not yet filled."""
        if self.local_shape is None:
            local = self.shell(self.dtype, self.device)
        else:
            local = fresh(self.local_shape, self.dtype, self.device)
        return as_dtensor(local, self.spec)

    def outgoing(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the source as the transfer is given it."""
        local = local.detach()
        if type(local) is not torch.Tensor:  # plain ones, nearly all, need no check
            local = settled(local)
        if self.reduction is not None:
            local = self.reduction.run(local)
        return local if local.dtype == self.ends.source else local.to(self.ends.source)


class ReshardGoal(NamedTuple):
    """The result that a call asks for one tensor, unchecked."""

    mesh: Any
    placements: Any
    dtype: Any = None
    grad_placements: Any = None


def source_of(
    x: Any,
    rank: int,
    needs_grad: bool,
    *,
    spec_inside: bool = False,
    ranks_of: Callable[[DeviceMesh], Any] = lambda mesh: mesh,
) -> Source:
    """Checks a source. spec_inside: ranks that hold the tensor may give its spec as well. ranks_of(mesh): as
    Layout takes them."""
    if isinstance(x, DTensor):
        spec: DTensorSpec = x._spec
        order = getattr(spec, "shard_order", None)
        if order and any(tuple(sorted(entry.mesh_dims)) != tuple(entry.mesh_dims) for entry in order):
            raise LayoutError(
                f"the source shards a dimension over mesh dimensions in the order {order}; "
                "redistribute it first"
            )
        mesh = x.device_mesh
    elif isinstance(x, TensorSpec):
        mesh = x.mesh
        if not isinstance(mesh, DeviceMesh):
            raise LayoutError(f"TensorSpec.mesh must be a DeviceMesh, found {type(mesh).__name__}")
        if not spec_inside and rank in mesh.mesh.flatten().tolist():
            raise LayoutError(
                f"rank {rank} is in the source mesh and must pass its DTensor; a TensorSpec is for ranks "
                "outside"
            )
    else:
        raise LayoutError(f"x must be a DTensor or a meshcast.TensorSpec, found {type(x).__name__}")
    layout = Layout(ranks_of(mesh), positive_placements(x.placements, len(x.shape)))
    needs_grad = needs_grad and x.requires_grad
    return Source(tuple(x.shape), x.dtype, layout, mesh, needs_grad, device_type=mesh.device_type)


def destination_of(goal: ReshardGoal, source: Source, lost: Sequence[int] = ()) -> Destination:
    """Checks a goal. lost: ranks of the source mesh that hold nothing any longer."""
    mesh, placements, dtype, grad_placements = goal
    if not isinstance(mesh, DeviceMesh):
        raise LayoutError(f"mesh must be a DeviceMesh, found {type(mesh).__name__}")
    if isinstance(placements, str) or not isinstance(placements, Iterable):
        raise LayoutError(
            f"placements must be a sequence with one placement per mesh dimension, "
            f"found {checks.shown(placements)}"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise LayoutError(f"dtype must be a torch.dtype, found {checks.shown(dtype)}")
    ndim = len(source.shape)
    made = Layout(mesh, positive_placements(tuple(placements), ndim))
    if made.has_partial:
        raise LayoutError(
            f"destination placements {tuple(made.placements)} hold Partial; ask for Replicate or Shard "
            "instead"
        )
    back = made
    if grad_placements is not None:
        back = Layout(mesh, positive_placements(tuple(grad_placements), ndim))
    assert source.mesh is not None
    slices = slices_called(source.mesh, mesh, lost)
    return Destination(mesh, made, back, dtype or source.dtype, slices)


def compile_move(rank: int, source: Source, destination: Destination) -> TensorMove:
    """The move of one tensor. Raises LayoutError for what cannot be moved so."""
    shape, dtype, mesh = source.shape, destination.dtype, destination.mesh
    device_types = device_types_of(source.device_type, mesh.device_type)
    check_reducible(source.layout, source.dtype)
    sent = source.layout if source.reduced_on_the_way else reduced_layout(source.layout)
    if dtype.is_floating_point < source.dtype.is_floating_point and source.needs_grad:
        raise LayoutError(f"a value with gradient cannot become {dtype}; detach it first")
    src = everywhere(sent, destination.slices[0])
    dst = destination.wanted
    problem = Problem(shape, wire_dtype(source, dtype), src, dst)
    local_shape = dst.local_shapes(shape).get(rank)
    is_holder = src.local_shapes(shape).get(rank) is not None
    if "cuda" in (device_types[0] if is_holder else "", device_types[1] if local_shape is not None else ""):
        require_gpu(copies_only=device_types != ("cuda", "cuda"))
    reduction = None
    if sent is not source.layout and is_holder and source.mesh is not None:
        reduction = reduction_inside(source.mesh, source.layout, shape, source.dtype)
    return TensorMove(
        problem,
        tensor_spec(mesh, destination.layout, shape, dtype),
        dtype,
        local_shape,
        ends_of(source.dtype, problem.dtype, dtype, device_types),
        is_holder,
        reduction,
        _gradient(rank, source, destination) if source.needs_grad else None,
        device_types,
        _devices(device_types),
    )


def _devices(device_types: DeviceTypes) -> tuple[str | None, str | None]:
    if device_types == ("cpu", "cpu"):
        return None, None
    # A rank without GPU may be outside the mesh on GPUs, where it makes shells.
    source, destination = (
        side if side == "cpu" or torch.cuda.is_available() else None for side in device_types
    )
    return source, destination


def wire_dtype(source: Source, dtype: torch.dtype) -> torch.dtype:
    """Returns the type that the elements travel in: the narrower of both types, so that the cast happens
    where fewer bytes travel; but what is reduced on the way is reduced in the type that it has."""
    if source.reduced_on_the_way or dtype.itemsize > source.dtype.itemsize:
        return source.dtype
    return dtype


def _gradient(rank: int, source: Source, destination: Destination) -> Gradient:
    """The reverse move: destination mesh to source mesh, from a gradient of the result's type. A Partial
    source is a sum over its mesh dimension, so the gradient of each summand is the whole gradient, Replicate;
    of an average of n, one nth of it."""
    assert source.mesh is not None
    src, scale = source.layout, 1.0
    for size, placement in zip(src.mesh_shape, src.placements, strict=True):
        if isinstance(placement, Partial):
            if placement.reduce_op not in ("sum", "avg"):
                raise LayoutError(
                    f"no gradient through {placement}; only Partial('sum') and Partial('avg') have one"
                )
            scale /= size if placement.reduce_op == "avg" else 1
    outgoing, incoming = destination.gradient, reduced_layout(src)
    if outgoing.has_partial:
        raise LayoutError(
            f"grad_placements {tuple(outgoing.placements)} hold Partial; ask for Replicate or Shard instead"
        )
    shape, dtype, (at_source, at_destination) = source.shape, destination.dtype, destination.slices
    wire = min(dtype, source.dtype, key=lambda t: t.itemsize)
    return Gradient(
        problem=Problem(shape, wire, everywhere(outgoing, at_destination), everywhere(incoming, at_source)),
        destination_placements=tuple(outgoing.placements),
        destination_shape=outgoing.local_shapes(shape).get(rank),
        source_shape=incoming.local_shapes(shape).get(rank),
        spec=tensor_spec(source.mesh, incoming, shape, source.dtype),
        dtype=source.dtype,
        ends=ends_of(dtype, wire, source.dtype, (destination.mesh.device_type, source.device_type), scale),
        scale=scale,
    )


class Compiled:
    """One kind of call. transfer is None on a rank of no mesh, which only gets shells."""

    def __init__(self, moves: Sequence[TensorMove], transfer: PersistentTransfer | None) -> None:
        self.moves = tuple(moves)
        self.transfer = transfer
        # Positions of the moves that the backward transfer carries.
        self.differentiable = tuple(i for i, move in enumerate(moves) if move.gradient is not None)
        self._is_plain = all(move.is_plain for move in moves)

    def bound(self) -> float:
        """Seconds that no plan of this call can beat."""
        return self.transfer.bound() if self.transfer is not None else 0.0

    @property
    def layouts(self) -> list[Layout]:
        """Layouts of all sources and results, which name the ranks of a call."""
        return [layout for move in self.moves for layout in (move.problem.src, move.problem.dst)]

    def begin(
        self,
        xs: Sequence[Any],
        timeout: float,
        out: Any = None,
        *,
        driven: bool = False,
    ) -> tuple[list[DTensor], Call | None]:
        """Starts the transfer of xs, one per move (no DTensor on ranks outside the source). The results'
        local tensors are filled once the call has been waited for: new ones, or where there is one move that
        of `out`, if it is a DTensor. driven: the caller waits at once; else the call watches xs, except for
        what is in the storage of `out`."""
        given = isinstance(out, DTensor)
        results: list[DTensor] = [out] if given else [move.allocate() for move in self.moves]
        if self.transfer is None:
            return results, None
        call: Call | None = None
        if self._is_plain:
            call = self.transfer.launch_plain(xs, results, timeout, are_given=given, driven=driven)
        if call is None:
            call = self._begin(xs, results, timeout, given, driven)
        return results, call

    def _begin(
        self, xs: Sequence[Any], results: Sequence[DTensor], timeout: float, given: bool, driven: bool
    ) -> Call:
        """The same of tensors that are reduced, cast or copied first, and of those that are refused."""
        assert self.transfer is not None
        sources, targets = [], []
        cast: list[tuple[torch.Tensor, torch.Tensor]] = []
        for move, x, result in zip(self.moves, xs, results, strict=True):
            source = move.outgoing(x._local_tensor) if move.is_holder and isinstance(x, DTensor) else None
            target = None
            if move.local_shape is not None:
                local = target = result._local_tensor
                if move.ends.destination != move.dtype:
                    target = fresh(move.local_shape, move.ends.destination, move.device)
                    cast.append((local, target))
                if given and source is not None and overlaps(source, target):
                    # Neighbours would read what already came in from others.
                    source = source.clone()
            sources.append(source)
            targets.append(target)
        call = self.transfer.launch(sources, targets, timeout, driven=driven)
        for local, target in cast:
            call.copy_at_end(local, target)
        if given and self.moves[0].local_shape is not None:
            call.wrote(results[0])
            call.wrote(results[0]._local_tensor)
        if not driven:
            call.watch(xs, results[0] if given else None)
        return call


def compile_call(
    parent: ParentGroup,
    xs: Sequence[Any],
    goals: Sequence[ReshardGoal],
    op: str,
    options: PlanOptions,
    *,
    needs_grad: bool = True,
    spec_inside: bool = False,
    kept: bool = True,
    lost: Sequence[int] = (),
) -> Compiled:
    """Checks what was given and compiles it. Raises LayoutError before any byte moves.

    needs_grad: tensors that require a gradient get one. spec_inside: see source_of(). kept: other calls of
    this kind share the transfer and what was agreed on. lost: ranks of source meshes that no longer hold
    anything."""
    sources = [source_of(x, parent.rank, needs_grad, spec_inside=spec_inside) for x in xs]
    destinations = [destination_of(goal, source, lost) for goal, source in zip(goals, sources, strict=True)]
    if lost:
        sources = living(sources, destinations, lost)
    moves = [compile_move(parent.rank, *sides) for sides in zip(sources, destinations, strict=True)]
    if len({move.device_types for move in moves}) > 1:
        raise LayoutError("some tensors are on cpu and some on cuda; move them in separate calls")
    problems = [move.problem for move in moves]
    if not any(move.takes_part for move in moves):
        parent.private(ranks_of(problems))  # the ranks must also exist here
        return Compiled(moves, None)
    backward = [move.gradient.problem for move in moves if move.gradient is not None]
    transfer = (kept_transfer if kept else PersistentTransfer)(
        parent,
        problems,
        op,
        options,
        backward=backward or None,
        device_types=moves[0].device_types,
        casts=_casts(moves),
    )
    return Compiled(moves, transfer)


def _casts(moves: Sequence[TensorMove]) -> Casts | None:
    """Returns what the transfer of these moves and its backward cast themselves; None if nothing."""
    forth = tuple(move.ends for move in moves)
    back = tuple(move.gradient.ends for move in moves if move.gradient is not None)
    casts = any(ends.source != ends.destination for ends in (*forth, *back))
    return Casts(forth, back) if casts else None


def compiled_call(
    parent: ParentGroup,
    xs: Sequence[Any],
    goals: Sequence[ReshardGoal],
    op: str,
    options: PlanOptions,
    lost: Sequence[int],
) -> Compiled:
    """The call compiled: by an earlier call of the same kind, or now."""
    records = torch.is_grad_enabled()
    key: Any = None
    try:
        parts: list[Any] = [op, lost, options]
        for x, (mesh, placements, dtype, back) in zip(xs, goals, strict=True):
            source = x._spec if isinstance(x, DTensor) else (x.shape, x.dtype, x.mesh, x.placements)
            back = None if back is None else tuple(back)
            parts += source, records and x.requires_grad, mesh, tuple(placements), dtype, back
        key = tuple(parts)
        found: Compiled | None = parent.compiled.get(key)
    except Exception:  # what has no hash or lacks something: compiling says what is wrong with it
        found = None
    if found is None:
        found = compile_call(parent, xs, goals, op, options, needs_grad=records, lost=lost)
        if key is not None:
            parent.compiled[key] = found  # what was compiled has a key that can be hashed
    return found


def places_called(source: Any, destination: Any, lost: Sequence[int] = ()) -> list[Any]:
    """Returns what names the ranks of a call refused here: a layout for each side, or what was given."""
    try:
        sides = slices_called(_mesh_of(source), _mesh_of(destination), lost)
        return [Layout(ranks, [Replicate(), Replicate()]) for ranks in sides]
    except Exception:  # whatever was given
        return [source, destination]


def _mesh_of(place: Any) -> Any:
    if isinstance(place, DeviceMesh):
        return place
    return place.device_mesh if isinstance(place, DTensor) else place.mesh
