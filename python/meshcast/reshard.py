"""reshard: a DTensor on one mesh becomes the same tensor on another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .autograd import differentiable_call
from .compiled import Compiled, Source, compile_call
from .errors import LayoutError
from .groups import ParentGroup, parent_group, seconds
from .handle import Handle, Launch
from .spec import TensorSpec
from .transfer import publish_rejection

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.tensor.placement_types import Placement

    from .topology import Topology

__all__ = ["reshard"]

_KEPT_CALLS = 1024


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
    other ranks may skip it. The meshes may be disjoint, overlap or be equal.

    Args:
        x: a DTensor, also on ranks outside its mesh that have one; there a TensorSpec will do. Its local
            tensor may be strided.
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
    parent = parent_group(group, "reshard")
    limit = seconds(timeout, parent.timeout)
    grad_placements = None if grad_placements is None else tuple(grad_placements)
    key = _key(x, mesh, placements, dtype, grad_placements, strategy, topology)
    compiled: Compiled | None = parent.compiled.get(key) if key is not None else None
    if compiled is None or (compiled.transfer is not None and compiled.transfer.evicted):
        try:
            source = _source(x, parent)
            _check_destination(mesh, placements, dtype)
            compiled = compile_call(
                parent, source, mesh, placements, dtype, grad_placements, strategy, topology
            )
        except LayoutError as error:
            _tell_others(parent, x, mesh, error, limit)
            raise
        if key is not None:
            if len(parent.compiled) >= _KEPT_CALLS:
                parent.compiled.clear()
            parent.compiled[key] = compiled
    tensor = x if isinstance(x, DTensor) else None
    launch: Launch | None
    if compiled.gradient is not None:
        result, launch = differentiable_call(compiled, tensor, limit)
    else:
        result, launch, _ = compiled.begin(tensor, limit)
    if async_op:
        sources = [] if tensor is None else [tensor, tensor._local_tensor]
        return Handle(launch, result, compiled.bound, sources)
    if launch is not None:
        launch.wait()
    return result


def _key(x: Any, mesh: Any, placements: Any, *options: Any) -> Any:
    """Equal for calls that compile to the same; None for arguments that are wrong anyway."""
    needs_grad = torch.is_grad_enabled()
    try:
        if isinstance(x, DTensor):
            key = ("reshard", x._spec, needs_grad and x.requires_grad, mesh, tuple(placements), *options)
        else:
            spec = (x.shape, x.dtype, x.mesh, x.placements)
            key = ("reshard spec", *spec, needs_grad and x.requires_grad, mesh, tuple(placements), *options)
        hash(key)
    except (AttributeError, TypeError):
        return None
    return key


def _source(x: Any, parent: ParentGroup) -> Source:
    needs_grad = torch.is_grad_enabled()
    if isinstance(x, DTensor):
        spec: DTensorSpec = x._spec
        order = getattr(spec, "shard_order", None)
        if order and any(tuple(sorted(entry.mesh_dims)) != tuple(entry.mesh_dims) for entry in order):
            raise LayoutError(
                f"reshard: the source shards a dimension over mesh dimensions in the order {order}; "
                "redistribute it first"
            )
        return Source(tuple(x.shape), x.dtype, x.device_mesh, x.placements, needs_grad and x.requires_grad)
    if isinstance(x, TensorSpec):
        if not isinstance(x.mesh, DeviceMesh):
            raise LayoutError(f"reshard: TensorSpec.mesh must be a DeviceMesh, found {type(x.mesh).__name__}")
        if parent.rank in x.mesh.mesh.flatten().tolist():
            raise LayoutError(
                f"reshard: rank {parent.rank} is in the source mesh and must pass its DTensor; a TensorSpec "
                "is for ranks outside",
                rank=parent.rank,
                op="reshard",
            )
        return Source(tuple(x.shape), x.dtype, x.mesh, tuple(x.placements), needs_grad and x.requires_grad)
    raise LayoutError(f"reshard: x must be a DTensor or a meshcast.TensorSpec, found {type(x).__name__}")


def _check_destination(mesh: Any, placements: Any, dtype: Any) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise LayoutError(f"reshard: mesh must be a DeviceMesh, found {type(mesh).__name__}")
    if isinstance(placements, str) or not isinstance(placements, Iterable):
        raise LayoutError(
            "reshard: placements must be a sequence with one placement per mesh dimension, found "
            f"{placements!r}"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise LayoutError(f"reshard: dtype must be a torch.dtype, found {dtype!r}")


def _tell_others(parent: ParentGroup, x: Any, mesh: Any, error: LayoutError, limit: float) -> None:
    """Ranks whose own arguments are right wait for this one: let them raise at once. Possible where the
    arguments say who they are."""
    origin = x.device_mesh if isinstance(x, DTensor) else getattr(x, "mesh", None)
    if not (isinstance(origin, DeviceMesh) and isinstance(mesh, DeviceMesh)):
        return
    ranks = sorted({*origin.mesh.flatten().tolist(), *mesh.mesh.flatten().tolist()})
    if parent.rank in ranks and parent.ranks.issuperset(ranks):
        publish_rejection(parent.private(ranks, "reshard"), 0, error, limit)
