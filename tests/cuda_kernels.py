"""The kernels of csrc/cuda on CUDA tensors, for the tests and benchmarks of them.

Only builds with CUDA have them (`available()`). Calls enqueue on the current stream of the destination's
device; a batch of pairs shares launches. Both tensors of a pair have one shape and any strides, and do not
overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from meshcast import _C
from meshcast.base.checks import dtype_name
from meshcast.errors import LayoutError
from meshcast.transfers.medium import CASTS, REDUCTIONS

Pair = tuple[torch.Tensor, torch.Tensor]


def available() -> bool:
    return hasattr(_C, "cuda")


def copy(pairs: Sequence[Pair], most_blocks: int = 0) -> None:
    """Copy the first tensor of each pair into the second, whose dtype has as many bytes.

    Args:
        pairs: source and destination.
        most_blocks: of a kernel, to leave the rest of the GPU to others; 0 for as many as there is work for.
    """
    for source, destination in pairs:
        if source.element_size() != destination.element_size():
            raise LayoutError(
                f"copy: elements of {source.dtype} and {destination.dtype} have different sizes"
            )
    if pairs:
        _kernels().copy_boxes(_pairs(pairs), *_target(pairs[0][1], most_blocks))


def cast(pairs: Sequence[Pair], most_blocks: int = 0) -> None:
    """Convert the first tensor of each pair into the second, rounding as `torch.Tensor.to` does.

    All sources have one dtype and all destinations another, of float32, bfloat16, float16, float8_e4m3fn and
    float8_e5m2.
    """
    if not pairs:
        return
    known = _kernels().ElementType.__members__
    types = {name: known[name] for name in map(dtype_name, CASTS)}
    source, destination = (_only_dtype([pair[side] for pair in pairs], types, "cast") for side in (0, 1))
    _kernels().cast_boxes(_pairs(pairs), source, destination, *_target(pairs[0][1], most_blocks))


def reduce(pairs: Sequence[Pair], op: str, most_blocks: int = 0) -> None:
    """Second = op(first, second) for each pair; op is sum, avg (which adds), min, max or product."""
    if not pairs:
        return
    kernels = _kernels()
    dtype = _only_dtype([tensor for pair in pairs for tensor in pair], _reduced(), "reduce")
    operation = kernels.ReduceOp.__members__[op]
    kernels.reduce_boxes(_pairs(pairs), dtype, operation, *_target(pairs[0][1], most_blocks))


def divide(tensors: Sequence[torch.Tensor], count: int, most_blocks: int = 0) -> None:
    """Divide every element in place by `count`; integers round towards zero."""
    if not tensors:
        return
    dtype = _only_dtype(tensors, _reduced(), "divide")
    views = [_view(tensor) for tensor in tensors]
    _kernels().divide_boxes(views, dtype, count, *_target(tensors[0], most_blocks))


def _kernels() -> Any:
    if not available():
        raise LayoutError("this build of meshcast has no CUDA code: build it with a CUDA torch and nvcc")
    return _C.cuda


def _reduced() -> dict[str, Any]:
    known = _kernels().ElementType.__members__
    return {name: known[name] for name in map(dtype_name, REDUCTIONS)}


def _view(tensor: torch.Tensor) -> tuple[int, int, list[int], list[int]]:
    if tensor.device.type != "cuda":
        raise LayoutError(f"a kernel takes tensors on a GPU, not on {tensor.device}: move it there first")
    size = tensor.element_size()
    return tensor.data_ptr(), size, list(tensor.shape), [stride * size for stride in tensor.stride()]


def _pairs(pairs: Sequence[Pair]) -> list[tuple[Any, Any]]:
    for source, destination in pairs:
        if source.shape != destination.shape or source.device != destination.device:
            raise LayoutError(
                f"a pair has one shape and one device, not {tuple(source.shape)} on {source.device} and "
                f"{tuple(destination.shape)} on {destination.device}"
            )
    return [(_view(source), _view(destination)) for source, destination in pairs]


def _target(tensor: torch.Tensor, most_blocks: int) -> tuple[int, int, int]:
    device = tensor.device
    return device.index, torch.cuda.current_stream(device).cuda_stream, most_blocks


def _only_dtype(tensors: Sequence[torch.Tensor], types: dict[str, Any], call: str) -> Any:
    names = {dtype_name(tensor.dtype) for tensor in tensors}
    if len(names) != 1 or not names <= types.keys():
        raise LayoutError(
            f"{call}: one of {', '.join(types)} is needed throughout, not {', '.join(sorted(names))}"
        )
    return types[names.pop()]
