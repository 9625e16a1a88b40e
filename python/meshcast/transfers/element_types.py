"""What the elements of a tensor can be, and what the extension does with them.

One row a type, in csrc/core/memory/element_types.def.
"""

from __future__ import annotations

import torch

from .. import _C

__all__ = ["CASTS", "REDUCTIONS"]

REDUCTIONS: dict[torch.dtype, frozenset[str]] = {
    getattr(torch, name): frozenset(reductions) for name, reductions, _ in _C.ELEMENT_TYPES if reductions
}
"""The operations by which partial values of a type can be reduced; some types lack some: truth values have no
mean, complex numbers no order."""

CASTS = frozenset(getattr(torch, name) for name, _, casts in _C.ELEMENT_TYPES if casts)
"""Between these, kernels cast while they pack and unpack."""
