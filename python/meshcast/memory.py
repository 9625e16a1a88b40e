"""Which memory tensors occupy: transfers write behind the back of autograd, so they must know."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from .errors import LayoutError

__all__ = ["bump_version", "check_storage", "overlaps"]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First address and the one behind the last."""
    first = tensor.data_ptr()
    elements = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (elements + 1) * tensor.element_size()


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the address ranges of two tensors meet. Interleaved ones count: nobody is harmed by a copy."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    a_first, a_end = _extent(a)
    b_first, b_end = _extent(b)
    return a_first < b_end and b_first < a_end


def check_storage(tensor: torch.Tensor, op: str) -> None:
    """Raises LayoutError for a tensor that has several elements at one address, as expand() makes them."""
    if tensor.numel() and torch._debug_has_internal_overlap(tensor) == 1:
        raise LayoutError(
            f"{op}: the output of shape {tuple(tensor.shape)} and strides {tensor.stride()} holds several "
            "elements at one address; give one with memory for each element, for example a clone()",
            op=op,
        )


def bump_version(out: DTensor) -> None:
    """Lets autograd know that `out` was written, so that a graph that saved its old value raises."""
    for tensor in (out, out._local_tensor):
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
