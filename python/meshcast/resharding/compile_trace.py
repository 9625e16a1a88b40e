"""meshcast.reshard while torch.compile traces it: the graph gets the operator of compile_op.py and the number
of a call that was compiled during the tracing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import Caller, LayoutError
from ..groups.parent import parent_group, seconds
from ..spec import TensorSpec
from ..transfers.transfer import PlanOptions
from .compile_op import new_token, register_call
from .compiled import ReshardGoal, compile_call

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["traced_reshard"]

_token = new_token()  # an input of every graph; one for all traced calls keeps their order


def traced_reshard(
    x: Any,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    group: Any,
    dtype: torch.dtype | None,
    strategy: str,
    timeout: float | timedelta | None,
) -> DTensor:
    """The arguments of meshcast.reshard; x is a DTensor on every rank."""
    if not isinstance(x, DTensor):
        raise LayoutError("reshard under torch.compile: x must be a DTensor on every rank")
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    source = (tuple(x.shape), x.dtype, x.device_mesh, tuple(x.placements), needs_grad)
    call = _constant_call(source, (mesh, tuple(placements), dtype), group, strategy, timeout)
    local = torch.ops.meshcast.reshard(x.to_local(), _token, call)
    return DTensor.from_local(
        local, mesh, tuple(placements), run_check=False, shape=x.shape, stride=x.stride()
    )


def _constant_call(
    source: tuple[Any, ...],
    goal: tuple[Any, ...],
    group: Any,
    strategy: str,
    timeout: float | timedelta | None,
) -> int:
    """Number of the call. source, goal: fields of a TensorSpec and of a ReshardGoal."""
    spec, mesh = TensorSpec(*source), goal[0]
    if spec.requires_grad and set(spec.mesh.mesh.flatten().tolist()) != set(mesh.mesh.flatten().tolist()):
        # On a shell, torch traces operations as fresh empty tensors: nothing would lead to the backward
        # transfer there, and the other ranks would wait for it.
        raise LayoutError(
            "reshard under torch.compile: with a gradient, both meshes must have the same ranks; leave the "
            "call outside the compiled function, or run it under torch.no_grad()"
        )
    parent = parent_group(group, "reshard")
    limit = seconds(timeout, parent.timeout)
    known = parent.extras.setdefault("traced", {})
    key = (source, goal, strategy, limit)
    found = known.get(key)
    if found is None:
        options = PlanOptions(strategy)
        with Caller("reshard", parent.rank):
            compiled = compile_call(
                parent, [spec], [ReshardGoal(*goal)], "reshard", options, spec_inside=True
            )
        found = known[key] = (register_call(compiled, limit), compiled)
    return found[0]


# torch._dynamo.assume_constant_result, without the import of torch._dynamo: run while tracing, not traced.
_constant_call._dynamo_marked_constant = True  # type: ignore[attr-defined]
