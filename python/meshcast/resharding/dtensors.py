"""A local tensor as a DTensor, which torch makes at a price."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

__all__ = ["as_dtensor", "copied"]


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """The DTensor of `spec` whose part on this rank is `local`; no gradients flow into it.

    `DTensor(...)` is the same, but its first call in a process imports torch._dynamo: 0.5 s and 29 MiB with
    torch 2.13, of no other use to a rank that only receives. What does so is `__init__`, which has work only
    inside torch.export."""
    if torch.compiler.is_exporting():
        return DTensor(local, spec, requires_grad=False)
    made: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return made


def copied(x: Any) -> Any:
    """A copy of a tensor, with a gradient where x has one and gradients are recorded; what is no tensor is
    returned as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    if x.requires_grad and torch.is_grad_enabled():
        return x.clone()
    if not isinstance(x, DTensor):
        return x.detach().clone()
    return as_dtensor(x._local_tensor.detach().clone(), x._spec)
