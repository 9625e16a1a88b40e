"""The steps common to all resharding calls: check the arguments, compile once per kind of call, start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ..errors import LayoutError
from ..groups.parent import ParentGroup
from ..layout import Layout
from ..spec import TensorSpec
from ..transfers.handle import Handle
from ..transfers.persistent import Call, PlanOptions
from .autograd import differentiable_call
from .compiled_call import Compiled, compile_call
from .memory import storage_of
from .mesh_family import slices_called
from .tensor_move import Destination, Source, positive_placements

__all__ = [
    "Request",
    "call_key",
    "compiled_call",
    "destination_of",
    "handle_of",
    "places_called",
    "source_of",
    "start",
]

_KEPT_CALLS = 1024


class Request(NamedTuple):
    """One tensor of a call as its caller gave it, unchecked."""

    x: Any
    mesh: Any
    placements: Any
    dtype: Any = None
    grad_placements: Any = None


def call_key(request: Request, needs_grad: bool) -> Any:
    """Equal for requests that compile to the same; None, or what has no hash, for arguments that are wrong
    anyway."""
    x, grad_placements = request.x, request.grad_placements
    try:
        destination = (
            request.mesh,
            tuple(request.placements),
            request.dtype,
            None if grad_placements is None else tuple(grad_placements),
        )
        source = x._spec if isinstance(x, DTensor) else (x.shape, x.dtype, x.mesh, x.placements)
        return (source, needs_grad and x.requires_grad, *destination)
    except Exception:  # compiling them says what is wrong
        return None


def places_called(source: Any, destination: Any, lost: Sequence[int] = ()) -> list[Any]:
    """Returns what names the ranks of a call refused here: a layout for each side, or what was given."""
    try:
        sides = slices_called(_mesh_of(source), _mesh_of(destination), lost)
        return [Layout(ranks, [Replicate(), Replicate()]) for ranks in sides]
    except Exception:  # whatever was given
        return [source, destination]


def _mesh_of(place: Any) -> Any:
    if isinstance(place, DeviceMesh):
        return place
    return place.device_mesh if isinstance(place, DTensor) else place.mesh


def compiled_call(
    parent: ParentGroup,
    requests: Sequence[Request],
    key: Any,
    op: str,
    options: PlanOptions,
    lost: Sequence[int] = (),
) -> Compiled:
    """Compiles the requests under `key` (None: not kept). lost: ranks of source meshes that hold nothing any
    more."""
    needs_grad = torch.is_grad_enabled()
    sources = [source_of(request.x, parent.rank, needs_grad, op) for request in requests]
    destinations = [destination_of(request, op) for request in requests]
    compiled = compile_call(parent, sources, destinations, op, options, lost=lost)
    if key is not None:
        # What was compiled has a key that can be hashed.
        if len(parent.compiled) >= _KEPT_CALLS:
            parent.compiled.pop(next(iter(parent.compiled)), None)  # the oldest
        parent.compiled[key] = compiled
    return compiled


def start(
    compiled: Compiled,
    xs: Sequence[DTensor | None],
    limit: float,
    outs: Sequence[DTensor | None] | None = None,
    *,
    driven: bool,
) -> tuple[list[DTensor], Call | None]:
    """Starts a compiled call, with autograd where it was compiled for it. driven: who calls waits at once."""
    if compiled.differentiable and outs is None:
        return differentiable_call(compiled, xs, limit, driven=driven)
    return compiled.begin(xs, limit, outs, driven=driven)


def handle_of(
    call: Call | None,
    result: Any,
    compiled: Compiled,
    xs: Sequence[DTensor | None],
    out: DTensor | None = None,
) -> Handle[Any]:
    """The handle of a started call; it watches the sources for changes. out: where the result goes. A source
    in its storage is not watched, since this very call writes there."""
    given = [x for x in xs if x is not None]
    if out is not None:
        written = storage_of(out._local_tensor)
        given = [x for x in given if storage_of(x._local_tensor) != written]
    sources = [tensor for x in given for tensor in (x, x._local_tensor)]
    return Handle(call, result, compiled.bound, sources)


def source_of(
    x: Any,
    rank: int,
    needs_grad: bool,
    op: str,
    *,
    spec_inside: bool = False,
    ranks_of: Callable[[DeviceMesh], Any] = lambda mesh: mesh,
) -> Source:
    """Checks a source. spec_inside: ranks that hold the tensor may give its spec as well. ranks_of(mesh): as
    Layout takes them."""
    if isinstance(x, DTensor):
        spec: DTensorSpec = x._spec
        order = getattr(spec, "shard_order", None)
        if order and any(tuple(sorted(entry.mesh_dims)) != tuple(entry.mesh_dims) for entry in order):
            raise LayoutError(
                f"{op}: the source shards a dimension over mesh dimensions in the order {order}; "
                "redistribute it first"
            )
        shape, dtype, mesh, placements = tuple(x.shape), x.dtype, x.device_mesh, x.placements
    elif isinstance(x, TensorSpec):
        if not isinstance(x.mesh, DeviceMesh):
            raise LayoutError(f"{op}: TensorSpec.mesh must be a DeviceMesh, found {type(x.mesh).__name__}")
        if not spec_inside and rank in x.mesh.mesh.flatten().tolist():
            raise LayoutError(
                f"{op}: rank {rank} is in the source mesh and must pass its DTensor; a TensorSpec "
                "is for ranks outside",
                rank=rank,
                op=op,
            )
        shape, dtype, mesh, placements = tuple(x.shape), x.dtype, x.mesh, tuple(x.placements)
    else:
        raise LayoutError(f"{op}: x must be a DTensor or a meshcast.TensorSpec, found {type(x).__name__}")
    layout = Layout(ranks_of(mesh), positive_placements(placements, len(shape)))
    return Source(shape, dtype, layout, mesh, needs_grad and x.requires_grad, device_type=mesh.device_type)


def destination_of(request: Request, op: str) -> Destination:
    mesh, placements, dtype = request.mesh, request.placements, request.dtype
    if not isinstance(mesh, DeviceMesh):
        raise LayoutError(f"{op}: mesh must be a DeviceMesh, found {type(mesh).__name__}")
    if isinstance(placements, str) or not isinstance(placements, Iterable):
        raise LayoutError(
            f"{op}: placements must be a sequence with one placement per mesh dimension, found {placements!r}"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise LayoutError(f"{op}: dtype must be a torch.dtype, found {dtype!r}")
    grad_placements = request.grad_placements
    return Destination(
        mesh, tuple(placements), dtype, None if grad_placements is None else tuple(grad_placements)
    )
