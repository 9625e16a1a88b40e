"""Which memory tensors occupy: transfers write behind the back of autograd, so they must know."""

from __future__ import annotations

import torch

from .errors import LayoutError

__all__ = ["check_storage", "note_written", "overlaps"]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First address and the one behind the last."""
    first = tensor.data_ptr()
    if tensor.is_contiguous():  # nearly always; adding up strides takes several times as long
        return first, first + tensor.nbytes
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


def note_written(*tensors: torch.Tensor) -> None:
    """Lets autograd know that these were written, so that a graph that saved an old value raises."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
