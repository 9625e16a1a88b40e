"""enable_dtensor_redistribute: DTensor.redistribute across meshes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from ..base import checks
from ..errors import LayoutError
from ..groups.parent import raise_refused
from .reshard import reshard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["enable_dtensor_redistribute"]


def enable_dtensor_redistribute(enabled: bool = True) -> None:
    """Lets x.redistribute(other_mesh, placements) reshard, where torch raises "Cross device mesh comm not
    supported yet!". Calls on the mesh of x stay torch's own.

    Opt in, for the whole process; False takes it back. Every rank of both meshes makes the call. async_op
    returns the finished tensor; forward_dtype is the dtype of the result. Group, strategy, topology and
    timeout are the defaults of meshcast.reshard.

    Raises:
        LayoutError: `enabled` is neither True nor False.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        meshcast.enable_dtensor_redistribute()
        source, target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        x = distribute_tensor(torch.ones(4, 2), source, [Shard(0)])
        y = x.redistribute(target, [Replicate()])
        assert y.device_mesh == target
        meshcast.enable_dtensor_redistribute(False)
    """
    if not isinstance(enabled, bool):
        raise LayoutError(
            f"enable_dtensor_redistribute: enabled {checks.shown(enabled)}: expected True or False"
        )
    current: Any = DTensor.redistribute
    original = getattr(current, "_meshcast_original", None)
    if not enabled:
        if original is not None:
            DTensor.redistribute = original  # type: ignore[method-assign]
        return
    if original is not None:
        return

    @functools.wraps(current)
    def redistribute(
        self: DTensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        if device_mesh is None or placements is None or device_mesh == self.device_mesh:
            return current(self, device_mesh, placements, **options)
        unknown = {name for name, value in options.items() if value} - {"async_op", "forward_dtype"}
        if unknown:
            error = TypeError(f"redistribute to another mesh takes no {', '.join(sorted(unknown))}")
            try:
                raise_refused(error, "redistribute", [self, device_mesh])
            except LayoutError:
                raise error from None
        return reshard(self, device_mesh, placements, dtype=options.get("forward_dtype"))

    redistribute._meshcast_original = current  # type: ignore[attr-defined]
    DTensor.redistribute = redistribute  # type: ignore[method-assign]
