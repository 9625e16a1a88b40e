"""The memory that tensors occupy, and DTensors over it: transfers write behind the back of autograd."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from ..base.strides import Region, meet, repeats
from ..errors import LayoutError
from ..transfers.medium import settled

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

__all__ = [
    "as_dtensor",
    "check_outs",
    "check_storage",
    "copied",
    "near",
    "note_written",
    "overlaps",
    "storage_of",
]


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


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First address and the one behind the last."""
    first = tensor.data_ptr()
    if tensor.is_contiguous():  # nearly always; adding up strides takes several times as long
        return first, first + tensor.nbytes
    elements = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (elements + 1) * tensor.element_size()


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether address ranges of two tensors overlap. Interleaved ones count: a copy does no harm."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    a_first, a_end = _extent(settled(a))
    b_first, b_end = _extent(settled(b))
    return a_first < b_end and b_first < a_end


def near(sources: Mapping[str, torch.Tensor], outs: Iterable[torch.Tensor]) -> set[str]:
    """Names of the sources that overlap one of the outs, as `overlaps` says, without trying each pair."""
    firsts: list[int] = []
    ends: list[int] = []
    for first, end in sorted(_extent(settled(out)) for out in outs if out.numel()):
        if ends and first < ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            firsts.append(first)
            ends.append(end)
    found = set()
    for name, source in sources.items():
        if source.numel():
            first, end = _extent(settled(source))
            before = bisect_left(firsts, end)  # ranges that begin before the source ends
            if before and ends[before - 1] > first:
                found.add(name)
    return found


def check_storage(tensor: torch.Tensor, op: str) -> None:
    """Raises LayoutError for an output that has several elements at one address, as expand() and unfold()
    make them, and for one without strides. Contiguous ones cost a fraction of a microsecond."""
    tensor = settled(tensor)
    if tensor.layout is not torch.strided:
        raise LayoutError(
            f"{op}: expected a dense output, of layout torch.strided, found one of {tensor.layout}; give a "
            "dense tensor",
            op=op,
        )
    if tensor.is_contiguous() or tensor.numel() == 0:
        return
    found = repeats(tensor.shape, tensor.stride())
    if found:
        raise LayoutError(
            f"{op}: the output of {_strides_text(tensor)} holds several elements at one address; give one "
            "with memory for each element, for example a clone()",
            op=op,
        )
    if found is None:
        raise LayoutError(
            f"{op}: whether elements of the output of {_strides_text(tensor)} share an address takes too "
            "long to find out; give a contiguous one",
            op=op,
        )


def check_outs(outs: Mapping[str, torch.Tensor], op: str) -> None:
    """Raises LayoutError where results would be written over themselves or each other. Interleaved outputs,
    such as the columns of one matrix, are right."""
    for out in outs.values():
        check_storage(out, op)
    regions = [(_region(settled(out)), name) for name, out in outs.items() if out.numel()]
    still: list[tuple[Region, str]] = []  # those that have not ended where the next begins
    for region, name in sorted(regions):
        still = [(other, its) for other, its in still if other.end > region.first]
        for other, its in still:
            found = meet(other, region)
            if found:
                raise LayoutError(
                    f"{op}: the outputs {its!r} and {name!r} share memory; give each its own", op=op
                )
            if found is None:
                raise LayoutError(
                    f"{op}: whether the outputs {its!r} ({_strides_text(outs[its])}) and {name!r} "
                    f"({_strides_text(outs[name])}) share memory takes too long to find out; give each its "
                    "own",
                    op=op,
                )
        still.append((region, name))


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the storage. Tensors of unlike storages have version counters of their own; views of one
    have one, which counts what is written to any of them."""
    tensor = settled(tensor)
    # What has no storage of its own is refused, but maybe later.
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def note_written(*tensors: torch.Tensor) -> None:
    """Lets autograd know that these were written, so that a graph that saved an old value raises."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _region(tensor: torch.Tensor) -> Region:
    return Region(tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tensor.stride())


def _strides_text(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)} and strides {tensor.stride()}"
