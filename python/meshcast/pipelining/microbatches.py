"""A batch cut into micro-batches: sizes are those of torch.tensor_split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, split_args_kwargs_into_chunks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from meshcast.errors import LayoutError

__all__ = ["Pieces", "as_it_is", "cut", "gathered"]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Arguments, keyword arguments and targets that come as micro-batches already; None where they come
    whole."""

    args: Sequence[Any] | None = None
    kwargs: Sequence[Mapping[str, Any]] | None = None
    targets: Sequence[Any] | None = None

    @property
    def given(self) -> bool:
        return not (self.args is None and self.kwargs is None and self.targets is None)

    def check(self, microbatches: int) -> None:
        """Raises LayoutError naming the one that does not have a piece for each micro-batch."""
        for name, given in (
            ("arg_mbs", self.args),
            ("kwarg_mbs", self.kwargs),
            ("target_mbs", self.targets),
        ):
            if given is not None and len(given) != microbatches:
                raise LayoutError(
                    f"{name} must have one entry for each of the {microbatches} micro-batches, "
                    f"found {len(given)}"
                )


def as_it_is(values: Any) -> Any:
    return values


def gathered(values: Any) -> Any:
    """The same with DTensors gathered: a micro-batch is the same rows whatever the mesh."""
    return tree_map(lambda value: value.full_tensor() if isinstance(value, DTensor) else value, values)


def cut(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int, args_spec: Any, kwargs_spec: Any, what: str
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]], list[int]]:
    """Micro-batches of whole values, as torch.distributed.pipelining makes them, and how many samples each
    has: those of the first tensor. Of fewer samples than micro-batches the last ones have none.

    Raises LayoutError naming a tensor without samples, or without the dimension that is to be cut.
    """
    if not args and not kwargs:
        return [], [], [1] * count
    sizes = [
        *_sizes(args, args_spec, what),
        *_sizes(tuple(kwargs.values()), kwargs_spec and tuple(kwargs_spec[name] for name in kwargs), what),
    ]
    parts = min([count, *sizes])
    pieces, named = split_args_kwargs_into_chunks(args, kwargs, parts, args_spec, kwargs_spec)
    if len(pieces) != parts:  # values without tensors are not cut: they are the same for all
        return [args] * count, [kwargs] * count, [1] * count
    while len(pieces) < count:
        pieces.append(_nothing_of(pieces[0], args_spec))
        named.append(_nothing_of(named[0], kwargs_spec))
    samples = (
        [sizes[0] // parts + (part < sizes[0] % parts) for part in range(parts)] if sizes else [1] * parts
    )
    return pieces, named, [*samples, *[0] * (count - parts)]


def _sizes(values: tuple[Any, ...], specs: Any, what: str) -> list[int]:
    sizes = []
    for index, value in enumerate(values):
        spec = TensorChunkSpec(0) if specs is None else specs[index]
        for tensor in tree_flatten(value)[0]:
            if not isinstance(tensor, torch.Tensor) or not isinstance(spec, TensorChunkSpec):
                continue
            size = tensor.shape[spec.split_dim] if tensor.dim() > spec.split_dim else 0
            if size == 0:
                raise LayoutError(
                    f"{what}: a tensor of shape {tuple(tensor.shape)} has no samples in dimension "
                    f"{spec.split_dim} to cut into micro-batches; give at least one, or a chunk spec",
                    op="pipeline",
                )
            sizes.append(size)
    return sizes


def _nothing_of(piece: Any, specs: Any) -> Any:
    """A micro-batch without samples, alike otherwise."""

    def empty(name: Any, value: Any) -> Any:
        spec = TensorChunkSpec(0) if specs is None else specs[name]
        if not isinstance(spec, TensorChunkSpec):
            return value
        return tree_map_only(torch.Tensor, lambda each: each.narrow(spec.split_dim, 0, 0), value)

    if isinstance(piece, dict):
        return {name: empty(name, value) for name, value in piece.items()}
    return tuple(empty(index, value) for index, value in enumerate(piece))
