"""Member: one tensor of a call, compiled: layouts, dtypes, the spec of its result, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .errors import LayoutError
from .layout import Layout
from .transfer import Problem, settled

__all__ = ["Destination", "Member", "Source", "compile_member", "positive_placements"]


# What a Partial source may be made of, and by what some of it cannot be reduced.
_REDUCED = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
}
_NOT_FOR = {torch.bool: {"avg"}, torch.complex64: {"min", "max"}, torch.complex128: {"min", "max"}}


@dataclass(frozen=True)
class Source:
    """A source as every rank knows it, from a DTensor or a spec. A rank outside may know its layout only:
    mesh is then None, and no gradient is possible. reduce_first: partial values are reduced inside the mesh,
    so that each rank sees what it sends."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    mesh: DeviceMesh | None
    needs_grad: bool = False
    reduce_first: bool = False


@dataclass(frozen=True)
class Destination:
    """Where a tensor goes. dtype None: that of the source; grad_placements None: see meshcast.reshard."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    dtype: torch.dtype | None = None
    grad_placements: tuple[Placement, ...] | None = None


@dataclass(frozen=True)
class Gradient:
    """How the gradient travels back. Shapes are this rank's shards, None outside the mesh."""

    destination_placements: tuple[Placement, ...]
    destination_shape: tuple[int, ...] | None
    source_shape: tuple[int, ...] | None
    spec: DTensorSpec  # of the source's gradient
    dtype: torch.dtype  # likewise
    scale: float


@dataclass(frozen=True)
class Reduction:
    """Reduces a Partial source inside its own mesh before it travels. gloo cannot average, so that is a sum
    and a division."""

    placements: tuple[Placement, ...]  # reduced
    pending: DTensorSpec  # the source, with averages as sums
    divisor: int

    def run(self, local: torch.Tensor) -> torch.Tensor:
        pending = DTensor(local, self.pending, requires_grad=False)
        reduced = settled(pending.redistribute(self.pending.mesh, self.placements)._local_tensor)
        if self.divisor == 1:
            return reduced
        return torch.div(
            reduced, self.divisor, rounding_mode=None if reduced.is_floating_point() else "trunc"
        )


