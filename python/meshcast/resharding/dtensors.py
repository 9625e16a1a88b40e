"""A local tensor as a DTensor, which torch makes at a price."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

__all__ = ["as_dtensor"]


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """The DTensor of `spec` whose part on this rank is `local`; no gradients flow into it.

    `DTensor(...)` is the same, but its first call in a process imports torch._dynamo: 0.5 s and 29 MiB with
    torch 2.13, of no other use to a rank that only receives. What does so is `__init__`, which has work only
    inside torch.export."""
    if torch.compiler.is_exporting():
        return DTensor(local, spec, requires_grad=False)
    made: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return made
