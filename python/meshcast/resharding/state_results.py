"""The results of reshard_state_dict on one rank: where tensors arrive, and what the caller gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .memory import as_dtensor, note_written
from .meshes import positive_placements
from .state_arguments import StateCall
from .state_entries import local_of
from .state_moves import Target

__all__ = ["Memory", "ReshardedState", "arriving", "fill", "note_outputs"]


class ReshardedState(dict[str, Any]):
    """{name: tensor} in the order of this rank's destinations, then entries that are no tensors."""

    version: int | None = None
    """That of the weights; None if the holders gave none."""


class Memory:
    """Local tensors that calls arrive in again and again, by target. tensors: those of the last call."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._targets: dict[str, Target] = {}

    def forget(self) -> None:
        """For calls of another kind. A call that is on its way keeps what it has."""
        self.tensors, self._targets = {}, {}

    def fitting(self, targets: dict[str, Target]) -> dict[str, torch.Tensor]:
        """`tensors`, empty where they are of other targets: ranks that hold may come to hold others, of which
        a rank that receives hears in the call itself."""
        if targets is not self._targets and targets != self._targets:
            self.tensors = {}
        self._targets = targets
        return self.tensors


def arriving(call: StateCall, targets: dict[str, Target], rank: int) -> dict[str, torch.Tensor]:
    """The local tensor that each target arrives in, on ranks inside: of an output, or new."""
    found = {}
    shapes: dict[Any, tuple[int, ...] | None] = {}
    for name, target in targets.items():
        if target.alias is not None:
            continue
        out = call.outs.get(name)
        if out is not None:
            found[name] = local_of(out)
            continue
        key = (target.layout, target.shape)
        if key not in shapes:
            inside = rank in target.layout.ranks
            shapes[key] = target.layout.local_shapes(target.shape)[rank] if inside else None
        shape = shapes[key]
        if shape is not None:
            found[name] = empty(shape, target.dtype, target.device_type)
    return found


def empty(shape: Sequence[int], dtype: torch.dtype, device_type: str) -> torch.Tensor:
    """Memory that a target arrives in. A rank without GPU may be outside a mesh on GPUs, where it makes
    shells."""
    device = "cuda" if device_type == "cuda" and torch.cuda.is_available() else None
    return torch.empty(shape, dtype=dtype, device=device)


def fill(
    result: ReshardedState,
    call: StateCall,
    targets: dict[str, Target],
    arrived: dict[str, torch.Tensor],
    values: dict[str, Any],
) -> None:
    """Puts into `result` what this rank asked for. Tied targets are one tensor, as at the source."""
    specs: dict[Any, DTensorSpec] = {}
    for name in call.wanted:
        if name not in targets:
            result[name] = values[name]
        elif name in call.outs:
            result[name] = call.outs[name]
        else:
            target = targets[name]
            twin = result.get(target.alias) if target.alias is not None else None
            if target.alias is not None and _one(call, name, target.alias) and twin is not None:
                result[name] = twin
            else:
                result[name] = _wrapped(call, target, arrived.get(target.alias or name), specs)
    for name, value in values.items():
        if name not in result:
            result[name] = value


def _one(call: StateCall, name: str, alias: str) -> bool:
    """Returns whether two tied results can be one object."""
    return call.meshes.get(name) == call.meshes.get(alias)


def _wrapped(
    call: StateCall, target: Target, local: torch.Tensor | None, specs: dict[Any, DTensorSpec]
) -> torch.Tensor:
    """The result around what arrived. specs: those made before; a copy costs a tenth."""
    shape = target.shape
    if local is None:  # outside: no elements, but the number of dimensions
        local = empty((0,) * len(shape), target.dtype, target.device_type).zero_()
    if target.name not in call.meshes:
        return local
    mesh, placements = call.meshes[target.name]
    key = (mesh, placements, shape, target.dtype)
    if key in specs:
        return as_dtensor(local, copy(specs[key]))
    stride = tuple(math.prod(max(size, 1) for size in shape[d + 1 :]) for d in range(len(shape)))
    meta = TensorMeta(torch.Size(shape), stride, target.dtype)
    spec = specs[key] = DTensorSpec(mesh, positive_placements(placements, len(shape)), tensor_meta=meta)
    return as_dtensor(local, spec)


def note_outputs(call: StateCall) -> None:
    """Lets autograd know that the outputs were written."""
    for out in call.outs.values():
        note_written(*([out, out._local_tensor] if isinstance(out, DTensor) else [out]))
