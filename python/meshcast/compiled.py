"""What a reshard call compiles to, once per kind of call: layouts, dtypes, result spec and transfer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .errors import LayoutError
from .layout import Layout
from .transfer import CallNumber, Problem, Transfer, agreed_transfer, settled, touch

if TYPE_CHECKING:
    from .groups import ParentGroup
    from .handle import Launch
    from .topology import Topology

__all__ = ["Compiled", "Source", "compile_call"]


@dataclass(frozen=True)
class Source:
    """The source as every rank knows it, from a DTensor or a TensorSpec."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    needs_grad: bool


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
    """Sums up a Partial source inside its own mesh before it travels. gloo cannot average, so that is a sum
    and a division."""

    placements: tuple[Placement, ...]  # reduced
    pending: DTensorSpec  # the source, with averages as sums
    divisor: int

    def run(self, x: DTensor) -> torch.Tensor:
        pending = DTensor(settled(x._local_tensor.detach()), self.pending, requires_grad=False)
        reduced = settled(pending.redistribute(self.pending.mesh, self.placements)._local_tensor)
        return reduced if self.divisor == 1 else reduced / self.divisor


class Compiled:
    """One kind of call. transfer is None on a rank of neither mesh, which only gets a shell."""

    def __init__(
        self,
        spec: DTensorSpec,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        local_shape: tuple[int, ...] | None,
        wire_dtype: torch.dtype,
        is_holder: bool,
        reduction: Reduction | None,
        gradient: Gradient | None,
        transfer: Transfer | None,
    ) -> None:
        self.spec = spec
        self._shape, self._dtype = shape, dtype
        self.wire_dtype = wire_dtype
        self.gradient = gradient
        self.transfer = transfer
        self._local_shape = local_shape
        self._is_holder = is_holder
        self._reduction = reduction

    def shell(self, dtype: torch.dtype) -> torch.Tensor:
        """Local tensor of a rank outside the mesh: no elements, but the global number of dimensions, which
        gradients need."""
        return torch.zeros((0,) * len(self._shape), dtype=dtype)

    def bound(self) -> float:
        """Seconds that no plan of this call can beat."""
        return self.transfer.plan.lower_bound if self.transfer is not None else 0.0

    def begin(self, x: DTensor | None, timeout: float) -> tuple[DTensor, Launch | None, CallNumber | None]:
        """Starts the transfer of x; the result's local tensor is filled once the launch has ended and
        finish() ran."""
        result_dtype = self._dtype
        if self._local_shape is None:
            local = self.shell(result_dtype)
        else:
            local = torch.empty(self._local_shape, dtype=result_dtype)
        result = DTensor(local, self.spec, requires_grad=False)
        if self.transfer is None:
            return result, None, None
        touch(self.transfer)
        source = destination = None
        if self._is_holder:
            assert x is not None
            local_source = (
                settled(x._local_tensor.detach()) if self._reduction is None else self._reduction.run(x)
            )
            source = local_source.to(self.wire_dtype)
        if self._local_shape is not None:
            destination = (
                local
                if self.wire_dtype == result_dtype
                else torch.empty(self._local_shape, dtype=self.wire_dtype)
            )
        launch, number = self.transfer.launch([source], [destination], timeout)
        if destination is not None and destination is not local:
            launch.on_success(lambda: _copy(local, destination))
        return result, launch, number


