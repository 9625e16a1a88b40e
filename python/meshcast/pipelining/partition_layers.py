"""The description of a model for `partition`: its layers, their times and sizes, and their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from meshcast.pipelining.errors import ScheduleError

__all__ = ["Layer", "Value", "uses_of"]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that a layer makes for later ones.

    shape: of a whole micro-batch; dimension 0 is the samples. used_by: layers that take it; empty: the next
    one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    used_by: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that is never cut.

    Attributes:
        forward, backward: seconds for a whole micro-batch on one rank.
        values: what later layers take.
        inputs: the part of the backward that the gradients of its inputs take, in seconds; None: half.
        parameters: bytes of the parameters that are trained, on one rank.
        held: bytes that are kept of a whole micro-batch from the forward to the backward.
        sums_forward, sums_backward: bytes, for a whole micro-batch, of what tensor-parallel ranks sum in the
            forward and in the backward; one number for each sum.
        tensor: {degree: the same layer as one of so many tensor-parallel ranks has it}. Its values count no
            further. With a degree that is not there it is whole on each of the ranks.
        name: of the module.
    """

    forward: float
    backward: float
    values: tuple[Value, ...] = ()
    inputs: float | None = None
    parameters: int = 0
    held: int = 0
    sums_forward: tuple[int, ...] = ()
    sums_backward: tuple[int, ...] = ()
    tensor: Mapping[int, Layer] = field(default_factory=dict)
    name: str = ""


def uses_of(layers: Sequence[Layer]) -> dict[tuple[int, int], list[Value]]:
    """{(layer that makes it, layer that takes it): values}. Raises ScheduleError on what cannot be."""
    found: dict[tuple[int, int], list[Value]] = {}
    for index, layer in enumerate(layers):
        for degree, each in {1: layer, **layer.tensor}.items():
            where = f"layer {index}" + ("" if degree == 1 else f" with tensor-parallel degree {degree}")
            if not (each.forward >= 0 and each.backward >= 0):
                raise ScheduleError(f"{where}: times must be >= 0, found {each.forward} and {each.backward}")
            if each.inputs is not None and not 0 <= each.inputs <= each.backward:
                raise ScheduleError(
                    f"{where}: inputs is a part of its backward, {each.backward}, found {each.inputs}"
                )
            if min(each.parameters, each.held, *each.sums_forward, *each.sums_backward) < 0:
                raise ScheduleError(f"{where}: bytes must be >= 0")
            if degree < 1:
                raise ScheduleError(f"{where}: degrees are at least 2")
        for value in layer.values:
            for user in value.used_by or (index + 1,):
                if not index < user < len(layers) + (not value.used_by):
                    raise ScheduleError(
                        f"layer {index}: its value cannot be used by layer {user}; use {index + 1} to "
                        f"{len(layers) - 1}"
                    )
                found.setdefault((index, user), []).append(value)
    return found
