"""The two copies of a state that a rank of Replicas has: one that is whole, and one that is being made."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from ..resharding.state_results import Memory

__all__ = ["Copies", "Copy"]


class Copy:
    """A copy of one step. own: what this rank held; guests: what it keeps for others, by name as local
    tensors; values: entries that are no tensors, of all ranks. All in host memory. step: None while it is not
    whole."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.own: dict[str, torch.Tensor] = {}
        self.guests: dict[str, torch.Tensor] = {}
        self.values: dict[str, Any] = {}
        self.memory = Memory()  # that the guests arrive in

    @torch.no_grad()
    def take(
        self,
        tensors: Mapping[str, torch.Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        ties: Mapping[str, str],
    ) -> None:
        """Copies local tensors; returns once they may be changed again. shapes: as layouts say them, which
        torch does not always for empty shards. ties: {name: an earlier name} of tensors that are one."""
        sources, targets = [], []
        for name, tensor in tensors.items():
            if name in ties:
                self.own[name] = self.own[ties[name]]
                continue
            if name not in self.own:
                self.own[name] = torch.empty(shapes[name], dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            if tensor.numel():
                sources.append(tensor.reshape(shapes[name]))
                targets.append(self.own[name])
        if targets:
            torch._foreach_copy_(targets, sources)


class Copies:
    """Any thread."""

    def __init__(self) -> None:
        self._both = (Copy(), Copy())
        self._lock = threading.Lock()

    def older(self) -> Copy:
        """Returns the copy to be written next, which is not whole from now on. To be called only once all
        ranks know that all have the newer one."""
        with self._lock:
            found = min(self._both, key=lambda copy: -1 if copy.step is None else copy.step)
            found.step = None
            return found

    def whole(self, copy: Copy, step: int, guests: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        """Everything of it is here."""
        with self._lock:
            copy.step, copy.guests, copy.values = step, guests, values

    @property
    def steps(self) -> list[int]:
        """The steps whose copies are whole here, ascending."""
        with self._lock:
            return sorted(copy.step for copy in self._both if copy.step is not None)

    def of(self, step: int) -> Copy:
        return next(copy for copy in self._both if copy.step == step)