def compile_call(
    parent: ParentGroup,
    source: Source,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    dtype: torch.dtype | None,
    grad_placements: Sequence[Placement] | None,
    strategy: str,
    topology: Topology | None,
) -> Compiled:
    """Checks the arguments and compiles. Raises LayoutError for what is wrong with them, before any byte
    moves."""
    shape, ndim = source.shape, len(source.shape)
    result_dtype = dtype or source.dtype
    for name, where in (("source", source.mesh), ("destination", mesh)):
        if where.device_type != "cpu":
            raise LayoutError(
                f"reshard: the {name} mesh is on {where.device_type}; this build moves CPU tensors only"
            )
    pending = Layout(source.mesh, _counted_up(source.placements, ndim))
    src = Layout(source.mesh, [Replicate() if isinstance(p, Partial) else p for p in pending.placements])
    dst = Layout(mesh, _counted_up(placements, ndim))
    if dst.has_partial:
        raise LayoutError(
            f"reshard: destination placements {tuple(placements)} hold Partial; ask for Replicate or Shard "
            "instead"
        )
    if result_dtype.is_floating_point < source.dtype.is_floating_point and source.needs_grad:
        raise LayoutError(f"reshard: a value with gradient cannot become {result_dtype}; detach it first")
    # The narrower type travels, whichever side that is.
    wire = result_dtype if result_dtype.itemsize <= source.dtype.itemsize else source.dtype
    local_shape = dst.local_shapes(shape).get(parent.rank)
    holder_shape = src.local_shapes(shape).get(parent.rank)
    spec = _spec(mesh, dst, shape, result_dtype)
    gradient = backward = None
    if source.needs_grad:
        gradient, backward = _gradient(parent, source, pending, mesh, dst, grad_placements, wire)
    transfer = None
    if local_shape is not None or holder_shape is not None:
        problem: Problem = (shape, wire, src, dst)
        transfer = agreed_transfer(
            parent, problem, backward, op="reshard", strategy=strategy, topology=topology
        )
    else:
        parent.private(sorted({*src.ranks, *dst.ranks}), "reshard")  # the ranks must exist here as well
    reduction = _reduction(source, pending, src) if pending.has_partial else None
    return Compiled(
        spec, shape, result_dtype, local_shape, wire, holder_shape is not None, reduction, gradient, transfer
    )


def _reduction(source: Source, pending: Layout, reduced: Layout) -> Reduction:
    sums: list[Placement] = []
    divisor = 1
    for size, placement in zip(pending.mesh_shape, pending.placements, strict=True):
        if isinstance(placement, Partial) and placement.reduce_op == "avg":
            sums.append(Partial("sum"))
            divisor *= size
        else:
            sums.append(placement)
    spec = _spec(source.mesh, Layout(source.mesh, sums), source.shape, source.dtype)
    return Reduction(tuple(reduced.placements), spec, divisor)


def _gradient(
    parent: ParentGroup,
    source: Source,
    src: Layout,
    mesh: DeviceMesh,
    dst: Layout,
    grad_placements: Sequence[Placement] | None,
    wire: torch.dtype,
) -> tuple[Gradient, Problem]:
    """The reverse problem: destination mesh to source mesh. A Partial source is a sum over its mesh
    dimension, so the gradient of each summand is the whole gradient, Replicate; of an average of n, one nth
    of it."""
    ndim, scale = len(source.shape), 1.0
    back: list[Placement] = []
    for size, placement in zip(src.mesh_shape, src.placements, strict=True):
        if isinstance(placement, Partial):
            if placement.reduce_op not in ("sum", "avg"):
                raise LayoutError(
                    f"reshard: no gradient through {placement}; only Partial('sum') and Partial('avg') have "
                    "one"
                )
            scale /= size if placement.reduce_op == "avg" else 1
            back.append(Replicate())
        else:
            back.append(placement)
    forth = tuple(dst.placements) if grad_placements is None else _counted_up(grad_placements, ndim)
    outgoing = Layout(mesh, forth)
    if outgoing.has_partial:
        raise LayoutError(
            f"reshard: grad_placements {tuple(forth)} hold Partial; ask for Replicate or Shard instead"
        )
    incoming = Layout(source.mesh, back)
    gradient = Gradient(
        destination_placements=forth,
        destination_shape=outgoing.local_shapes(source.shape).get(parent.rank),
        source_shape=incoming.local_shapes(source.shape).get(parent.rank),
        spec=_spec(source.mesh, incoming, source.shape, source.dtype),
        dtype=source.dtype,
        scale=scale,
    )
    return gradient, (source.shape, wire, outgoing, incoming)


def _spec(mesh: DeviceMesh, layout: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> DTensorSpec:
    stride = tuple(math.prod(max(size, 1) for size in shape[d + 1 :]) for d in range(len(shape)))
    return DTensorSpec(mesh, layout.placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


def _copy(to: torch.Tensor, from_: torch.Tensor) -> None:
    with torch.no_grad():
        to.copy_(from_)


def _counted_up(placements: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    """Shard(-1) as Shard(ndim - 1): equal layouts must look equal to the cache on every rank."""
    return tuple(_positive(p, ndim) for p in placements)


def _positive(placement: Placement, ndim: int) -> Placement:
    if isinstance(placement, Shard | _StridedShard) and -ndim <= placement.dim < 0:
        if isinstance(placement, _StridedShard):
            return _StridedShard(placement.dim + ndim, split_factor=placement.split_factor)
        return Shard(placement.dim + ndim)
    return placement
