"""reshard: a DTensor on one mesh becomes the same tensor on another."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch.distributed.tensor import DTensor

from ..errors import LayoutError
from ..groups.parent import parent_group, seconds
from ..transfers.handle import Handle
from .arguments import Request, call_key, compiled_call, handle_of, start
from .compile_trace import traced_reshard
from .compiled_call import Compiled

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from ..spec import TensorSpec
    from ..topology import Topology

__all__ = ["reshard"]

_OP = "reshard"


@overload
def reshard(
    x: DTensor | TensorSpec,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    grad_placements: Sequence[Placement] | None = None,
    strategy: str = "auto",
    topology: Topology | None = None,
    async_op: Literal[False] = False,
    timeout: float | timedelta | None = None,
) -> DTensor: ...
@overload
def reshard(
    x: DTensor | TensorSpec,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    grad_placements: Sequence[Placement] | None = None,
    strategy: str = "auto",
    topology: Topology | None = None,
    async_op: Literal[True],
    timeout: float | timedelta | None = None,
) -> Handle[DTensor]: ...
def reshard(
    x: DTensor | TensorSpec,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    grad_placements: Sequence[Placement] | None = None,
    strategy: str = "auto",
    topology: Topology | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> DTensor | Handle[DTensor]:
    """Moves x to `mesh` with `placements` (one per mesh dimension, Shard or Replicate).

    Called by every rank of both meshes, in one order that is the same on all ranks and across all groups;
    other ranks may skip it. The meshes may be disjoint, overlap or be equal, and each of them on CPUs or on
    GPUs (docs/cuda.md says what waits for what).

    Args:
        x: a DTensor, also on ranks outside its mesh that have one; there a TensorSpec will do. Its local
            tensor may be strided. Under Partial(op) the values of all ranks are reduced on the way, in the
            dtype of x; sums and products of floats depend on the order, which is the plan's.
        group: process group that holds both meshes; None for the default group.
        dtype: type of the result; the cast happens on the side where fewer bytes travel.
        grad_placements: layout on `mesh` in which the gradient of the result travels back; default:
            `placements`. An incoming gradient of another layout is first redistributed inside `mesh`.
        strategy, topology: see meshcast.plan. Without a topology the hosts of the ranks are found out and
            their rates assumed.
        async_op: return a Handle at once; handle.wait() gives the result.
        timeout: seconds or timedelta for the whole call, and for its backward; None for the group's.

    Returns:
        DTensor on `mesh` of the global shape of x. Ranks outside `mesh` hold an empty local tensor that
        carries the autograd graph, so that every rank can call backward (see meshcast.backward). The gradient
        of a Partial('sum') source is Replicate.

    Raises:
        LayoutError: bad shape, placement, mesh, rank or dtype; raised before any byte moves, on all ranks
            that called.
        PlanMismatchError: the ranks called with different arguments; prints both sides.
        DeadlineExceededError, PeerLostError, AbortedError: see meshcast.errors.
    """
    if torch.compiler.is_compiling():
        if async_op or topology is not None or grad_placements is not None:
            raise LayoutError(
                "reshard under torch.compile: async_op, topology and grad_placements are not supported"
            )
        return traced_reshard(x, mesh, placements, group, dtype, strategy, timeout)
    parent = parent_group(group, _OP)
    limit = seconds(timeout, parent.timeout)
    request = Request(x, mesh, placements, dtype, grad_placements)
    kind = call_key(request, torch.is_grad_enabled())
    key = None if kind is None else (_OP, kind, strategy, topology)
    compiled: Compiled | None = parent.compiled.get(key) if key is not None else None
    if compiled is None:
        compiled = compiled_call(parent, [request], key, limit, op=_OP, strategy=strategy, topology=topology)
    xs = [x if isinstance(x, DTensor) else None]
    results, launch = start(compiled, xs, limit, driven=not async_op)
    if async_op:
        return handle_of(launch, results[0], compiled, xs)
    if launch is not None:
        launch.wait()
    return results[0]
