"""TensorMove: one tensor of a call, compiled: layouts, dtypes, the spec of its result, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ..errors import LayoutError
from ..layout import Layout
from ..planning.plan import Problem
from ..transfers.casts import Ends, ends_of
from ..transfers.gpu_offer import DeviceTypes, device_types_of, require_gpu
from ..transfers.shards import settled
from .dtensors import as_dtensor
from .mesh_family import Slices, everywhere
from .reduction import Reduction, check_reducible, reduced_layout, reduction_inside, tensor_spec

__all__ = ["Destination", "Source", "TensorMove", "compile_move", "positive_placements", "wire_dtype"]


@dataclass(frozen=True)
class Source:
    """A source as every rank knows it, from a DTensor or a spec. A rank outside may know its layout only:
    mesh is then None, and no gradient is possible. device_type: of the mesh. reduce_first: partial values are
    reduced inside the mesh, so that each rank sees what it sends. slices: that the call has of the mesh."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    mesh: DeviceMesh | None
    needs_grad: bool = False
    reduce_first: bool = False
    device_type: str = "cpu"
    slices: Slices = ()

    @property
    def reduced_on_the_way(self) -> bool:
        """``True`` where the transfer itself reduces the partial values. Plans know one operation; a source
        that mixes several is reduced inside its mesh first."""
        return len(self.layout.reduce_ops) == 1 and not self.reduce_first


@dataclass(frozen=True)
class Destination:
    """The destination of a tensor. dtype None: that of the source; grad_placements None: see
    meshcast.reshard; slices: that the call has of the mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    dtype: torch.dtype | None = None
    grad_placements: tuple[Placement, ...] | None = None
    slices: Slices = ()


@dataclass(frozen=True)
class Gradient:
    """The move of the gradient back to the source. Shapes are this rank's shards, None outside the mesh."""

    destination_placements: tuple[Placement, ...]
    destination_shape: tuple[int, ...] | None
    source_shape: tuple[int, ...] | None
    spec: DTensorSpec  # of the source's gradient
    dtype: torch.dtype  # likewise
    wire_dtype: torch.dtype  # the narrower one of both gradients
    ends: Ends  # of the backward transfer
    scale: float


@dataclass(frozen=True)
class TensorMove:
    """One tensor of a call on this rank. local_shape: of the result here, None outside its mesh. wire_dtype:
    what travels; ends: what the transfer is given and fills, itself casting where they differ.
    device_types: of source and result; devices: where this rank makes tensors there, "cuda"
    being the current GPU, None torch's default."""

    spec: DTensorSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    local_shape: tuple[int, ...] | None
    wire_dtype: torch.dtype
    ends: Ends
    is_holder: bool
    reduction: Reduction | None
    gradient: Gradient | None
    device_types: DeviceTypes = ("cpu", "cpu")
    devices: tuple[str | None, str | None] = (None, None)

    @property
    def takes_part(self) -> bool:
        return self.is_holder or self.local_shape is not None

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
        return torch.zeros((0,) * len(self.shape), dtype=dtype, device=device)

    def allocate(self) -> DTensor:
        """The result, not yet filled."""
        if self.local_shape is None:
            local = self.shell(self.dtype, self.device)
        else:
            local = torch.empty(self.local_shape, dtype=self.dtype, device=self.device)
        return as_dtensor(local, self.spec)

    def outgoing(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the source as the transfer is given it."""
        local = settled(local.detach())
        if self.reduction is not None:
            local = self.reduction.run(local)
        return local if local.dtype == self.ends.source else local.to(self.ends.source)


def compile_move(
    rank: int, source: Source, destination: Destination, op: str
) -> tuple[TensorMove, Problem, Problem | None]:
    """The move, its problem, and that of its gradient. Raises LayoutError for what is wrong with them."""
    shape, mesh = source.shape, destination.mesh
    dtype = destination.dtype or source.dtype
    device_types = device_types_of(source.device_type, mesh.device_type, op)
    check_reducible(source.layout, source.dtype, op)
    sent = source.layout if source.reduced_on_the_way else reduced_layout(source.layout)
    made = Layout(mesh, positive_placements(destination.placements, len(shape)))
    if made.has_partial:
        raise LayoutError(
            f"{op}: destination placements {tuple(destination.placements)} hold Partial; ask for Replicate "
            "or Shard instead"
        )
    if dtype.is_floating_point < source.dtype.is_floating_point and source.needs_grad:
        raise LayoutError(f"{op}: a value with gradient cannot become {dtype}; detach it first")
    wire = wire_dtype(source, dtype)
    src, dst = everywhere(sent, source.slices), everywhere(made, destination.slices)
    local_shape = dst.local_shapes(shape).get(rank)
    is_holder = src.local_shapes(shape).get(rank) is not None
    if "cuda" in (device_types[0] if is_holder else "", device_types[1] if local_shape is not None else ""):
        require_gpu(op, copies_only=device_types != ("cuda", "cuda"))
    gradient = backward = None
    if source.needs_grad:
        narrow = min(dtype, source.dtype, key=lambda t: t.itemsize)
        gradient, backward = _gradient(rank, source, destination, made, dtype, narrow, op)
    reduction = None
    if sent is not source.layout and is_holder and source.mesh is not None:
        reduction = reduction_inside(source.mesh, source.layout, source.shape, source.dtype)
    move = TensorMove(
        tensor_spec(mesh, made, shape, dtype),
        shape,
        dtype,
        local_shape,
        wire,
        ends_of(source.dtype, wire, dtype, device_types),
        is_holder,
        reduction,
        gradient,
        device_types,
        _devices(device_types),
    )
    return move, Problem(shape, wire, src, dst), backward


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


def _gradient(
    rank: int,
    source: Source,
    destination: Destination,
    made: Layout,
    dtype: torch.dtype,
    wire: torch.dtype,
    op: str,
) -> tuple[Gradient, Problem]:
    """The reverse problem: destination mesh to source mesh, from a gradient of `dtype`. A Partial source is a
    sum over its mesh dimension, so the gradient of each summand is the whole gradient, Replicate; of an
    average of n, one nth of it. made: the layout of the result."""
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
    mesh, asked = destination.mesh, destination.grad_placements
    forth = tuple(made.placements) if asked is None else positive_placements(asked, ndim)
    outgoing = Layout(mesh, forth)
    if outgoing.has_partial:
        raise LayoutError(
            f"{op}: grad_placements {tuple(forth)} hold Partial; ask for Replicate or Shard instead"
        )
    incoming = reduced_layout(src)
    gradient = Gradient(
        destination_placements=forth,
        destination_shape=outgoing.local_shapes(source.shape).get(rank),
        source_shape=incoming.local_shapes(source.shape).get(rank),
        spec=tensor_spec(source.mesh, incoming, source.shape, source.dtype),
        dtype=source.dtype,
        wire_dtype=wire,
        ends=ends_of(dtype, wire, source.dtype, (mesh.device_type, source.device_type), scale),
        scale=scale,
    )
    whole = everywhere(outgoing, destination.slices), everywhere(incoming, source.slices)
    return gradient, Problem(source.shape, wire, *whole)


def positive_placements(placements: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    """Shard(-1) as Shard(ndim - 1): equal layouts must look equal to the cache on every rank."""
    return tuple(_positive(p, ndim) for p in placements)


def _positive(placement: Placement, ndim: int) -> Placement:
    if isinstance(placement, Shard | _StridedShard) and -ndim <= placement.dim < 0:
        if isinstance(placement, _StridedShard):
            return _StridedShard(placement.dim + ndim, split_factor=placement.split_factor)
        return Shard(placement.dim + ndim)
    return placement
