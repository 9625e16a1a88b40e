"""TensorSpec: what a rank knows of a tensor that it holds no part of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .errors import LayoutError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["TensorSpec"]


@dataclass(frozen=True, eq=False)
class TensorSpec:
    """Stands for a DTensor on a rank outside its mesh, where no DTensor object exists.

    shape: global shape. placements: one per dimension of `mesh`. requires_grad must be what the DTensor says
    on the ranks inside: it is part of what the ranks agree on. device: of this rank's shard, where results
    are made: of the mesh's device type, and of GPUs the current one; None says the same. Raises LayoutError
    for another device, a negative size, or something that is not a dtype.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    mesh: DeviceMesh
    placements: Sequence[Placement]
    requires_grad: bool = False
    device: torch.device | str | None = field(default=None)

    def __post_init__(self) -> None:
        try:
            shape = torch.Size(int(size) for size in self.shape)
        except (TypeError, ValueError) as cause:
            raise LayoutError(
                f"TensorSpec: shape must be a sequence of integers, found {self.shape!r}"
            ) from cause
        if any(size < 0 for size in shape):
            raise LayoutError(f"TensorSpec: sizes must not be negative, found {tuple(shape)}")
        if not isinstance(self.dtype, torch.dtype):
            raise LayoutError(f"TensorSpec: dtype must be a torch.dtype, found {self.dtype!r}")
        if self.device is not None:
            _check_device(torch.device(self.device), self.mesh)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "placements", tuple(self.placements))


def _check_device(device: torch.device, mesh: DeviceMesh) -> None:
    if device.type != mesh.device_type:
        raise LayoutError(f"TensorSpec: device is {device}, but the mesh is on {mesh.device_type}")
    if device.index is not None and device.type == "cuda" and device.index != torch.cuda.current_device():
        raise LayoutError(
            f"TensorSpec: device is {device}, but results are made on the current GPU, "
            f"cuda:{torch.cuda.current_device()}: call torch.cuda.set_device first"
        )