@dataclass(frozen=True)
class Member:
    """One tensor of a call on this rank. local_shape: of the result here, None outside its mesh. The wire
    dtype is the narrower one of source and result: the cast happens where fewer bytes travel."""

    spec: DTensorSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    local_shape: tuple[int, ...] | None
    wire_dtype: torch.dtype
    is_holder: bool
    reduction: Reduction | None
    gradient: Gradient | None

    @property
    def takes_part(self) -> bool:
        return self.is_holder or self.local_shape is not None

    def shell(self, dtype: torch.dtype) -> torch.Tensor:
        """Local tensor of a rank outside the mesh: no elements, but the global number of dimensions, which
        gradients need."""
        return torch.zeros((0,) * len(self.shape), dtype=dtype)

    def allocate(self) -> DTensor:
        """The result, not yet filled."""
        if self.local_shape is None:
            local = self.shell(self.dtype)
        else:
            local = torch.empty(self.local_shape, dtype=self.dtype)
        return DTensor(local, self.spec, requires_grad=False)

    def outgoing(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the source as it travels."""
        local = settled(local.detach())
        if self.reduction is not None:
            local = self.reduction.run(local)
        return local if local.dtype == self.wire_dtype else local.to(self.wire_dtype)


def compile_member(
    rank: int, source: Source, destination: Destination, op: str
) -> tuple[Member, Problem, Problem | None]:
    """The member, its problem, and that of its gradient. Raises LayoutError for what is wrong with them."""
    shape, mesh = source.shape, destination.mesh
    dtype = destination.dtype or source.dtype
    for name, where in (("source", source.mesh), ("destination", mesh)):
        if where is not None and where.device_type != "cpu":
            raise LayoutError(
                f"{op}: the {name} mesh is on {where.device_type}; this build moves CPU tensors only"
            )
    pending = source.layout
    on_the_way = _can_reduce_on_the_way(pending, source.dtype, op) and not source.reduce_first
    src = pending if on_the_way else _reduced(pending)
    dst = Layout(mesh, positive_placements(destination.placements, len(shape)))
    if dst.has_partial:
        raise LayoutError(
            f"{op}: destination placements {tuple(destination.placements)} hold Partial; ask for Replicate "
            "or Shard instead"
        )
    if dtype.is_floating_point < source.dtype.is_floating_point and source.needs_grad:
        raise LayoutError(f"{op}: a value with gradient cannot become {dtype}; detach it first")
    # What is reduced on the way is reduced in the type that it has.
    narrow = dtype.itemsize <= source.dtype.itemsize and not on_the_way
    wire = dtype if narrow else source.dtype
    local_shape = dst.local_shapes(shape).get(rank)
    is_holder = src.local_shapes(shape).get(rank) is not None
    gradient = backward = None
    if source.needs_grad:
        gradient, backward = _gradient(rank, source, mesh, dst, destination.grad_placements, wire, op)
    reduction = None
    if pending.has_partial and not on_the_way and is_holder and source.mesh is not None:
        reduction = _reduction(source, src)
    member = Member(
        tensor_spec(mesh, dst, shape, dtype), shape, dtype, local_shape, wire, is_holder, reduction, gradient
    )
    return member, (shape, wire, src, dst), backward


def _can_reduce_on_the_way(pending: Layout, dtype: torch.dtype, op: str) -> bool:
    """Whether the transfer may reduce a Partial source. Plans know one operation; a source that mixes several
    is reduced inside its mesh first. Raises LayoutError for what has no reduction."""
    operations = {p.reduce_op for p in pending.placements if isinstance(p, Partial)}
    for operation in operations:
        if dtype not in _REDUCED or operation in _NOT_FOR.get(dtype, ()):
            raise LayoutError(f"{op}: a source of dtype {dtype} cannot be reduced by Partial({operation!r})")
    return len(operations) == 1


def _reduced(pending: Layout) -> Layout:
    """The layout once partial values are summed up."""
    if not pending.has_partial:
        return pending
    ranks = torch.tensor(pending.ranks).reshape(pending.mesh_shape)
    return Layout(ranks, [Replicate() if isinstance(p, Partial) else p for p in pending.placements])


def _reduction(source: Source, reduced: Layout) -> Reduction:
    assert source.mesh is not None
    sums: list[Placement] = []
    divisor = 1
    for size, placement in zip(source.layout.mesh_shape, source.layout.placements, strict=True):
        if isinstance(placement, Partial) and placement.reduce_op == "avg":
            sums.append(Partial("sum"))
            divisor *= size
        else:
            sums.append(placement)
    spec = tensor_spec(source.mesh, Layout(source.mesh, sums), source.shape, source.dtype)
    return Reduction(tuple(reduced.placements), spec, divisor)


def _gradient(
    rank: int,
    source: Source,
    mesh: DeviceMesh,
    dst: Layout,
    grad_placements: Sequence[Placement] | None,
    wire: torch.dtype,
    op: str,
) -> tuple[Gradient, Problem]:
    """The reverse problem: destination mesh to source mesh. A Partial source is a sum over its mesh
    dimension, so the gradient of each summand is the whole gradient, Replicate; of an average of n, one nth
    of it."""
    assert source.mesh is not None
    src = source.layout
    ndim, scale = len(source.shape), 1.0
    for size, placement in zip(src.mesh_shape, src.placements, strict=True):
        if isinstance(placement, Partial):
            if placement.reduce_op not in ("sum", "avg"):
                raise LayoutError(
                    f"{op}: no gradient through {placement}; only Partial('sum') and Partial('avg') have one"
                )
            scale /= size if placement.reduce_op == "avg" else 1
    forth = tuple(dst.placements) if grad_placements is None else positive_placements(grad_placements, ndim)
    outgoing = Layout(mesh, forth)
    if outgoing.has_partial:
        raise LayoutError(
            f"{op}: grad_placements {tuple(forth)} hold Partial; ask for Replicate or Shard instead"
        )
    incoming = _reduced(src)
    gradient = Gradient(
        destination_placements=forth,
        destination_shape=outgoing.local_shapes(source.shape).get(rank),
        source_shape=incoming.local_shapes(source.shape).get(rank),
        spec=tensor_spec(source.mesh, incoming, source.shape, source.dtype),
        dtype=source.dtype,
        scale=scale,
    )
    return gradient, (source.shape, wire, outgoing, incoming)


def tensor_spec(mesh: DeviceMesh, layout: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> DTensorSpec:
    """The DTensorSpec of a contiguous global tensor."""
    stride = tuple(math.prod(max(size, 1) for size in shape[d + 1 :]) for d in range(len(shape)))
    return DTensorSpec(mesh, layout.placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


def positive_placements(placements: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    """Shard(-1) as Shard(ndim - 1): equal layouts must look equal to the cache on every rank."""
    return tuple(_positive(p, ndim) for p in placements)


def _positive(placement: Placement, ndim: int) -> Placement:
    if isinstance(placement, Shard | _StridedShard) and -ndim <= placement.dim < 0:
        if isinstance(placement, _StridedShard):
            return _StridedShard(placement.dim + ndim, split_factor=placement.split_factor)
        return Shard(placement.dim + ndim)
    return placement
