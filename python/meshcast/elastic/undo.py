"""Undoes what a rank changes in a step before the step is committed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["Before"]


class Before:
    """Random generators, buffers of modules and hyperparameters of optimizers, as they are when it is made.

    training: a module, or an object with modules and optimizers as attributes. Parameters and what optimizers
    hold of them do not change before a step is committed: they are not copied.
    """

    def __init__(self, training: object) -> None:
        self._modules = list(_parts(training, nn.Module))
        self._optimizers = list(_parts(training, Optimizer))
        self._buffers = [(x, x.detach().clone()) for module in self._modules for x in module.buffers()]
        self._options = [(group, _options(group)) for each in self._optimizers for group in each.param_groups]
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Gradients are dropped: they may be of a part of the step."""
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        for group, options in self._options:
            group.update(options)
        # FSDP's modules name other tensors in the middle of a step than the optimizer does.
        for part in (*self._modules, *self._optimizers):
            part.zero_grad()
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    copied = {name: value for name, value in group.items() if name != "params"}
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in copied.items()}


def _parts(training: object, kind: type) -> Iterator[Any]:
    if isinstance(training, kind):
        yield training
    else:
        yield from (each for each in vars(training).values() if isinstance(each, kind))
