"""reshard_many: several tensors in one call, planned and executed as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.distributed.tensor import DTensor

from ..errors import LayoutError
from ..groups.parent import parent_group, seconds
from ..transfers.handle import Handle
from .arguments import Request, call_key, compiled_call, handle_of, start
from .compiled_call import Compiled

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from ..spec import TensorSpec
    from ..topology import Topology

__all__ = ["reshard_many"]

_OP = "reshard_many"


@overload
def reshard_many(
    xs: Sequence[DTensor | TensorSpec],
    mesh: DeviceMesh,
    placements: Sequence[Sequence[Placement]],
    *,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    grad_placements: Sequence[Sequence[Placement]] | None = None,
    strategy: str = "auto",
    topology: Topology | None = None,
    async_op: Literal[False] = False,
    timeout: float | timedelta | None = None,
) -> list[DTensor]: ...
@overload
def reshard_many(
    xs: Sequence[DTensor | TensorSpec],
    mesh: DeviceMesh,
    placements: Sequence[Sequence[Placement]],
    *,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    grad_placements: Sequence[Sequence[Placement]] | None = None,
    strategy: str = "auto",
    topology: Topology | None = None,
    async_op: Literal[True],
    timeout: float | timedelta | None = None,
) -> Handle[list[DTensor]]: ...
def reshard_many(
    xs: Sequence[DTensor | TensorSpec],
    mesh: DeviceMesh,
    placements: Sequence[Sequence[Placement]],
    *,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    grad_placements: Sequence[Sequence[Placement]] | None = None,
    strategy: str = "auto",
    topology: Topology | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> list[DTensor] | Handle[list[DTensor]]:
    """Moves every tensor of xs to `mesh`, the i-th with placements[i], under one plan and one deadline.

    Called by every rank of all meshes involved, with the tensors in one order. The sources may be on
    different meshes, and of different shapes and dtypes. dtype, if given, is that of every result.
    grad_placements: one layout per tensor. The other arguments, gradients and errors are those of
    meshcast.reshard; a rank that is outside the mesh of one source passes a shell or a TensorSpec for it.

    Returns the results in the order of xs, or with async_op a Handle whose wait() returns them.
    """
    parent = parent_group(group, _OP)
    limit = seconds(timeout, parent.timeout)
    listed = _listed("xs", xs)
    layouts = _listed("placements", placements)
    gradients: list[Any] = (
        [None] * len(listed) if grad_placements is None else _listed("grad_placements", grad_placements)
    )
    for name, given in (("placements", layouts), ("grad_placements", gradients)):
        if len(given) != len(listed):
            raise LayoutError(f"{_OP}: {len(given)} {name} for {len(listed)} tensors; give one for each")
    if not listed:
        raise LayoutError(f"{_OP}: nothing to transfer; give at least one tensor")
    requests = [
        Request(x, mesh, where, dtype, gradient)
        for x, where, gradient in zip(listed, layouts, gradients, strict=True)
    ]
    needs_grad = torch.is_grad_enabled()
    kinds = tuple(call_key(request, needs_grad) for request in requests)
    key = None if None in kinds else (_OP, kinds, strategy, topology)
    compiled: Compiled | None = parent.compiled.get(key) if key is not None else None
    if compiled is None:
        compiled = compiled_call(parent, requests, key, limit, op=_OP, strategy=strategy, topology=topology)
    tensors = [x if isinstance(x, DTensor) else None for x in listed]
    results, launch = start(compiled, tensors, limit, driven=not async_op)
    if async_op:
        return handle_of(launch, results, compiled, tensors)
    if launch is not None:
        launch.wait()
    return results


def _listed(name: str, value: Any) -> list[Any]:
    if isinstance(value, str | torch.Tensor) or not isinstance(value, Iterable):
        raise LayoutError(f"{_OP}: {name} must be a sequence, found {type(value).__name__}")
    return list(value)
