"""Partial sources: what can be reduced, and the reduction inside a mesh of those that plans do not reduce."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from ..errors import LayoutError
from ..layout import Layout
from ..transfers.element_types import REDUCTIONS
from ..transfers.shards import settled
from .dtensors import as_dtensor

__all__ = ["Reduction", "check_reducible", "reduced_layout", "reduction_inside", "tensor_spec"]


def check_reducible(layout: Layout, dtype: torch.dtype, op: str) -> None:
    """Raises LayoutError where partial values of this type cannot be reduced. A Partial mesh dimension of one
    rank reduces nothing."""
    if not layout.has_partial:
        return
    for size, placement in zip(layout.mesh_shape, layout.placements, strict=True):
        if not isinstance(placement, Partial) or size == 1:
            continue
        if placement.reduce_op not in REDUCTIONS.get(dtype, ()):
            raise LayoutError(
                f"{op}: a source of dtype {dtype} cannot be reduced by Partial({placement.reduce_op!r})"
            )


def reduced_layout(layout: Layout) -> Layout:
    """The layout once partial values are reduced."""
    if not layout.has_partial:
        return layout
    ranks = torch.tensor(layout.ranks).reshape(layout.mesh_shape)
    return Layout(ranks, [Replicate() if isinstance(p, Partial) else p for p in layout.placements])


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
