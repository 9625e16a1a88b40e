"""reshard_: into a tensor that exists already."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.distributed.tensor import DTensor

from ..errors import LayoutError
from ..groups.parent import parent_group, seconds
from ..spec import TensorSpec
from ..transfers.handle import Handle
from .arguments import Request, call_key, compiled_call, handle_of, start, tell_others
from .compiled_call import Compiled
from .memory import check_storage

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..topology import Topology

__all__ = ["reshard_"]

_OP = "reshard_"
Out = DTensor | TensorSpec


@overload
def reshard_(
    out: Out,
    x: DTensor | TensorSpec,
    *,
    group: dist.ProcessGroup | None = None,
    strategy: str = "auto",
    topology: Topology | None = None,
    async_op: Literal[False] = False,
    timeout: float | timedelta | None = None,
) -> Out: ...
@overload
def reshard_(
    out: Out,
    x: DTensor | TensorSpec,
    *,
    group: dist.ProcessGroup | None = None,
    strategy: str = "auto",
    topology: Topology | None = None,
    async_op: Literal[True],
    timeout: float | timedelta | None = None,
) -> Handle[Out]: ...
def reshard_(
    out: Out,
    x: DTensor | TensorSpec,
    *,
    group: dist.ProcessGroup | None = None,
    strategy: str = "auto",
    topology: Topology | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Out | Handle[Out]:
    """Fills `out` with the values of x; mesh, placements and dtype are those of `out`.

    Args:
        out: DTensor of the global shape of x, any strides under which each element of a local tensor has an
            address of its own. On ranks outside its mesh a shell or a TensorSpec.
        x: as for meshcast.reshard. It may share memory with `out`: this rank's shard is then copied first.
            In one storage with `out`, it is not watched for changes before wait().

    No gradient is recorded: outside torch.no_grad(), neither may require one. The version counter of `out`
    goes up, so that a graph that saved its old values raises. After an error the contents of `out` are
    undefined. Returns `out`, or with async_op a Handle whose wait() returns it.

    Raises:
        LayoutError: also where shapes differ, or several elements of `out` share an address; and where that
            takes too long to find out, as it can for strides that are no view's.
        Others as meshcast.reshard.
    """
    parent = parent_group(group, _OP)
    limit = seconds(timeout, parent.timeout)
    request = _request(out, x)
    try:
        _check(out, x)
    except LayoutError as error:
        tell_others(parent, [request], error, limit, _OP)
        raise
    kind = call_key(request, needs_grad=False)
    key = None if kind is None else (_OP, kind, strategy, topology)
    compiled: Compiled | None = parent.compiled.get(key) if key is not None else None
    if compiled is None:
        with torch.no_grad():
            compiled = compiled_call(
                parent, [request], key, limit, op=_OP, strategy=strategy, topology=topology
            )
    xs = [x if isinstance(x, DTensor) else None]
    outs = [out if isinstance(out, DTensor) else None]
    with torch.no_grad():
        _, launch = start(compiled, xs, limit, outs, driven=not async_op)
    if async_op:
        return handle_of(launch, out, compiled, xs, outs[0])
    if launch is not None:
        launch.wait()
    return out


def _request(out: Any, x: Any) -> Request:
    if isinstance(out, DTensor):
        return Request(x, out.device_mesh, out.placements, out.dtype)
    if isinstance(out, TensorSpec):
        return Request(x, out.mesh, out.placements, out.dtype)
    raise LayoutError(f"{_OP}: out must be a DTensor or a meshcast.TensorSpec, found {type(out).__name__}")


def _check(out: Out, x: Any) -> None:
    if isinstance(x, DTensor | TensorSpec):
        if tuple(out.shape) != tuple(x.shape):
            raise LayoutError(f"{_OP}: out has shape {tuple(out.shape)}, but x {tuple(x.shape)}")
        if torch.is_grad_enabled() and (out.requires_grad or x.requires_grad):
            raise LayoutError(
                f"{_OP} records no gradient, but one is asked for; call it under torch.no_grad(), or use "
                "reshard"
            )
    if isinstance(out, DTensor):
        check_storage(out._local_tensor, _OP)
