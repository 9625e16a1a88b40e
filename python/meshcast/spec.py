"""TensorSpec: what a rank knows of a tensor that it holds no part of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .base import checks
from .base.checks import typed_arguments
from .errors import LayoutError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["TensorSpec"]


@dataclass(frozen=True, eq=False)
class TensorSpec:
    """Stands for a DTensor on a rank outside its mesh, where no DTensor object exists.

    Args:
        shape: global shape.
        dtype: of the elements.
        mesh: that the tensor is on.
        placements: one per dimension of `mesh`.
        requires_grad: what the DTensor says on the ranks inside: it is part of what the ranks agree on.
        device: of this rank's shard, where results are made: of the mesh's device type, and of GPUs the
            current one; None says the same.

    Raises:
        LayoutError: another device, a negative size, or something that is not a dtype.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    mesh: DeviceMesh
    placements: Sequence[Placement]
    requires_grad: bool = False
    device: torch.device | str | None = field(default=None)

    @typed_arguments()
    def __post_init__(self) -> None:
        try:
            shape = torch.Size(int(size) for size in self.shape)
        except (TypeError, ValueError, OverflowError, RuntimeError) as cause:
            raise LayoutError(
                f"TensorSpec: shape must be a sequence of integers, found {checks.shown(self.shape)}"
            ) from cause
        if any(size < 0 for size in shape):
            raise LayoutError(f"TensorSpec: sizes must not be negative, found {tuple(shape)}")
        if not isinstance(self.dtype, torch.dtype):
            raise LayoutError(f"TensorSpec: dtype must be a torch.dtype, found {checks.shown(self.dtype)}")
        if self.device is not None:
            try:
                device = torch.device(self.device)
            except (TypeError, RuntimeError) as cause:
                raise LayoutError(f"TensorSpec: device {checks.shown(self.device)} is none") from cause
            _check_device(device, self.mesh)
        object.__setattr__(self, "shape", shape)
        placements = checks.listed("TensorSpec: placements", self.placements)
        object.__setattr__(self, "placements", placements)


def _check_device(device: torch.device, mesh: DeviceMesh) -> None:
    kind = getattr(mesh, "device_type", None)
    if device.type != kind:
        raise LayoutError(f"TensorSpec: device is {device}, but the mesh is on {kind}")
    if device.index is not None and device.type == "cuda" and device.index != torch.cuda.current_device():
        raise LayoutError(
            f"TensorSpec: device is {device}, but results are made on the current GPU, "
            f"cuda:{torch.cuda.current_device()}: call torch.cuda.set_device first"
        )
